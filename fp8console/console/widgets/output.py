"""The last lines of what the training prints."""

from __future__ import annotations

from fp8console.console import lines
from fp8console.console.lines import Line
from fp8console.console.snapshot import Snapshot
from fp8console.console.widgets.panel import Panel


class Output(Panel):
    """As many of the output's last lines as fit."""

    first = False
    last = True

    def outline(self, width: int, height: int) -> list[Line]:
        return lines.frame([], width, height, self.glyphs, [("output", "title")], (), self.first, self.last)

    def draw(self, snapshot: Snapshot, width: int, height: int) -> list[Line]:
        room = max(0, height - 1 - int(self.last))
        tail = snapshot.output[-room:] if room else ()
        body: list[Line] = [[(" " + lines.clean(text), "text")] for text in tail]
        if not body:
            body = [[(" the training has printed nothing yet", "faint")]]
        return lines.frame(body, width, height, self.glyphs, [("output", "title")], (), self.first, self.last)
