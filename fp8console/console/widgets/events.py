"""What happened, newest first: a glyph a kind, the step, the words."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from fp8console.console import lines
from fp8console.console.glyphs import Glyphs
from fp8console.console.lines import Line
from fp8console.console.snapshot import Snapshot
from fp8console.console.widgets.panel import Panel
from fp8console.console.wording import short_number
from fp8console.protocol.numbers import number

#: Events of course: of several in a row only the newest is shown.
ROUTINE = ("snapshot", "verified", "point_dropped")


class Events(Panel):
    """The newest events that fit."""

    last = False

    def outline(self, width: int, height: int) -> list[Line]:
        return lines.frame([], width, height, self.glyphs, [("events", "title")], (), False, self.last)

    def draw(self, snapshot: Snapshot, width: int, height: int) -> list[Line]:
        room = height - 1 - int(self.last)
        body: list[Line] = []
        for event in newest(snapshot.events):
            if len(body) >= room:
                break
            body.append([(" ", "text"), *row(event, self.glyphs)])
        if not body:
            body = [[(" nothing has happened yet", "faint")]]
        return lines.frame(body, width, height, self.glyphs, [("events", "title")], (), False, self.last)


def newest(events: tuple[dict[str, Any], ...]) -> Iterable[dict[str, Any]]:
    """Events from the newest back, without the routine ones that only repeat the one after them."""
    after_routine = False
    for event in reversed(events):
        routine = event["kind"] in ROUTINE and event.get("ok") is not False
        if routine and (after_routine or event["kind"] == "point_dropped"):
            continue
        after_routine = routine
        yield event


def row(event: dict[str, Any], glyphs: Glyphs) -> Line:
    """The step, or the time of day where there is none; the glyph; the words."""
    step = event.get("step")
    when = f"{step:,}" if isinstance(step, int) else time.strftime("%H:%M:%S", time.localtime(event["time"]))
    glyph, role = kind_glyph(event, glyphs)
    words = "text" if role in ("faint", "good", "point", "rollback") else role
    text = str(event.get("text") or event["kind"])
    if isinstance(step, int):
        text = without_step(text, step)
    point = event.get("point")
    if isinstance(point, dict) and (loss := number(point.get("loss"))) is not None:
        text += f", loss {short_number(loss)}"
    return [(f"{when:<9} ", "faint"), (glyph, role), (" " + lines.clean(text), words)]


def without_step(text: str, step: int) -> str:
    """The words without the step that stands before them already."""
    for digits in (f"{step:,}", str(step)):
        for words in (f" at step {digits}", f" since step {digits}", f"step {digits} ", f"step {digits}: "):
            shorter = text.replace(words, "", 1)
            if shorter != text and shorter.strip(" ,:"):
                return shorter
    return text


def kind_glyph(event: dict[str, Any], glyphs: Glyphs) -> tuple[str, str]:
    """The glyph of an event and its role."""
    kind = event["kind"]
    if kind == "verified":
        return (glyphs.check, "point") if event.get("ok") else (glyphs.alert, "alarm")
    if kind == "ended":
        return (glyphs.ended, "good") if event.get("exit_status") == 0 else (glyphs.failed, "alarm")
    if kind == "rolled_back" and event.get("digests_equal") is False:
        return glyphs.alert, "alarm"
    known = {
        "skipped": (glyphs.skipped, "skipped"),
        "nonfinite": (glyphs.alert, "alert"),
        "clipping": (glyphs.alert, "alert"),
        "hardware": (glyphs.alert, "alert"),
        "fault": (glyphs.alert, "warning"),
        "rolled_back": (glyphs.rollback, "rollback"),
        "snapshot": (glyphs.restore_point, "point"),
        "checkpoint": (glyphs.restore_point, "point"),
        "paused": (glyphs.paused, "warning"),
        "resumed": (glyphs.resumed, "good"),
        "recovered": (glyphs.resumed, "good"),
        "applied": (glyphs.check, "good"),
        "refused": (glyphs.failed, "warning"),
        "stopping": (glyphs.stopping, "warning"),
        "launched": (glyphs.running, "faint"),
    }
    return known.get(kind, (glyphs.point, "faint"))
