"""``fp8console plot``: charts of a run in plain text, for the scroll-back and for batch logs."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fp8console.cli import wording
from fp8console.cli.arguments import CommandFailed, Parser, UsageError, whole

if TYPE_CHECKING:
    from fp8console.runs.reader import StepRecords
    from fp8console.runs.series import Envelope, Series

DEFAULT = ("loss", "grad_norm", "scale")
NOT_METRICS = ("step", "flags", "known")
#: Axis of a metric when none is asked for; the others are linear.
AXES = {"grad_norm": "log10", "scale": "log2"}
TITLES = {"grad_norm": "gradient norm (before clip)", "scale": "loss scale", "lr": "learning rate"}
_ASCII = str.maketrans("┌┐└┘├┤┬┴┼─│╵╷", "+++++++++-|||")


@dataclass(frozen=True)
class Shape:
    """How charts are drawn: columns, rows each, axis ("log10", "linear" or None for the metric's own), plain ASCII."""

    width: int
    height: int
    axis: str | None
    ascii: bool


def main(words: Sequence[str]) -> int:
    """Prints a chart a metric; finite values are drawn, NaN and inf are told under the chart."""
    usage = "fp8console plot [OPTIONS] [RUN] [METRIC...]"
    parser = Parser("plot", "Charts of a run, printed. METRIC is a column of the step records.", usage=usage)
    parser.add_argument("words", nargs="*", metavar="RUN METRIC", help=f"default: the newest, {', '.join(DEFAULT)}")
    parser.add_argument("--width", type=whole, metavar="N", help="columns (default: the terminal's)")
    parser.add_argument("--height", type=whole, default=14, metavar="N", help="rows a chart (default 14)")
    parser.add_argument("--log", action="store_true", help="a log axis for all metrics")
    parser.add_argument("--linear", action="store_true", help="a linear axis for all metrics")
    parser.add_argument("--rank", type=whole, default=0, metavar="N", help="whose records (default 0)")
    given = parser.parse(words)
    if given.log and given.linear:
        raise UsageError("plot: --log or --linear, not both")
    width = given.width or shutil.get_terminal_size((100, 24)).columns
    if width < 20 or given.height < 5:
        raise UsageError("plot: a chart needs at least 20 columns and 5 rows")

    from fp8console.protocol import paths
    from fp8console.runs.find import resolve
    from fp8console.runs.reader import StepRecords

    run_word, metrics = _split(given.words)
    run_dir = resolve(run_word)
    records = StepRecords(paths.steps_file(run_dir, given.rank))
    if records.problem is not None:
        raise CommandFailed(f"plot: {records.problem}")
    known = [name for name in records.names if name not in NOT_METRICS]
    for name in metrics:
        if name not in known:
            raise UsageError(f"plot: unknown metric {name!r}; known: {', '.join(known)}")
    axis = "log10" if given.log else "linear" if given.linear else None
    shape = Shape(width, given.height, axis, not _draws_braille())
    if not len(records):
        raise CommandFailed(f"plot: {run_dir.name} has no steps yet")
    for name in metrics or DEFAULT:
        if name in known:
            print("\n".join(chart(records, name, shape)))
    return 0


def _split(words: list[str]) -> tuple[str | None, list[str]]:
    """The run's word and the metrics: a first word that is a metric of today's layout leaves the run out."""
    from fp8console.protocol.records import STEP_FIELDS

    if not words:
        return None, []
    if words[0] in {field.name for field in STEP_FIELDS}:
        return None, words
    return words[0], words[1:]


def _draws_braille() -> bool:
    try:
        "⣿│".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def chart(records: StepRecords, name: str, shape: Shape) -> list[str]:
    """One metric's chart in lines, with what could not be drawn told under it."""
    import numpy as np

    from fp8console.runs.series import envelope, read_series

    series = read_series(records, name)
    title = TITLES.get(name, name.replace("_", " "))
    if not len(series.values):
        return [f"{title}: unknown in all {series.unknown:,} steps", ""]
    axis = shape.axis or AXES.get(name, "linear")
    values = series.values
    notes = _notes(series)
    finite = values[np.isfinite(values)]
    if axis == "linear" and len(finite) and not math.isfinite(float(finite.max()) - float(finite.min())):
        axis = "log10"
    if axis != "linear":
        low = np.isfinite(values) & (values <= 0)
        if low.any():
            notes.append(f"{wording.plural(int(low.sum()), 'value')} of 0 or less, which a log axis can't show")
        with np.errstate(all="ignore"):
            values = (np.log2 if axis == "log2" else np.log10)(np.where(low, np.nan, values))
    # Two dots of braille a column; the axis' labels take some columns off.
    outline = envelope(series.steps, values, max(8, (shape.width - 12) * (1 if shape.ascii else 2)))
    head = f"{title}, log axis" if axis != "linear" else title
    last = wording.loss_scale(series.values[-1]) if name == "scale" else wording.figure(float(series.values[-1]))
    lines = [f"{head}; last {last} at step {int(series.steps[-1]):,}"]
    if np.isfinite(outline.low).any():
        lines += _draw(outline, axis, series, shape)
    else:
        lines.append("no value that can be drawn")
    return [*lines, *(f"  {note}" for note in notes), ""]


def _notes(series: Series) -> list[str]:
    notes = []
    for kind in ("NaN", "inf", "-inf"):
        steps = series.where(kind)
        if len(steps):
            shown = ", ".join(f"{step:,}" for step in steps[:3].tolist())
            if len(steps) > 4:
                shown += ", ..."
            if len(steps) > 3:
                shown += f", {int(steps[-1]):,}"
            notes.append(f"{kind} in {wording.plural(len(steps), 'step')}: {shown}")
    if series.unknown:
        notes.append(f"unknown in {wording.plural(series.unknown, 'step')}")
    return notes


def _draw(outline: Envelope, axis: str, series: Series, shape: Shape) -> list[str]:
    import plotext

    xs, low, high = outline.centres.tolist(), outline.low.tolist(), outline.high.tolist()
    plotext.clear_figure()
    plotext.limit_size(False, False)
    plotext.plot_size(shape.width, shape.height)
    plotext.theme("clear")
    marker = "*" if shape.ascii else "braille"
    for start, stop in _stretches(low):
        line_x, line_y = _path(xs[start:stop], low[start:stop], high[start:stop], hold=axis == "log2")
        if len(set(zip(line_x, line_y, strict=True))) == 1:
            plotext.scatter(line_x[:1], line_y[:1], marker=marker)
        else:
            plotext.plot(line_x, line_y, marker=marker)
    bottom = min(value for value in low if math.isfinite(value))
    top = max(value for value in high if math.isfinite(value))
    if bottom == top:
        margin = abs(bottom) * 0.1 or 1.0
        bottom, top = bottom - margin, top + margin
    plotext.ylim(bottom, top)
    rows = min(5, max(2, shape.height // 3))
    ticks = [bottom + (top - bottom) * index / (rows - 1) for index in range(rows)]
    plotext.yticks(ticks, [_tick(value, axis) for value in ticks])
    first, last = int(series.steps[0]), int(series.steps[-1])
    plotext.xlim(first, max(last, first + 1))
    marks = sorted({first + round((last - first) * index / 4) for index in range(5)})
    plotext.xticks(marks, [f"{mark:,}" for mark in marks])
    text: str = plotext.uncolorize(plotext.build())
    lines = [line.rstrip() for line in text.splitlines()]
    if shape.ascii:
        lines = [line.translate(_ASCII).encode("ascii", "replace").decode() for line in lines]
    return lines


def _stretches(low: list[float]) -> list[tuple[int, int]]:
    """Runs of neighbouring bins that hold values: a line is never drawn across a gap."""
    found: list[tuple[int, int]] = []
    start: int | None = None
    for index, value in enumerate([*low, math.nan]):
        if math.isnan(value):
            if start is not None:
                found.append((start, index))
            start = None
        elif start is None:
            start = index
    return found


def _path(xs: list[float], low: list[float], high: list[float], hold: bool) -> tuple[list[float], list[float]]:
    """The line through an envelope; with ``hold`` a value stays until the next one, as a loss scale does."""
    line_x: list[float] = []
    line_y: list[float] = []
    for index, x in enumerate(xs):
        if hold and index and low[index - 1] == high[index - 1]:
            line_x.append(x)
            line_y.append(high[index - 1])
        line_x += [x, x]
        line_y += [low[index], high[index]]
    return line_x, line_y


def _tick(value: float, axis: str) -> str:
    if axis == "linear":
        return f"{value:.3g}"
    if axis == "log2":
        return f"2^{value:.3g}"
    # 10**value overflows only where the value itself was at float's limit.
    return f"{10**value:.3g}" if abs(value) < 300 else f"1e{value:.0f}"
