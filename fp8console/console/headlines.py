"""The first two lines: which run, is it healthy, how fast, what happened last. In words, for any width."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fp8console.console import lines
from fp8console.console.glyphs import Glyphs
from fp8console.console.lines import Line
from fp8console.console.snapshot import Snapshot
from fp8console.console.wording import (
    clock_text,
    count_text,
    left_text,
    plural,
    rate_text,
    short_number,
    step_time_text,
)

if TYPE_CHECKING:
    from fp8console.runs.status import RunStatus

#: Seconds without a step after which an empty screen explains itself.
PATIENCE = 5.0
ENDED = ("finished", "failed", "lost")


def precision(command: list[str] | None) -> str | None:
    """The value of a ``--precision`` argument of the training's command."""
    for index, word in enumerate(command or []):
        if word == "--precision" and index + 1 < len(command or []):
            return (command or [])[index + 1]
        if word.startswith("--precision="):
            return word.partition("=")[2]
    return None


def first_line(snapshot: Snapshot, width: int, glyphs: Glyphs) -> Line:
    """Name, precision, state, step, epoch, speed, time left; alerts and the clock at the right end.

    What doesn't fit is left out, the least important part first; the state always stands.
    """
    status = snapshot.status
    left: list[tuple[int, Line]] = [
        (2, [(lines.clean(status.name or status.id), "title")]),
        (8, [(lines.clean(precision(status.command) or ""), "text")]),
        (0, state_spans(snapshot, glyphs)),
        (1, [("step " + count_text(status.step), "value")] if _shows_step(status) else []),
        (6, epoch_spans(status)),
        (4, [(step_time_text(status.step_seconds) + "/step", "text")] if _is_moving(status) else []),
        (1, [(f"no step for {clock_text(status.silent_seconds)}", "alarm")] if status.silent_seconds else []),
        (9, [(rate_text(status.steps_per_second), "text")] if _is_moving(status) else []),
        (5, [("left " + left_text(status.seconds_left), "text")] if status.seconds_left is not None else []),
    ]
    right: list[tuple[int, Line]] = [
        (3, [(plural(snapshot.alerts, "alert"), "alarm")] if snapshot.alerts else []),
        (7, [(time.strftime("%H:%M:%S", time.localtime(snapshot.time)), "faint")]),
    ]
    left, right = [part for part in left if lines.plain(part[1])], [part for part in right if part[1]]
    gap = 3
    while len(left) + len(right) > 1 and _total(left, gap) + _total(right, gap) + 2 > width:
        if gap > 2:
            gap = 2
            continue
        least = max(*left, *right, key=lambda part: part[0])
        if least[0] == 0:
            break
        if (
            least[0] == 2
            and (spare := width - 2 - _total([p for p in left if p[0] != 2], gap) - _total(right, gap)) > 8
        ):
            left[0] = (2, lines.fit(left[0][1], min(spare - gap, lines.width_of(left[0][1])), glyphs.ellipsis))
            break
        left, right = [part for part in left if part is not least], [part for part in right if part is not least]
    return lines.spread(
        [(" ", "text"), *_joined(left, gap)], [*_joined(right, gap), (" ", "text")], width, glyphs.ellipsis
    )


def _total(parts: list[tuple[int, Line]], gap: int) -> int:
    return sum(lines.width_of(part) + gap for _, part in parts)


def _joined(parts: list[tuple[int, Line]], gap: int) -> Line:
    joined: Line = []
    for index, (_, part) in enumerate(parts):
        joined += ([(" " * gap, "text")] if index else []) + part
    return joined


def _shows_step(status: RunStatus) -> bool:
    if status.step is None:
        return False
    return not (status.state == "paused" or (status.asked and status.state == "running"))


def _is_moving(status: RunStatus) -> bool:
    if status.silent_seconds is not None:
        return False
    return status.step_seconds is not None and status.state in ("running", "stopping")


def state_spans(snapshot: Snapshot, glyphs: Glyphs) -> Line:
    """The state as glyph and words."""
    status = snapshot.status
    step = count_text(status.step)
    if status.state == "running":
        if status.asked:
            return [(f"{glyphs.asked} {_asked_word(status.asked)} asked, training is at step {step}", "asked")]
        if status.nan_since.get("loss") is not None:
            return [(f"{glyphs.alert} running", "alarm")]
        return [(f"{glyphs.running} running", "good")]
    if status.state == "paused":
        held = None if status.paused_since is None else snapshot.time - status.paused_since
        at = count_text(status.paused_at if status.paused_at is not None else status.step)
        spans: Line = [(f"{glyphs.paused} paused at step {at} for {clock_text(held)}", "warning")]
        if status.asked:
            spans.append((f"  {glyphs.asked} {_asked_word(status.asked)} asked", "asked"))
        return spans
    if status.state == "starting":
        return [(f"{glyphs.starting} starting", "asked")]
    if status.state == "stopping":
        return [(f"{glyphs.stopping} stopping", "warning")]
    if status.state == "lost":
        return [(f"{glyphs.lost} lost: neither the training nor its supervisor runs", "alarm")]
    exit_text = "exit unknown" if status.exit_status is None else f"exit {status.exit_status}"
    if status.state == "finished":
        return [(f"{glyphs.ended} finished, {exit_text}", "good")]
    reason = status.error or (f"ended by {status.signal}" if status.signal else None)
    return [(f"{glyphs.failed} failed, {exit_text}" + (f": {lines.clean(reason)}" if reason else ""), "alarm")]


