"""Dots to characters: eight dots a cell in braille, or one plain character where braille doesn't arrive."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fp8console.console.widgets.axes import Axis
from fp8console.console.widgets.envelope import Bools, Dots

DOT_ROWS, DOT_COLUMNS = 4, 2

#: Bit of each dot of a braille cell, by row and column: Unicode's numbering (U+2800 and up).
_BITS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]], dtype=np.uint32)
_BLANK = 0x2800


def pixels(curve: Dots, axis: Axis, rows: int) -> Bools:
    """Which dots are set, as (4 * rows, dots), row 0 at the top.

    Each column is filled from its lowest to its highest value, and joined to its neighbour, except where either holds
    a value that is not finite: nothing is drawn across a gap.
    """
    tall = DOT_ROWS * rows
    with np.errstate(invalid="ignore"):
        low = np.clip(axis.place(curve.low), 0, 1) * (tall - 1)
        high = np.clip(axis.place(curve.high), 0, 1) * (tall - 1)
    present = np.isfinite(low) & np.isfinite(high)
    bottom = np.where(present, np.rint(low), 0).astype(np.int64)
    top = np.where(present, np.rint(high), -1).astype(np.int64)
    joined = present[:-1] & present[1:] & ~curve.bad[:-1] & ~curve.bad[1:]
    rising = joined & (bottom[1:] > top[:-1] + 1)
    falling = joined & (top[1:] < bottom[:-1] - 1)
    bottom[1:] = np.where(rising, top[:-1] + 1, bottom[1:])
    top[1:] = np.where(falling, bottom[:-1] - 1, top[1:])
    height = np.arange(tall - 1, -1, -1)[:, None]
    return np.asarray((height >= bottom) & (height <= top))


def braille(dots: Bools) -> list[str]:
    """The rows of text for set dots; a cell with none is a space."""
    rows, columns = dots.shape[0] // DOT_ROWS, dots.shape[1] // DOT_COLUMNS
    cells = dots.reshape(rows, DOT_ROWS, columns, DOT_COLUMNS).astype(np.uint32)
    codes = np.einsum("rycx,yx->rc", cells, _BITS)
    characters: NDArray[np.uint32] = np.where(codes > 0, codes + _BLANK, ord(" ")).astype("<u4")
    return [row.tobytes().decode("utf-32-le") for row in characters]


def plain(dots: Bools) -> list[str]:
    """The rows of text for set dots in ASCII: by how much of the cell is filled and where."""
    rows, columns = dots.shape[0] // DOT_ROWS, dots.shape[1] // DOT_COLUMNS
    filled: Bools = np.asarray(dots.reshape(rows, DOT_ROWS, columns, DOT_COLUMNS).any(axis=3), dtype=bool)
    upper = np.asarray(filled[:, :2].any(axis=1))
    lower = np.asarray(filled[:, 2:].any(axis=1))
    many = np.asarray(filled.sum(axis=1)) >= 3
    codes = np.where(many, ord("|"), np.where(upper & lower, ord("-"), np.where(upper, ord("'"), ord("."))))
    characters: NDArray[np.uint32] = np.where(upper | lower, codes, ord(" ")).astype("<u4")
    return [row.tobytes().decode("utf-32-le") for row in characters]
