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
        strips = [self._strip(line, width) for line in drawn[:height]]
        strips += [Strip.blank(width, self._style("text"))] * (height - len(strips))
        before, self._strips = self._strips, strips
        if len(before) != len(strips) or (before and before[0].cell_length != width):
            self.refresh()
            return
        regions = [
            Region(*span, 1)
            for y, (old, new) in enumerate(zip(before, strips))
            if (span := _changed(y, old, new)) is not None
        ]
        if regions:
            self.refresh(*regions)

    def render_line(self, y: int) -> Strip:
        if y < len(self._strips):
            return self._strips[y]
        return Strip.blank(self.size.width, self.rich_style)

    def notify_style_update(self) -> None:
        self._styles.clear()
        super().notify_style_update()
        if self.is_attached and self._strips:
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
        return Strip(segments).adjust_cell_length(width, self._style("text")).simplify()


def _changed(y: int, old: Strip, new: Strip) -> tuple[int, int, int] | None:
    """Where two strips of one length differ, as (x, y, width); None where they do not."""
    if old == new:
        return None
    width = new.cell_length
    left = 0
    for before, after in zip(old, new):
        if before != after:
            if before.style == after.style:
                left += _common(before.text, after.text)
            break
        left += after.cell_length
    right = width
    for before, after in zip(reversed(list(old)), reversed(list(new))):
        if before != after:
            if before.style == after.style:
                right -= _common(before.text[::-1], after.text[::-1])
            break
        right -= after.cell_length
    left, right = min(left, width - 1), max(right, 1)
    return (left, y, right - left) if right > left else (0, y, width)


def _common(one: str, other: str) -> int:
    """Length of the common start; 0 for text whose cells are not its characters."""
    if not (one.isascii() or all(ord(c) < 0x3000 for c in one)) or not all(ord(c) < 0x3000 for c in other):
        return 0
    length = 0
    for a, b in zip(one, other):
        if a != b:
            break
        length += 1
    return length
