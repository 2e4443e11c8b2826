"""Step records as rows of plain Python values, for files that other programs read."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from fp8console.protocol.numbers import dumps, to_jsonable
from fp8console.protocol.records import LAYER_FIGURES, LAYER_KINDS
from fp8console.runs.layers import LayerRecords
from fp8console.runs.reader import StepRecords
from fp8console.runs.stability import UNITS, Stability, read

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


def stability_lines(records: StepRecords, form: str) -> Iterator[str]:
    """The run's stability figures: name, value and unit in CSV, or one JSON object; see stability.py."""
    sums = Stability()
    for start in range(0, len(records), BLOCK):
        read(records, start, min(start + BLOCK, len(records)), sums)
        records.release_pages()
    figures = asdict(sums.figures())
    if form == "csv":
        yield "name,value,unit\n"
        for name, value in figures.items():
            yield f"{name},{'' if value is None else value},{UNITS[name]}\n"
    else:
        yield dumps(figures) + "\n"


def layer_lines(layers: LayerRecords, form: str) -> Iterator[str]:
    """The layers' statistics, a row for each step, layer and kind, in "csv" or "jsonl"; names in the place of indices.

    A layer that layers.json does not have is unknown: empty in CSV, null in JSON lines.
    """
    names = columns(layers.records)
    if form == "csv":
        yield ",".join(names) + "\n"
    for row in rows(layers.records):
        named = dict(zip(names, row, strict=True))
        index, kind = named["layer"], named["kind"]
        named["layer"] = layers.layers[index]["name"] if 0 <= index < len(layers.layers) else None
        named["kind"] = LAYER_KINDS[kind] if 0 <= kind < len(LAYER_KINDS) else None
        for name in LAYER_FIGURES:
            if isinstance(named.get(name), float):
                named[name] = float(f"{named[name]:.9g}")  # all that float32 holds
        if form == "csv":
            buffer = io.StringIO()
            csv.writer(buffer, lineterminator="\n").writerow(to_jsonable(list(named.values())))
            yield buffer.getvalue()
        else:
            yield dumps(named) + "\n"


def json_lines(records: StepRecords) -> Iterator[str]:
    """One JSON object a line. Unknown is null; NaN and the infinities go by name; flags are booleans."""
    names = columns(records)
    for row in rows(records):
        yield dumps(dict(zip(names, row, strict=True))) + "\n"
