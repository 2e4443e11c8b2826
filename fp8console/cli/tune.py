"""``fp8console tune``: a baseline of a training, and from it a profile of scaler and clip settings."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8console.cli import supervised_run
from fp8console.cli.arguments import CommandFailed
from fp8console.cli.launch import say
from fp8console.cli.tune_words import TuneWords, parse
from fp8console.protocol import paths

#: Seconds between two lines of progress where there is no terminal.
PLAIN_LINES = 5.0
#: Seconds between the signal to a training and its kill.
KILL_AFTER = 10.0
#: Lines of a failed training's output that are shown.
TAIL = 15


def main(words: Sequence[str]) -> int:
    """Runs the baseline, prints what it shows, writes the profile. Raises UsageError and CommandFailed."""
    given = parse(words)
    run_id, run_dir = supervised_run.launch(given.training, given.options)
    say(f"run {run_id}; the training's output: {run_dir / paths.OUTPUT}")
    ended = _watch(run_dir, given)

    from fp8console.cli.tune_report import report

    made = report(run_dir, given, ended)
    if not given.then_train:
        return 0
    from fp8console.cli.headless import follow

    _apply(run_dir, made)
    return follow(run_dir)


def _watch(run_dir: Path, given: TuneWords) -> dict[str, Any] | None:
    """Wait for the baseline's end; its event, or None when the training ended before. Raises CommandFailed."""
    from fp8console.cli.headless import exit_status
    from fp8console.runs.run import Run

    run = Run(run_dir)
    shown = _Progress(int(given.options.settings.tune_steps or 0))
    try:
        while True:
            run.refresh()
            event = _baseline(run, "ended")
            failed = _baseline(run, "failed") or _switched_off(run)
            status = exit_status(run)
            records = run.rank(0)
            shown.show(run, min(len(records), shown.steps))
            if event is not None and (given.then_train or status is not None):
                shown.end(run)
                return event
            if failed is not None:
                shown.end(run)
                supervised_run.end(run, signal.SIGTERM, KILL_AFTER)
                raise CommandFailed(f"tune: {failed.get('reason') or failed['text']}")
            if status is not None:
                shown.end(run)
                _check_early_end(run, status)
                return None
            if event is not None and time.time() - event["time"] > given.options.settings.grace_seconds:
                supervised_run.end(run, signal.SIGTERM, KILL_AFTER)  # the script caught the exit and trains on
            if supervised_run.is_lost(run.info):
                raise CommandFailed("tune: the run is lost: its supervisor and its training are gone")
            time.sleep(supervised_run.POLL)
    except KeyboardInterrupt:
        shown.end(run)
        supervised_run.end(run, signal.SIGINT, KILL_AFTER)
        raise


def _baseline(run: Any, what: str) -> dict[str, Any] | None:
    found = [
        e for e in run.events.events if e["kind"] == "baseline" and e.get("what") == what and e.get("rank", 0) == 0
    ]
    return found[-1] if found else None


def _switched_off(run: Any) -> dict[str, Any] | None:
    """The fault of a part without which there is no baseline."""
    parts = ("baseline", "boundary", "records")
    return next((e for e in run.events.events if e["kind"] == "fault" and e.get("part") in parts), None)


def _check_early_end(run: Any, status: int) -> None:
    """The training ended by itself: with an error there is nothing to go on with. Raises CommandFailed."""
    if status != 0:
        for line in run.output.lines(TAIL):
            print(f"  | {line}", file=sys.stderr)
        last = next((e for e in reversed(run.events.events) if e["kind"] == "ended"), None)
        text = (
            str(last["text"]) + (f": {last['error']}" if last.get("error") else "") if last else "the training failed"
        )
        raise CommandFailed(f"tune: {text}; its last output is above")
    if _baseline(run, "begun") is None:
        notice = next((e["text"] for e in run.events.events if e["kind"] == "notice"), None)
        why = f": {notice}" if notice else ": no training step was seen"
        raise CommandFailed(f"tune: the training ended without a baseline{why}")


