"""One metric over a run's steps, reduced to what a chart of a given width can show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8console.runs.reader import StepRecords


@dataclass(frozen=True)
class Envelope:
    """Least and greatest finite value in each bin of steps; NaN where a bin has none."""

    centres: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


@dataclass(frozen=True)
class Series:
    """The measured values of one metric; unknown ones are left out, NaN and inf are not."""

    name: str
    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    unknown: int

    def where(self, kind: str) -> NDArray[np.int64]:
        """The steps whose value is "NaN", "inf" or "-inf"."""
        mask: NDArray[np.bool_] = np.isnan(self.values) if kind == "NaN" else self.values == float(kind)
        chosen: NDArray[np.int64] = self.steps[mask]
        return chosen


def read_series(records: StepRecords, name: str) -> Series:
    """One column as a series. Raises KeyError for a column that the file does not have."""
    known = records.known(name)
    steps = records.column("step")[known].astype(np.int64)
    values = records.column(name)[known].astype(np.float64)
    return Series(name, steps, values, len(known) - len(values))


def envelope(steps: NDArray[np.int64], values: NDArray[np.float64], bins: int) -> Envelope:
    """At most ``bins`` bins of equal width in steps. A lone spike keeps its height: nothing is averaged or left out."""
    if not len(steps):
        empty: NDArray[Any] = np.empty(0)
        return Envelope(empty, empty, empty)
    finite = np.where(np.isfinite(values), values, np.nan)
    first, last = int(steps[0]), int(steps[-1])
    bins = max(1, min(bins, last - first + 1))
    edges = first + np.ceil(np.arange(bins) * ((last - first + 1) / bins)).astype(np.int64)
    starts = np.searchsorted(steps, edges)
    # Steps that are missing leave empty bins; reduceat would give those the next bin's first value.
    ends = np.append(starts[1:], len(steps))
    filled = starts < ends
    low = np.full(bins, np.nan)
    high = np.full(bins, np.nan)
    low[filled] = np.fmin.reduceat(finite, starts[filled])
    high[filled] = np.fmax.reduceat(finite, starts[filled])
    widths = np.append(edges[1:], last + 1) - edges
    return Envelope(edges + (widths - 1) / 2, low, high)
