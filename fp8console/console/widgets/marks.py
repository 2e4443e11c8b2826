"""Where things happened, on the step axis: skipped steps, values that are not finite, rollbacks, restore points."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fp8console.console.glyphs import Glyphs
from fp8console.console.snapshot import Snapshot
from fp8console.console.widgets.envelope import FlagBins, StepColumns, Window, dot_edges
from fp8console.protocol.records import FLAGS

#: More snapshots than this in the window are noise: then only checkpoints are marked.
SNAPSHOTS_SHOWN = 12


@dataclass
class Marks:
    """What stands in each cell column of a plot of ``cells`` columns."""

    cells: int
    skipped: set[int] = field(default_factory=set)
    nonfinite: set[int] = field(default_factory=set)
    rollbacks: set[int] = field(default_factory=set)
    points: set[int] = field(default_factory=set)
    abandoned: set[int] = field(default_factory=set)
    cursor: int | None = None


def index_of(steps: StepColumns, count: int, step: int) -> int:
    """The first record whose step is at least ``step``; ``count`` when there is none."""
    if not count:
        return 0
    numbers = steps.column("step", 0, count)
    first, last = int(numbers[0]), int(numbers[-1])
    if last - first == len(numbers) - 1:
        return min(max(0, step - first), len(numbers))
    return bisect_left(numbers, step)


def column_of(index: int, shown: Window, cells: int) -> int | None:
    """The cell column of a record; None outside the window."""
    if not shown.start <= index < shown.stop:
        return None
    return (2 * (index - shown.start) + 1) * cells // (2 * shown.length)


def gather(snapshot: Snapshot, bins: FlagBins, shown: Window, cells: int, cursor: int | None) -> Marks:
    """The marks of a snapshot in the window. ``bins`` holds the flags of the same window and twice as many dots."""
    marks = Marks(cells)
    steps, count = snapshot.steps, snapshot.count
    _take_flags(marks, bins, shown)

    def column(step: int) -> int | None:
        return column_of(index_of(steps, count, step), shown, cells)

    for to, at in snapshot.rollbacks:
        # A rollback to restore point ``to`` abandons the steps after it, up to and with ``at``.
        start, stop = index_of(steps, count, to + 1), index_of(steps, count, at)
        left = column_of(max(start, shown.start), shown, cells)
        right = column_of(min(stop, shown.stop - 1), shown, cells)
        if stop >= shown.start and left is not None and right is not None:
            marks.abandoned.update(range(left, right + 1))
        if (place := column(at)) is not None:
            marks.rollbacks.add(place)
    first = int(steps.column("step", shown.start, shown.start + 1)[0]) if count > shown.start else 0
    points = [point for point in snapshot.status.restore_points if point["step"] >= first]
    in_memory = [point for point in points if point["where"] == "memory"]
    for point in points:
        worth = point["where"] == "disk" or len(in_memory) <= SNAPSHOTS_SHOWN
        if worth and (place := column(point["step"])) is not None:
            marks.points.add(place)
    marks.cursor = None if cursor is None else column_of(cursor, shown, cells)
    return marks


def _take_flags(marks: Marks, bins: FlagBins, shown: Window) -> None:
    if not len(bins.bits):
        return
    if shown.length >= marks.cells:
        edges = dot_edges(shown, marks.cells, bins.size)
        filled = int(np.searchsorted(edges, len(bins.bits)))
        bits = np.bitwise_or.reduceat(bins.bits, edges[:filled])
        place = np.arange(filled)
    else:
        bits = bins.bits
        place = (np.arange(len(bits)) * 2 + 1) * marks.cells // (2 * shown.length)
    skipped = (bits & FLAGS["skipped"]) != 0
    # The gradient norm of a step that the scaler refused is not finite by nature: that is no alert of its own.
    nonfinite = (bits & FLAGS["loss_nonfinite"]) != 0
    nonfinite |= ((bits & FLAGS["grad_nonfinite"]) != 0) & ~skipped
    marks.skipped.update(place[skipped].tolist())
    marks.nonfinite.update(place[nonfinite].tolist())


def rug(marks: Marks, glyphs: Glyphs, rows: int) -> list[list[tuple[str, str]]]:
    """The marks as one or two rows of (glyph, role) cells: troubles, and below them what the operator can use."""
    trouble: list[tuple[str, str]] = [(" ", "text")] * marks.cells
    steering: list[tuple[str, str]] = [(" ", "text")] * marks.cells
    lower = steering if rows > 1 else trouble
    _put(lower, marks.abandoned, (glyphs.dashed, "abandoned"))
    _put(lower, marks.points, (glyphs.restore_point, "point"))
    # A plot marks what is not finite of its own curve at its foot, so here the skip is what would go unseen.
    _put(trouble, marks.nonfinite, (glyphs.alert, "alert"))
    _put(trouble, marks.skipped, (glyphs.skipped, "skipped"))
    _put(lower, marks.rollbacks, (glyphs.rollback, "rollback"))
    return [trouble, steering][: max(1, rows)]


def _put(cells: list[tuple[str, str]], places: Sequence[int] | set[int], mark: tuple[str, str]) -> None:
    for place in places:
        if 0 <= place < len(cells):
            cells[place] = mark
