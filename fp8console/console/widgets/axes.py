"""Axes: limits on round numbers, so that they seldom move, and the words beside them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fp8console.console.widgets.envelope import Floats
from fp8console.console.wording import short_number

#: From this ratio of largest to smallest positive value on, a linear axis shows only the largest.
LOG_RATIO = 20.0


@dataclass(frozen=True)
class Axis:
    """A value axis: ``kind`` is 'linear', 'log10' or 'log2'; limits in its own units (exponents for a log axis)."""

    kind: str
    low: float
    high: float

    def place(self, values: Floats) -> Floats:
        """Where values stand, 0 at the bottom and 1 at the top; on a log axis 0 and less at the bottom."""
        if self.kind == "linear":
            scaled = values
        else:
            function = np.log10 if self.kind == "log10" else np.log2
            with np.errstate(divide="ignore", invalid="ignore"):
                scaled = np.where(values > 0, function(values), np.where(np.isnan(values), np.nan, self.low))
        return np.asarray((scaled - self.low) / (self.high - self.low), dtype=np.float64)

    def labels(self, rows: int, text: Callable[[float, float], str] = short_number) -> dict[int, str]:
        """Words beside an axis of ``rows`` rows, row 0 at the top: both ends, and round values with room between.

        ``text`` makes words of a value and the axis' span, on a linear axis.
        """
        if rows < 1:
            return {}
        span = self.high - self.low
        if self.kind == "linear":
            step = nice_step(span / max(1, (rows - 1) // 3)) if rows > 3 else span
        else:
            step = float(max(1, math.ceil(span / max(1, (rows - 1) // 3))))

        def words(value: float) -> str:
            if self.kind == "linear":
                return text(value, span)
            return f"{'2^' if self.kind == 'log2' else '1e'}{round(value)}"

        placed = {rows - 1: words(self.low), 0: words(self.high)}
        tick = math.ceil(self.low / step) * step
        while tick < self.high - 1e-9 * span:
            row = round((1 - (tick - self.low) / span) * (rows - 1))
            if all(abs(row - other) >= 2 for other in placed):
                placed[row] = words(tick)
            tick += step
        return placed


def fit(low: float | None, high: float | None, kind: str = "auto") -> Axis | None:
    """The axis for values from ``low`` to ``high``; None without any. 'auto': log10 where the range asks for it."""
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return None
    if kind == "log2":
        if low <= 0:
            return fit(low, high, "linear")
        least, most = math.floor(math.log2(low) - 0.01), math.ceil(math.log2(high) + 0.01)
        while most - least < 3:
            least, most = least - (most - least) % 2, most + 1
        return Axis("log2", least, most)
    if kind == "auto" and low > 0 and high / low > LOG_RATIO:
        return Axis("log10", math.floor(math.log10(low)), math.ceil(math.log10(high) + 1e-9))
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-300):
        margin = abs(low) * 0.05 or 1.0
        low, high = low - margin, high + margin
    step = nice_step((high - low) / 6)
    bottom, top = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    if not (math.isfinite(bottom) and math.isfinite(top) and top > bottom):
        return None
    return Axis("linear", bottom, top)


def nice_step(raw: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least ``raw``."""
    power = 10.0 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
    for factor in (1.0, 2.0, 5.0):
        if factor * power >= raw * (1 - 1e-9):
            return factor * power
    return 10.0 * power


def step_ticks(
    first: int, last: int, width: int, column_of: Callable[[int], int], final: bool
) -> list[tuple[int, str]]:
    """Where step numbers stand under an axis of ``width`` cells, as (column, text), none touching another.

    ``column_of`` gives the column of a step. The newest step, ``last``, always has its number when ``final``.
    """
    if last < first or width < 4:
        return []
    taken: list[tuple[int, str]] = []
    if final:
        text = f"{last:,}"
        column = min(max(0, column_of(last) - len(text) + 1), width - len(text))
        taken.append((column, text))
    step = max(1, round(nice_step(max(1.0, (last - first) / max(1, width // 14)))))
    tick = math.ceil(first / step) * step
    while tick <= last:
        text = f"{tick:,}"
        column = column_of(tick)
        column = min(max(0, column - len(text) // 2), width - len(text))
        if all(column + len(text) < other or other + len(word) < column for other, word in taken):
            taken.append((column, text))
        tick += step
    return sorted(taken)
