"""A widget that is lines of text with roles, and repaints only the part of a line that changed."""

from __future__ import annotations

from rich.segment import Segment
from rich.style import Style
from textual.events import Resize
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from fp8console.console.glyphs import UNICODE, Glyphs
from fp8console.console.lines import Line, clean
from fp8console.console.snapshot import Snapshot


class Panel(Widget):
    """Draws ``draw``'s lines. Textual repaints what is marked dirty, so what is marked decides the bytes sent."""

    def __init__(self, id: str | None = None, glyphs: Glyphs = UNICODE) -> None:
        super().__init__(id=id)
        self.glyphs = glyphs
        self.snapshot: Snapshot | None = None
        self._lines: list[Line] = []
        self._strips: list[Strip] = []
        self._styles: dict[str, Style] = {}

    def draw(self, snapshot: Snapshot, width: int, height: int) -> list[Line]:
        """The panel's lines, at most ``height``, each ``width`` cells. A subclass's whole task."""
        raise NotImplementedError

    def outline(self, width: int, height: int) -> list[Line]:
        """What stands here before the first snapshot."""
        return []

    def show(self, snapshot: Snapshot) -> None:
        """Take a new snapshot and repaint what it changes."""
        self.snapshot = snapshot
        self.redraw()

    def redraw(self) -> None:
        """Draw again and mark as dirty only what differs from what is on the screen."""
        width, height = self.size
        if not width or not height or not self.is_attached:
            return
        drawn = self.outline(width, height) if self.snapshot is None else self.draw(self.snapshot, width, height)
        drawn = drawn[:height] + [[]] * (height - len(drawn))
        if len(drawn) != len(self._strips) or self._strips[0].cell_length != width:
            self._lines, self._strips = drawn, [self._strip(line, width) for line in drawn]
            self.refresh()
            return
        regions: list[Region] = []
        for y, (old, new) in enumerate(zip(self._lines, drawn)):
            if old != new:
                strip = self._strip(new, width)
                left, right = _changed(self._strips[y], strip)
                self._strips[y] = strip
                regions.append(Region(left, y, right - left, 1))
        self._lines = drawn
        if regions:
            self.refresh(*regions)

    def render_line(self, y: int) -> Strip:
        if y < len(self._strips):
            return self._strips[y]
        return Strip.blank(self.size.width, self.rich_style)

    def notify_style_update(self) -> None:
        self._styles.clear()
        self._lines = []
        super().notify_style_update()
        if self.is_attached and self._strips:
            self._strips = []
            self.redraw()

    def _on_resize(self, event: Resize) -> None:
        self.redraw()

    def _style(self, role: str) -> Style:
        style = self._styles.get(role)
        if style is None:
            style = self._styles[role] = self.screen.get_component_rich_style(f"role--{role}")
        return style

    def _strip(self, line: Line, width: int) -> Strip:
        plain = not self.glyphs.braille
        segments = [Segment(clean(text, plain), self._style(role)) for text, role in line if text]
        return Strip(segments).adjust_cell_length(width, self._style("text"))


def _changed(old: Strip, new: Strip) -> tuple[int, int]:
    """The first column where two strips of one length differ, and the column after the last one."""
    width = new.cell_length
    left = _equal_cells(list(old), list(new))
    right = width - _equal_cells(list(reversed(list(old))), list(reversed(list(new))), backwards=True)
    return (left, right) if left < right else (0, width)


def _equal_cells(old: list[Segment], new: list[Segment], backwards: bool = False) -> int:
    """Cells that two lists of segments begin (or, given backwards, end) with alike."""
    cells = 0
    for before, after in zip(old, new):
        if before == after:
            cells += after.cell_length
            continue
        if before.style == after.style and _is_narrow(before.text) and _is_narrow(after.text):
            pairs = zip(before.text[::-1], after.text[::-1]) if backwards else zip(before.text, after.text)
            for a, b in pairs:
                if a != b:
                    break
                cells += 1
        break
    return cells


def _is_narrow(text: str) -> bool:
    """Whether every character takes one cell, for sure."""
    return text.isascii() or all(character < "\u0300" or "\u2000" < character < "\u2e00" for character in text)
