"""Utilisation of every card, and of each XCD where it is told, over time: what the heat map shows.

One column stands for some seconds and holds the mean of the samples read in it. A long run's file holds gigabytes, so
what lies back is read at as many places of the file as there are columns; what is new is read whole.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fp8console.diagnosis.cards import Sample, gpus_of, is_stale, key, known
from fp8console.protocol.hardware import parse
from fp8console.protocol.numbers import number

#: Bytes up to which a stretch of the file is read whole; beyond, one line a column.
WHOLE = 1 << 21
#: Bytes read at a place to find a line there; a sample of 64 partitions has less.
LINE_LIMIT = 1 << 18
#: Seconds a column may stand for, where the whole run is wanted.
WIDTHS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400)

#: A row: the card's key, and the XCD's number or None for the card itself.
RowKey = tuple[str, "int | None"]


@dataclass(frozen=True)
class Row:
    """One card (``xcd`` None) or one XCD of it."""

    card: str
    index: int | None
    name: str
    xcd: int | None = None


@dataclass(frozen=True)
class Utilisation:
    """Percent busy, (rows, columns), NaN where unknown; ``sampled`` is False for a column of which nothing was read.

    The last column is the newest; each stands for ``width`` seconds.
    """

    width: float
    rows: tuple[Row, ...]
    values: NDArray[np.float32]
    sampled: NDArray[np.bool_]


class History:
    """The newest ``columns`` columns of ``width`` seconds, of one hardware file."""

    def __init__(self, path: Path, width: float, columns: int) -> None:
        self.width, self.columns = width, columns
        self._sums: dict[int, dict[RowKey, tuple[float, int]]] = {}
        self._rows: dict[RowKey, Row] = {}
        for sample in _backlog(path, width * columns, columns):
            self.add(sample)

    def add(self, sample: Sample) -> None:
        """Takes in one sample, the newest or an older one."""
        moment = number(sample.get("time"))
        if moment is None or not math.isfinite(moment):
            return
        place = math.floor(moment / self.width)
        if self._sums and place < max(self._sums) - self.columns:
            self._sums.clear()  # the host's clock was set back
        column = self._sums.setdefault(place, {})
        for gpu in gpus_of(sample):
            row = Row(key(gpu), _whole(gpu.get("index")), str(gpu.get("name") or "GPU"))
            self._note(column, row, known(gpu, "busy"))
            for xcd, busy in enumerate(gpu["xcd_busy"] if isinstance(gpu.get("xcd_busy"), list) else ()):
                self._note(column, replace(row, xcd=xcd), None if is_stale(gpu) else number(busy))
        while len(self._sums) > self.columns:
            del self._sums[min(self._sums)]

    def _note(self, column: dict[RowKey, tuple[float, int]], row: Row, value: float | None) -> None:
        place = row.card, row.xcd
        self._rows[place] = row
        if value is not None and math.isfinite(value):
            total, count = column.get(place, (0.0, 0))
            column[place] = total + value, count + 1

    @property
    def is_full(self) -> bool:
        """Whether the next new column pushes the oldest one out."""
        return len(self._sums) >= self.columns

    def look(self) -> Utilisation:
        """The map as it is now, ending with the newest column; rows by card and XCD."""
        rows = sorted(self._rows.values(), key=lambda row: (_order(row.index), row.card, _order(row.xcd)))
        last = max(self._sums, default=0)
        first = max(last - self.columns + 1, min(self._sums, default=0))
        values = np.full((len(rows), last - first + 1 if self._sums else 0), np.nan, np.float32)
        sampled = np.zeros(values.shape[1], np.bool_)
        places = {(row.card, row.xcd): index for index, row in enumerate(rows)}
        for number_, column in self._sums.items():
            if number_ >= first:
                sampled[number_ - first] = True
                for place, (total, count) in column.items():
                    values[places[place], number_ - first] = total / count
        # A sample a second or so leaves a column of a second empty now and then: the one before it still holds there.
        alone = np.flatnonzero(sampled[:-2] & ~sampled[1:-1] & sampled[2:]) + 1
        values[:, alone], sampled[alone] = values[:, alone - 1], True
        return Utilisation(self.width, tuple(rows), values, sampled)


def _order(index: int | None) -> float:
    return -1 if index is None else index


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def whole_width(path: Path, columns: int) -> float:
    """Seconds a column stands for when all of a file's time is to fit into so many columns."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            first, last = _sample_at(file, 0, size), _newest(file, size)
    except OSError:
        return WIDTHS[0]
    times = [number((sample or {}).get("time")) for sample in (first, last)]
    if times[0] is None or times[1] is None:
        return WIDTHS[0]
    seconds = times[1] - times[0]
    return next((width for width in WIDTHS if seconds <= width * (columns - 2)), WIDTHS[-1])


def _backlog(path: Path, seconds: float, count: int) -> Iterable[Sample]:
    """Samples of the last ``seconds`` of a file: all of them, or about two for each of ``count`` columns."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            last = _newest(file, size)
            newest = number((last or {}).get("time"))
            if newest is None:
                return []
            start = _offset_of(file, size, newest - seconds)
            if size - start <= WHOLE:
                file.seek(start)
                return [sample for sample in map(parse, file.read(size - start).split(b"\n")) if sample is not None]
            places = np.linspace(start, size, 2 * count, endpoint=False)
            found = [*(_sample_at(file, int(place), size) for place in places), last]
    except OSError:
        return []
    return [sample for sample in found if sample is not None]


def _offset_of(file: IO[bytes], size: int, moment: float) -> int:
    """About where the first sample after ``moment`` stands; samples are in the order of their times."""
    low, high = 0, size
    while high - low > LINE_LIMIT:
        middle = (low + high) // 2
        at = number((_sample_at(file, middle, size) or {}).get("time"))
        if at is None or at > moment:
            high = middle
        else:
            low = middle
    return low


def _sample_at(file: IO[bytes], offset: int, size: int) -> Sample | None:
    """The first whole sample that begins at ``offset`` or after it."""
    file.seek(max(0, offset - 1))
    if offset > 0:
        file.readline(LINE_LIMIT)
    while file.tell() < size:
        sample = parse(file.readline(LINE_LIMIT))
        if sample is not None:
            return sample
    return None


def _newest(file: IO[bytes], size: int) -> Sample | None:
    start = max(0, size - LINE_LIMIT)
    file.seek(start)
    for line in reversed(file.read(size - start).split(b"\n")):
        sample = parse(line)
        if sample is not None:
            return sample
    return None
