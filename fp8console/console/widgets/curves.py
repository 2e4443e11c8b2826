"""What a plot draws: the curve, the marks under it, the step axis, the value in the title."""

from __future__ import annotations

import math
from itertools import groupby

import numpy as np

from fp8console.console.glyphs import Glyphs
from fp8console.console.lines import Line
from fp8console.console.snapshot import Snapshot
from fp8console.console.widgets import raster
from fp8console.console.widgets.axes import fit, step_ticks
from fp8console.console.widgets.envelope import Dots, Envelope, FlagBins, Window, dots_of, window
from fp8console.console.widgets.marks import Marks, column_of, gather, index_of, rug
from fp8console.console.widgets.plot import GUTTER, Role, Series, View

TREND_STEPS = 128


class Curve:
    """The envelope and the flags of one column, kept from drawing to drawing."""

    def __init__(self, column: str, generation: int) -> None:
        self.column = column
        self.generation = generation
        self._envelope = Envelope(column)
        self._flags = FlagBins()

    def draw(
        self, snapshot: Snapshot, series: Series, role: Role, view: View, cells: int, rows: int, glyphs: Glyphs
    ) -> list[Line]:
        """``rows`` lines of curve and marks, and one more for the step axis where the role has it."""
        count, steps, dots = snapshot.count, snapshot.steps, cells * raster.DOT_COLUMNS
        shown = window(count, view.share, snapshot.ended)
        self._envelope.update(steps, count, shown, dots)
        self._flags.update(steps, count, shown, dots)
        curve = dots_of(self._envelope, shown, dots, series.hold)
        marks = gather(snapshot, self._flags, shown, cells, view.cursor)
        rug_rows = 0 if not role.rug or rows < 4 else 2 if rows >= 11 else 1
        body = _curve(curve, marks, series, rows - rug_rows, glyphs)
        body += [_grouped([(" " * GUTTER, "text"), *row]) for row in rug(marks, glyphs, rug_rows)[:rug_rows]]
        if role.axis:
            body.append(_step_axis(snapshot, shown, marks, glyphs))
        return body


def _curve(curve: Dots, marks: Marks, series: Series, rows: int, glyphs: Glyphs) -> list[Line]:
    axis = fit(_least(curve), _most(curve), series.axis)
    if axis is None:
        texts = [" " * marks.cells] * rows
        labels: dict[int, str] = {}
    else:
        draw = raster.braille if glyphs.braille else raster.plain
        texts = draw(raster.pixels(curve, axis, rows))
        labels = axis.labels(rows, series.label)
    bad = set(np.flatnonzero(curve.bad.reshape(marks.cells, -1).any(axis=1)).tolist())
    body: list[Line] = []
    for y, text in enumerate(texts):
        overlay = bad if y == rows - 1 else set()
        head: Line = [(labels.get(y, "")[: GUTTER - 2].rjust(GUTTER - 2) + "  ", "faint")]
        body.append(head + _cells(text, marks, series.role, overlay, glyphs))
    return body


def _cells(text: str, marks: Marks, role: str, alerts: set[int], glyphs: Glyphs) -> Line:
    """One row of a curve: the columns that are special one by one, those between them as they are."""
    line: Line = []
    special = alerts | marks.rollbacks | ({marks.cursor} if marks.cursor is not None else set())
    for start, stop, kind in _stretches(len(text), marks.abandoned, special, role):
        piece = text[start:stop]
        if start in alerts:
            line.append((glyphs.alert, "alert"))
        elif start == marks.cursor:
            line.append((glyphs.vertical if piece == " " else piece, "cursor"))
        elif start in marks.rollbacks and piece == " ":
            line.append((glyphs.dotted, "rollback"))
        else:
            line.append((piece, kind))
    return line


def _stretches(width: int, abandoned: set[int], special: set[int], role: str) -> list[tuple[int, int, str]]:
    """Neighbouring columns of one kind, as (start, stop, role); a special column stands alone."""
    if not abandoned and not special:
        return [(0, width, role)]
    found: list[tuple[int, int, str]] = []
    for column in range(width):
        kind = "abandoned" if column in abandoned else role
        if found and column not in special and column - 1 not in special and found[-1][2] == kind:
            found[-1] = (found[-1][0], column + 1, kind)
        else:
            found.append((column, column + 1, kind))
    return found


def _step_axis(snapshot: Snapshot, shown: Window, marks: Marks, glyphs: Glyphs) -> Line:
    steps, count, cells = snapshot.steps, snapshot.count, marks.cells
    if count <= shown.start:
        return []
    numbers = steps.column("step", shown.start, count)
    first, last = int(numbers[0]), int(numbers[-1])

    def column(step: int) -> int:
        found = column_of(min(index_of(steps, count, step), count - 1), shown, cells)
        return 0 if found is None else found

    row = [" "] * cells
    for place in marks.rollbacks:
        row[min(place, cells - 1)] = glyphs.dotted
    for start, text in step_ticks(first, last, cells, column, True):
        row[start : start + len(text)] = text
    spans = _grouped([(c, "rollback" if c == glyphs.dotted else "faint") for c in row])
    return [(" " * GUTTER, "text"), *spans]


def value_spans(snapshot: Snapshot, series: Series, glyphs: Glyphs, view: View) -> Line:
    """The newest value with its trend; the value under the cursor; since when it has not been finite."""
    steps, count = snapshot.steps, snapshot.count
    if not count or series.column not in steps.names:
        return []
    if view.cursor is not None:
        index = min(view.cursor, count - 1)
        number = int(steps.column("step", index, index + 1)[0])
        known = bool(steps.known(series.column, index, index + 1)[0])
        value = float(steps.column(series.column, index, index + 1)[0]) if known else None
        return [(f"at step {number:,}: {series.text(value)}", "cursor")]
    since = snapshot.status.nan_since.get(series.column)
    if since is not None:
        value = getattr(snapshot.status, series.column, None)
        word = "inf" if value is not None and math.isinf(value) else "NaN"
        return [(f"{word} since step {since:,}", "alarm")]
    latest = steps.last(series.column)
    if latest is None:
        return [("unknown", "faint")]
    if not math.isfinite(latest):
        return [(series.text(latest), "alarm")]
    return [(series.text(latest), "value"), (" " + _trend(snapshot, series, glyphs), "value")]


def _trend(snapshot: Snapshot, series: Series, glyphs: Glyphs) -> str:
    start = max(0, snapshot.count - TREND_STEPS)
    values = np.array(snapshot.steps.column(series.column, start, snapshot.count), dtype=np.float64)
    values = values[np.isfinite(values) & snapshot.steps.known(series.column, start, snapshot.count)]
    if len(values) < 8:
        return glyphs.level
    half = len(values) // 2
    change = float(values[half:].mean() - values[:half].mean())
    if abs(change) <= 0.35 * float(values.std()):
        return glyphs.level
    return glyphs.up if change > 0 else glyphs.down


def _least(curve: Dots) -> float | None:
    finite = curve.low[np.isfinite(curve.low)]
    return float(finite.min()) if len(finite) else None


def _most(curve: Dots) -> float | None:
    finite = curve.high[np.isfinite(curve.high)]
    return float(finite.max()) if len(finite) else None


def _grouped(cells: Line) -> Line:
    """Neighbours of one role as one span."""
    return [("".join(text for text, _ in group), role) for role, group in groupby(cells, key=lambda cell: cell[1])]
