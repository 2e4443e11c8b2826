"""Step records as rows of plain Python values, for files that other programs read."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

import numpy as np

from fp8console.protocol.numbers import dumps, to_jsonable
from fp8console.runs.reader import StepRecords

BLOCK = 8_192
#: Columns that are not values of their own: flags become columns, unknown values become empty.
_INTERNAL = ("flags", "known")


def columns(records: StepRecords) -> list[str]:
    """The names of an exported row's values: the layout's columns, then its flags."""
    names = [name for name in records.names if name not in _INTERNAL]
    return names + (list(records.flag_names) if "flags" in records.names else [])


def rows(records: StepRecords) -> Iterator[list[Any]]:
    """One list a record, in the order of ``columns``: numbers, None where unknown, booleans for flags."""
    names = [name for name in records.names if name not in _INTERNAL]
    flags = list(records.flag_names) if "flags" in records.names else []
    for start in range(0, len(records), BLOCK):
        stop = min(start + BLOCK, len(records))
        block: list[list[Any]] = []
        for name in names:
            values = records.column(name, start, stop).tolist()
            unknown = np.flatnonzero(~records.known(name, start, stop))
            for index in unknown.tolist():
                values[index] = None
            block.append(values)
        block += [records.flag(name, start, stop).tolist() for name in flags]
        records.release_pages()
        for row in zip(*block, strict=True):
            yield list(row)


def csv_lines(records: StepRecords) -> Iterator[str]:
    """CSV text in pieces, a header first. Unknown is empty; NaN, Infinity and -Infinity by name; flags are 0 or 1."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns(records))
    for count, row in enumerate(rows(records), start=1):
        writer.writerow([int(value) if isinstance(value, bool) else to_jsonable(value) for value in row])
        if count % BLOCK == 0:
            yield buffer.getvalue()
            buffer.seek(0)
            buffer.truncate()
    yield buffer.getvalue()


def json_lines(records: StepRecords) -> Iterator[str]:
    """One JSON object a line. Unknown is null; NaN and the infinities go by name; flags are booleans."""
    names = columns(records)
    for row in rows(records):
        yield dumps(dict(zip(names, row, strict=True))) + "\n"
