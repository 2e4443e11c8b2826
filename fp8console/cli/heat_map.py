"""A heat map in the terminal: layers down, steps across, the magnitude as a colour or as a mark's height."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

#: Marks from low to high where there is no colour, and the 256-colour ramp, dark blue to yellow, where there is.
UNICODE_MARKS = "▁▂▃▄▅▆▇█"
ASCII_MARKS = ".:-=+*#%@"
RAMP = (17, 18, 19, 25, 31, 37, 36, 72, 108, 149, 190, 226)
UNKNOWN, ZERO = " ", "0"


def heat_map(
    names: list[str], steps: NDArray[np.int64], values: NDArray[np.float64], width: int, colour: bool, unicode: bool
) -> list[str]:
    """Lines of a map of ``values`` (steps, layers), magnitudes of 0 and more, NaN where unknown, on a log2 scale.

    One row a layer, in the order given; a column stands for one step or more and shows the largest of them. A row ends
    with its median. Exact zeros are ``0``, what is unknown is blank.
    """
    label = min(max((len(name) for name in names), default=0), max(8, width // 3))
    columns = max(1, min(len(steps), width - label - 9))
    each = math.ceil(len(steps) / columns) if len(steps) else 1
    starts = list(range(0, len(steps), each))
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log2(values)
    finite = logs[np.isfinite(logs)]
    if not len(finite):
        return ["no gradient was measured"]
    low, high = math.floor(finite.min()), max(math.ceil(finite.max()), math.floor(finite.min()) + 1)
    marks = UNICODE_MARKS if unicode else ASCII_MARKS
    levels = len(RAMP) if colour else len(marks)
    lines = []
    for index, name in enumerate(names):
        column = logs[:, index]
        cells = ""
        for start in starts:
            cells += _cell(column[start : start + each], low, high, levels, marks, colour, unicode)
        known = column[np.isfinite(column)]
        median = f"2^{np.median(known):.1f}" if len(known) else "unknown"
        lines.append(f"{_short(name, label, unicode):<{label}} {cells} {median:>7}".rstrip())
    span = f"each column {each} steps" if each > 1 else "each column one step"
    if colour:
        ramp = "".join(_paint("█", code) for code in RAMP)
    else:
        ramp = marks
    lines.append(f"{'':<{label}} {ramp} 2^{low} to 2^{high}; steps {int(steps[0]):,} to {int(steps[-1]):,}, {span}")
    return lines


def _cell(part: NDArray[np.float64], low: int, high: int, levels: int, marks: str, colour: bool, unicode: bool) -> str:
    known = part[~np.isnan(part)]
    if not len(known):
        return UNKNOWN
    top = float(known.max())
    if top == -math.inf:
        return ZERO
    level = min(levels - 1, int((top - low) / (high - low) * levels))
    if colour:
        return _paint("█" if unicode else "#", RAMP[level])
    return marks[level]


def _paint(mark: str, code: int) -> str:
    return f"\x1b[38;5;{code}m{mark}\x1b[0m"


def _short(name: str, width: int, unicode: bool) -> str:
    """The end of a long name says more than its beginning."""
    if len(name) <= width:
        return name
    dots = "…" if unicode else ".."
    return dots + name[-(width - len(dots)) :]


def can_colour(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether colours may be written: a terminal that is not a dumb one, and no NO_COLOR."""
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM", "") not in ("", "dumb", "unknown")


def can_unicode(stream: Any) -> bool:
    """Whether the marks can be written in the stream's encoding."""
    try:
        (UNICODE_MARKS + "…").encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