def _asked_word(asked: dict[str, Any]) -> str:
    command = asked.get("command")
    name = command.get("name") if isinstance(command, dict) else None
    return str(name or "command").replace("rollback", "roll back")


def epoch_spans(status: RunStatus) -> Line:
    """Epoch, and how far into it where the loader's length is known."""
    if status.epoch is None or status.state in ENDED:
        return []
    spans: Line = [(f"epoch {status.epoch:,}", "text")]
    if status.epoch_batch is not None and status.epoch_batches:
        share = min(1.0, status.epoch_batch / status.epoch_batches)
        spans.append((f"  {share * 100:.0f}%", "text"))
    return spans


def second_line(snapshot: Snapshot, width: int, glyphs: Glyphs) -> Line:
    """The run's health in words; a clause for which there is no room is left out whole."""
    dot = f" {glyphs.point} "
    spans: Line = [(" ", "text")]
    for text, role in health(snapshot):
        text = lines.clean(text)
        room = width - lines.width_of(spans) - len(dot)
        if len(spans) > 1:
            text = _shortened(text, room)
            if len(text) > room:
                continue
        if not text:
            continue
        spans += ([(dot, "faint")] if len(spans) > 1 else []) + [(text, role)]
    return lines.fit(spans, width, glyphs.ellipsis)


def _shortened(text: str, room: int) -> str:
    """A clause about an incident without the details behind its colon, where that is what makes it too long."""
    start = text.find(": ", len("last: "))
    return text if start < 0 or len(text) <= room else text[:start]


def health(snapshot: Snapshot) -> Line:
    """The clauses of the second line, the most telling first."""
    status = snapshot.status
    if status.step is None:
        return [(text, "asked" if index == 0 else "text") for index, text in enumerate(no_step_words(snapshot))]
    skips = "" if status.skipped is None else f"{plural(status.skipped, 'skip')} in {plural(snapshot.count, 'step')}"
    if status.state in ENDED:
        ran = None if status.created is None or status.ended is None else status.ended - status.created
        return [
            (f"ran {left_text(ran)}" if ran is not None else "", "text"),
            (f"{plural(snapshot.count, 'step')}, last loss {short_number(status.loss)}", "text"),
            (f"last: {status.last_incident}" if status.last_incident else "", "text"),
            (skips, "text"),
            (_newest_point(status), "text"),
        ]
    clauses: Line = []
    if status.supervised is False:
        clauses.append(("the supervisor is gone: the training goes on and takes no commands", "alarm"))
    for name, title in (("loss", "loss"), ("grad_norm", "gradient norm")):
        since = status.nan_since.get(name)
        if since is not None:
            clauses.append((f"{title} not finite since step {since:,}", "alarm"))
    if not any(role == "alarm" and "finite" in text for text, role in clauses):
        clauses.append(_healthy(status))
    clauses.append((f"last: {status.last_incident}" if status.last_incident else "", "text"))
    clauses.append((skips, "text"))
    clauses.append((_newest_point(status), "text"))
    clauses += [(note, "faint") for note in status.notes[-1:] if status.supervised is not False]
    return clauses


def _healthy(status: RunStatus) -> tuple[str, str]:
    if status.healthy_steps is None:
        return "", "text"
    if status.healthy_steps <= 0:
        return "trouble in the newest step", "warning"
    return f"healthy for {plural(status.healthy_steps, 'step')}", "good"


def _newest_point(status: RunStatus) -> str:
    points = [point for point in status.restore_points if not point.get("abandoned")]
    if not points:
        return "no restore point"
    newest = max(points, key=lambda point: int(point["step"]))
    return f"newest restore point {newest['step']:,} ({verified_word(newest.get('verified'))})"


def verified_word(verified: bool | None) -> str:
    """What is known of a restore point's digest."""
    if verified is None:
        return "not verified yet"
    return "verified" if verified else "damaged"


def no_step_words(snapshot: Snapshot) -> list[str]:
    """Why there is nothing to see yet, as one or more short lines."""
    status = snapshot.status
    if status.notes and status.state in (*ENDED, "starting", "running"):
        return ["no step yet" if status.state not in ENDED else "no step was taken", *status.notes[-2:]]
    if status.state in ENDED:
        return ["no step was taken", "the probe saw no optimizer step; the output may say why (o)"]
    waited = None if status.created is None else snapshot.time - status.created
    if waited is None or waited < PATIENCE:
        return ["starting, no step yet"]
    if not snapshot.torch_imported:
        return [f"no step yet after {clock_text(waited)}", "the script has not imported torch so far"]
    return [
        f"no step yet after {clock_text(waited)}",
        "the probe has seen no optimizer step; a script may take a while to load, or call fc.attach and run.step",
    ]