def _apply(run_dir: Path, made: dict[str, Any]) -> None:
    """Give the training that goes on what was found; what it has no place for is said."""
    from fp8console.protocol import client, commands
    from fp8console.runs.run import Run
    from fp8console.runs.status import status

    run = Run(run_dir)
    run.refresh()
    now = status(run)
    command = changes(made, now.scaler, now.clip_limit)
    clip_norm = made.get("clipping", {}).get("clip_norm")
    if clip_norm is not None and "clip_norm" not in command:
        say(f"clip_norm {clip_norm:g} is not applied: the script itself clips to {now.clip_limit:g}")
    if len(command) == 1:
        return
    try:
        socket = run.info.get("socket") or paths.socket_path(run_dir)
        answer = client.send(Path(str(socket)), commands.validate(command), 60.0)
    except (client.ClientError, commands.CommandError) as error:
        say(f"the settings could not be applied to the training that goes on: {error}")
        return
    if answer["state"] == "refused":
        say(f"the training that goes on refused the settings: {answer.get('reason')}")
    else:
        say(f"applied at step {answer.get('step')}: {commands.describe(command)}")


def changes(made: dict[str, Any], scaler: dict[str, Any] | None, clip_limit: float | None) -> dict[str, Any]:
    """The command that gives a running training what a profile has for it; only a name where that is nothing.

    ``scaler`` is what the run said of its own, None without one; ``clip_limit`` the norm that the script clips to: a
    smaller one than the profile's stays, as it does with ``--profile``.
    """
    # Only a scaler of ours has a margin.
    left_out = ("preset",) if scaler is not None and "margin" in scaler else ("preset", "margin")
    names = {"init_scale": "scale"}
    settings = made["scaler"] if scaler is not None else {}
    command: dict[str, Any] = {"name": "set"}
    command.update({names.get(name, name): value for name, value in settings.items() if name not in left_out})
    clip_norm = made.get("clipping", {}).get("clip_norm")
    if clip_norm is not None and not (clip_limit is not None and clip_limit <= clip_norm):
        command["clip_norm"] = clip_norm
    return command


class _Progress:
    """A bar on a terminal; elsewhere a line now and then. On stderr: stdout is for the result."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._bar = sys.stderr.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
        self._next = 0.0
        self._last = -1

    def show(self, run: Any, done: int) -> None:
        now = time.monotonic()
        if done == self._last or (now < self._next and done < self.steps):
            return
        self._next, self._last = now + (supervised_run.POLL if self._bar else PLAIN_LINES), done
        self._write(run, done)

    def end(self, run: Any) -> None:
        """The last state, and the line's end."""
        done = min(len(run.rank(0)), self.steps)
        if self._bar:
            self._write(run, done)
            print(file=sys.stderr, flush=True)
        elif done != self._last:
            self._write(run, done)

    def _write(self, run: Any, done: int) -> None:
        text = _progress_text(run, done, self.steps)
        if not self._bar:
            say(text)
            return
        width = 24
        filled = round(width * done / max(1, self.steps))
        columns = _columns(sys.stderr)
        line = f"[{'#' * filled}{'.' * (width - filled)}] {text}"[: columns - 1]
        print(f"\r{line:<{columns - 1}}", end="", file=sys.stderr, flush=True)


def _columns(stream: Any) -> int:
    try:
        return max(20, os.get_terminal_size(stream.fileno()).columns)
    except (OSError, ValueError):
        return 80


def _progress_text(run: Any, done: int, steps: int) -> str:
    from fp8console.cli import wording
    from fp8console.runs.status import status

    if not done:
        return "baseline: waiting for the first step"
    now = status(run)
    words = [f"baseline: {done}/{steps} steps", f"loss {wording.figure(now.loss)}"]
    if now.skipped:
        words.append(f"{now.skipped} skipped")
    if now.steps_per_second and done < steps:
        words.append(f"{wording.duration((steps - done) / now.steps_per_second)} left")
    return ", ".join(words)
