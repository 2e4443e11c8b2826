"""The first two lines of every screen that shows the run."""

from __future__ import annotations

from fp8console.console import headlines, lines
from fp8console.console.lines import Line
from fp8console.console.snapshot import Snapshot
from fp8console.console.widgets.panel import Panel


class Headline(Panel):
    """Line one: the run and its state. Line two: its health, or what became of the operator's last command."""

    answer: tuple[str, str] | None = None

    def tell(self, answer: tuple[str, str] | None) -> None:
        """Put (text, role) in the second line's place, or give it back."""
        self.answer = answer
        self.redraw()

    def draw(self, snapshot: Snapshot, width: int, height: int) -> list[Line]:
        second = headlines.second_line(snapshot, width, self.glyphs)
        if self.answer is not None:
            text, role = self.answer
            second = lines.fit([(" " + text, role)], width, self.glyphs.ellipsis)
        return [headlines.first_line(snapshot, width, self.glyphs), second]
