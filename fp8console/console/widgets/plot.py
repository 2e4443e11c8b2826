"""The plot widget: one curve over steps in a frame, its value in the title. What it draws is in curves.py.

Kept apart because curves need numpy, and importing that before the first paint would double the time to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fp8console.console import lines
from fp8console.console.glyphs import UNICODE, Glyphs
from fp8console.console.lines import Line
from fp8console.console.snapshot import Snapshot
from fp8console.console.widgets.panel import Panel
from fp8console.console.wording import scale_text, short_number, step_time_text

if TYPE_CHECKING:
    from fp8console.console.widgets.curves import Curve

GUTTER = 8  # cells for the labels of the value axis


@dataclass(frozen=True)
class Series:
    """What a plot shows: a column of the step records, its name for people, its axis and its colour's role."""

    column: str
    title: str
    axis: str = "auto"
    role: str = "loss"
    hold: bool = False

    def text(self, value: float | None) -> str:
        """A value of this series as it reads."""
        if self.column == "scale":
            return scale_text(value)
        return step_time_text(value) if self.column == "duration" else short_number(value)

    def label(self, value: float, spread: float) -> str:
        """A value beside the axis, with as many digits as tell labels apart."""
        if self.column == "duration":
            factor, unit = (1.0, "s") if value >= 1 else (1e3, "ms")
            return short_number(value * factor, spread * factor) + unit
        return short_number(value, spread)


LOSS = Series("loss", "loss", "auto", "loss")
NORM = Series("grad_norm", "gradient norm (before clip)", "auto", "norm")
SCALE = Series("scale", "loss scale (log2)", "log2", "scale", hold=True)
STEP_TIME = Series("duration", "step time", "auto", "scale")


@dataclass(frozen=True)
class View:
    """How the operator looks at the run: the newest ``share`` of the steps, a record under the time cursor."""

    share: float = 1.0
    cursor: int | None = None


@dataclass(frozen=True)
class Role:
    """A plot's part in a column of plots: which edges, marks and axis it carries."""

    first: bool = True
    axis: bool = True
    bottom: bool = True
    rug: bool = True
    #: Series of plots that are not on the screen; their values stand in this one's title.
    others: tuple[Series, ...] = ()


class Plot(Panel):
    """A curve over steps. ``show`` costs what is new since the last one, whatever the length of the run."""

    def __init__(self, series: Series, role: Role = Role(), id: str | None = None, glyphs: Glyphs = UNICODE) -> None:
        super().__init__(id=id, glyphs=glyphs)
        self.series = series
        self.role = role
        self.view = View()
        self.empty: Sequence[str] = ("no step yet",)
        self._curve: Curve | None = None

    def place(self, role: Role) -> None:
        """Change the part that this plot has in its column."""
        self.role = role

    def outline(self, width: int, height: int) -> list[Line]:
        return self._frame([], width, height, [(self.series.title, "title")], [])

    def draw(self, snapshot: Snapshot, width: int, height: int) -> list[Line]:
        from fp8console.console.widgets import curves

        series = shown_series(self.series, snapshot)
        title: Line = [(series.title, "title")]
        for other in self.role.others:
            if (known := shown_series(other, snapshot)).column != series.column:
                title += [("   " + known.title.partition(" (")[0].partition(" ·")[0] + " ", "faint")]
                title += curves.value_spans(snapshot, known, self.glyphs, View())
        if self.view.share < 1:
            title += [(f"   last {self.view.share * 100:.0f}% of steps", "asked")]
        note = curves.value_spans(snapshot, series, self.glyphs, self.view)
        cells = width - 2 - GUTTER - 1
        rows = height - 1 - int(self.role.bottom) - int(self.role.axis)
        if cells < 8 or rows < 1:
            return self._frame([], width, height, title, note)
        if series.column not in snapshot.steps.names:
            words = [f"this run's records hold no {series.column}"]
            return self._frame(_message(words, cells + GUTTER, rows), width, height, title, note)
        if not snapshot.count:
            return self._frame(_message(self.empty, cells + GUTTER, rows), width, height, title, note)
        generation = snapshot.steps.generation
        if self._curve is None or (self._curve.column, self._curve.generation) != (series.column, generation):
            self._curve = curves.Curve(series.column, generation)
        body = self._curve.draw(snapshot, series, self.role, self.view, cells, rows, self.glyphs)
        return self._frame(body, width, height, title, note)

    def _frame(self, body: list[Line], width: int, height: int, title: Line, note: Line) -> list[Line]:
        below = legend(self.glyphs, width - 4) if self.role.bottom else ()
        return lines.frame(body, width, height, self.glyphs, title, note, self.role.first, self.role.bottom, below)


def shown_series(series: Series, snapshot: Snapshot) -> Series:
    """The series, or step time in place of a loss scale that does not exist."""
    if series is not SCALE or snapshot.status.scaler is not None or snapshot.status.scale is not None:
        return series
    if not snapshot.count:
        return STEP_TIME
    note = snapshot.status.scaler_note or "this run has no enabled GradScaler"
    return replace(STEP_TIME, title=f"step time · no loss scale: {note}")


def legend(glyphs: Glyphs, width: int) -> Line:
    """What the glyphs of the rug mean, as many of them as fit."""
    entries = (
        (glyphs.skipped, "skipped", "skipped"),
        (glyphs.alert, "alert", "not finite"),
        (glyphs.rollback, "rollback", "rollback"),
        (glyphs.restore_point, "point", "restore point"),
        (glyphs.dashed, "abandoned", "abandoned"),
    )
    line: Line = []
    for glyph, role, words in entries:
        entry: Line = [("  " if line else "", "faint"), (glyph, role), (f" {words}", "faint")]
        if lines.width_of(line) + lines.width_of(entry) > width:
            break
        line += entry
    return line


def _message(texts: Sequence[str], width: int, rows: int) -> list[Line]:
    """Words in the middle of an empty plot."""
    above = max(0, (rows - len(texts)) // 2)
    return [[] for _ in range(above)] + [[(text.center(width), "faint")] for text in texts]
