"""Numbers, ages and states in words, for the commands' plain output. Unknown is said, never shown as 0."""

from __future__ import annotations

import math
from typing import Any

from fp8console.protocol.numbers import number

UNKNOWN = "unknown"


def figure(value: Any, digits: int = 4) -> str:
    """A number in few digits; NaN, the infinities and unknown by name. Also takes a number's JSON form."""
    parsed = number(value)
    if parsed is None:
        return UNKNOWN
    if math.isnan(parsed):
        return "NaN"
    if math.isinf(parsed):
        return "inf" if parsed > 0 else "-inf"
    return f"{parsed:.{digits}g}"


def loss_scale(value: Any) -> str:
    """A loss scale: as a power of two where it is one."""
    parsed = number(value)
    if parsed is None or not math.isfinite(parsed) or parsed <= 0:
        return figure(value)
    mantissa, exponent = math.frexp(parsed)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{parsed:g}"


def count(value: Any) -> str:
    """A whole number with thousands marked."""
    parsed = number(value)
    return f"{int(parsed):,}" if parsed is not None and math.isfinite(parsed) else UNKNOWN


def size(value: Any) -> str:
    """Bytes in binary units."""
    parsed = number(value)
    if parsed is None or not math.isfinite(parsed):
        return UNKNOWN
    for unit in ("B", "KiB", "MiB", "GiB"):
        if parsed < 1024:
            return f"{parsed:.0f} {unit}" if unit == "B" else f"{parsed:.3g} {unit}"
        parsed /= 1024
    return f"{parsed:.4g} TiB"


def duration(value: Any) -> str:
    """Seconds in the unit that fits."""
    parsed = number(value)
    if parsed is None or not math.isfinite(parsed) or parsed < 0:
        return UNKNOWN
    if parsed < 1:
        return f"{parsed * 1000:.3g} ms"
    if parsed < 60:
        return f"{parsed:.3g} s"
    minutes = int(parsed) // 60
    if minutes < 60:
        return f"{minutes} min {int(parsed) % 60:02} s"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{minutes // 1440} days {minutes // 60 % 24} h"


def share(value: Any) -> str:
    """A share of 1 in per cent."""
    parsed = number(value)
    return UNKNOWN if parsed is None or not math.isfinite(parsed) else f"{parsed * 100:.3g}%"


def plural(many: int, one: str) -> str:
    """``2 skips``, ``1 skip``."""
    return f"{many:,} {one}" + ("" if many == 1 else "s")


def printable(text: Any) -> str:
    """Text that came from a training or a file, on one line and without what a terminal would obey."""
    return "".join(character if character.isprintable() else " " for character in str(text)).strip()


def table(rows: list[list[str]], right: frozenset[int] = frozenset()) -> list[str]:
    """Rows as lines with aligned columns; ``right``: the columns aligned to the right."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
