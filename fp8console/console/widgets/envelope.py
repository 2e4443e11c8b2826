"""Minimum and maximum of a growing column in bins, kept up to date at the cost of what is new.

A curve of a million steps is drawn on a few hundred dots. Each dot shows the whole range of its steps, so no spike is
ever lost, which sampling every n-th step or averaging would do. NaN and inf are counted apart: they have no place on
an axis, and they are what an operator looks for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

#: Records read at once: bounds the temporary arrays, whatever the length of the run.
CHUNK = 1 << 16


class StepColumns(Protocol):
    """What is read of the step records (runs.reader.StepRecords has it)."""

    def column(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[Any]: ...

    def known(self, name: str, start: int = 0, stop: int | None = None) -> Bools: ...


@dataclass(frozen=True)
class Window:
    """The records on the step axis: indices from ``start`` up to ``stop``, which may lie beyond the newest."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


def window(count: int, share: float = 1.0, ended: bool = False) -> Window:
    """The window for the newest ``share`` of ``count`` records.

    A live axis ends a little beyond the newest record, at a sixteenth of the power of two above its length, so that
    it moves seldom and what is drawn stays where it is. The axis of an ended run ends at its last record.
    """
    span = max(32, math.ceil(count * share))
    quantum = 1 << max(0, span.bit_length() - 4)
    stop = max(count, 1) if ended else max(32, (count // quantum + 1) * quantum)
    start = 0 if share >= 1 else max(0, count - span)
    if not ended:
        start = start // quantum * quantum
    return Window(start, stop)


def bin_size(length: int, dots: int) -> int:
    """Records a bin: the power of two that gives two to four bins a dot, at least one record."""
    return 1 << max(0, (length // max(1, 2 * dots)).bit_length() - 1)


def read_floats(steps: StepColumns, name: str, start: int, stop: int) -> tuple[Floats, Bools]:
    """Values with NaN for whatever is no finite measured number, and where a measured one was NaN or inf."""
    values = np.array(steps.column(name, start, stop), dtype=np.float64)
    known = np.asarray(steps.known(name, start, stop))
    finite = np.isfinite(values)
    bad = known & ~finite
    values[~(known & finite)] = np.nan
    return values, bad


class Envelope:
    """Minimum, maximum and presence of non-finite values a bin, from record ``start`` on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.start = 0
        self.size = 1
        self.count = 0
        self.low: Floats = np.empty(0)
        self.high: Floats = np.empty(0)
        self.bad: Bools = np.empty(0, dtype=bool)

    def update(self, steps: StepColumns, count: int, shown: Window, dots: int) -> None:
        """Take in the records up to ``count`` (of the whole run) that lie in the window."""
        size = bin_size(shown.length, dots)
        count = min(count, shown.stop)
        if shown.start != self.start or count < self.start + self.count or size < self.size:
            self._reset(shown.start, size)
        while self.size < size:
            self._halve()
        first = self.count // self.size  # the last bin may have been unfinished
        self.low, self.high, self.bad = self.low[:first], self.high[:first], self.bad[:first]
        lows, highs, bads = [self.low], [self.high], [self.bad]
        position = self.start + first * self.size
        step = max(CHUNK, self.size)
        while position < count:
            end = min(count, position + step)
            values, bad = read_floats(steps, self.name, position, end)
            edges = np.arange(0, len(values), self.size)
            lows.append(np.fmin.reduceat(values, edges))
            highs.append(np.fmax.reduceat(values, edges))
            bads.append(np.logical_or.reduceat(bad, edges))
            position = end
        self.low, self.high, self.bad = np.concatenate(lows), np.concatenate(highs), np.concatenate(bads)
        self.count = max(0, count - self.start)

    def _reset(self, start: int, size: int) -> None:
        self.start, self.size, self.count = start, size, 0
        self.low, self.high, self.bad = np.empty(0), np.empty(0), np.empty(0, dtype=bool)

    def _halve(self) -> None:
        edges = np.arange(0, len(self.low), 2)
        if len(edges):
            self.low = np.fmin.reduceat(self.low, edges)
            self.high = np.fmax.reduceat(self.high, edges)
            self.bad = np.logical_or.reduceat(self.bad, edges)
        self.size *= 2


class FlagBins:
    """The flags of the step records, or-ed a bin; the same bins as an Envelope's."""

    def __init__(self) -> None:
        self.start = 0
        self.size = 1
        self.count = 0
        self.bits: NDArray[np.uint32] = np.empty(0, dtype=np.uint32)

    def update(self, steps: StepColumns, count: int, shown: Window, dots: int) -> None:
        """Take in the records up to ``count`` that lie in the window."""
        size = bin_size(shown.length, dots)
        count = min(count, shown.stop)
        if shown.start != self.start or count < self.start + self.count or size < self.size:
            self.start, self.size, self.count, self.bits = shown.start, size, 0, self.bits[:0]
        while self.size < size:
            if len(self.bits):
                self.bits = np.bitwise_or.reduceat(self.bits, np.arange(0, len(self.bits), 2))
            self.size *= 2
        first = self.count // self.size
        parts = [self.bits[:first]]
        position = self.start + first * self.size
        step = max(CHUNK, self.size)
        while position < count:
            end = min(count, position + step)
            flags = np.array(steps.column("flags", position, end), dtype=np.uint32)
            parts.append(np.bitwise_or.reduceat(flags, np.arange(0, len(flags), self.size)))
            position = end
        self.bits = np.concatenate(parts)
        self.count = max(0, count - self.start)


@dataclass(frozen=True)
class Dots:
    """A curve on the dots of an axis: its range at each, NaN where there is nothing, and where it was not finite."""

    low: Floats
    high: Floats
    bad: Bools


def dots_of(envelope: Envelope, shown: Window, dots: int, hold: bool = False) -> Dots:
    """The envelope on ``dots`` dots. Fewer records than dots are joined by lines, or by steps when ``hold``."""
    if shown.length >= dots:
        return _many_a_dot(envelope, shown, dots)
    return _few(envelope, shown, dots, hold)


def _many_a_dot(envelope: Envelope, shown: Window, dots: int) -> Dots:
    low, high = np.full(dots, np.nan), np.full(dots, np.nan)
    bad = np.zeros(dots, dtype=bool)
    edges = dot_edges(shown, dots, envelope.size)
    filled = int(np.searchsorted(edges, len(envelope.low)))
    if filled:
        low[:filled] = np.fmin.reduceat(envelope.low, edges[:filled])
        high[:filled] = np.fmax.reduceat(envelope.high, edges[:filled])
        bad[:filled] = np.logical_or.reduceat(envelope.bad, edges[:filled])
    return Dots(low, high, bad)


def dot_edges(shown: Window, dots: int, size: int) -> NDArray[np.int64]:
    """The first bin of each dot."""
    return (np.arange(dots, dtype=np.int64) * shown.length // dots) // size


def _few(envelope: Envelope, shown: Window, dots: int, hold: bool) -> Dots:
    low, high = np.full(dots, np.nan), np.full(dots, np.nan)
    bad = np.zeros(dots, dtype=bool)
    count = len(envelope.low)
    place = (np.arange(count, dtype=np.int64) * 2 + 1) * dots // (2 * shown.length)
    bad[place[envelope.bad]] = True
    values = envelope.low
    finite = np.isfinite(values)
    low[place[finite]] = high[place[finite]] = values[finite]
    pairs = np.flatnonzero(finite[:-1] & finite[1:]) if count > 1 else np.empty(0, dtype=np.int64)
    for index in pairs.tolist():
        left, right = int(place[index]), int(place[index + 1])
        between = np.arange(left + 1, right)
        if hold:
            line = np.full(len(between), values[index])
        else:
            line = values[index] + (values[index + 1] - values[index]) * (between - left) / (right - left)
        low[between] = high[between] = line
    return Dots(low, high, bad)
