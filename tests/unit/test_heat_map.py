"""The heat map: levels by hand, what is unknown or 0, widths, and colour only where it may be."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest

from fp8console.cli.heat_map import RAMP, can_colour, can_unicode, heat_map

STEPS = np.arange(1, 9)


def grid(*rows: list[float]) -> np.ndarray:
    """Layers as rows, as they are shown; the function takes them as columns."""
    return np.array(rows, np.float64).T


def test_levels_are_even_in_log2() -> None:
    # 2^0 to 2^8 in eight levels: one bit each, the highest included in the last.
    rows = [2.0**bit for bit in range(8)]
    lines = heat_map(["a"], STEPS, grid([*rows[:7], 256.0]), 60, colour=False, unicode=True)
    assert lines[0] == "a ▁▂▃▄▅▆▇█   2^3.5"
    assert lines[1].split() == [
        "▁▂▃▄▅▆▇█",
        "2^0",
        "to",
        "2^8;",
        "steps",
        "1",
        "to",
        "8,",
        "each",
        "column",
        "one",
        "step",
    ]


def test_zeros_unknowns_and_a_map_without_anything() -> None:
    nan = float("nan")
    values = grid([0.0, nan, 1.0, 2.0], [nan, nan, nan, nan], [0.0, 0.0, 0.0, 0.0])
    lines = heat_map(["a", "b", "c"], STEPS[:4], values, 60, colour=False, unicode=False)
    assert lines[0].split(maxsplit=1)[1].startswith("0 .@")
    assert lines[1] == "b      unknown" and lines[2].split() == ["c", "0000", "unknown"]
    assert heat_map(["c"], STEPS[:2], grid([0.0, nan]), 60, False, True) == ["no gradient was measured"]
    assert heat_map([], STEPS[:0], np.empty((0, 0)), 60, False, True) == ["no gradient was measured"]


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("steps", [1, 7, 100, 1000])
def test_lines_fit_and_show_the_highest_of_what_they_stand_for(width: int, steps: int) -> None:
    values = np.full((steps, 2), 2.0**-9)
    values[steps // 2, 0] = 1.0
    names = ["transformer.blocks.11.feed_forward.down_projection", "x"]
    lines = heat_map(names, np.arange(1, steps + 1), values, width, colour=False, unicode=True)
    assert lines[0].count("█") == 1 and "█" not in lines[1]
    for line in lines[:2]:
        assert len(line) <= max(width, 20)
    # The end of a name tells layers apart.
    assert re.match(r"…\S*jection " if width < 160 else "transformer", lines[0])


def test_colours_are_whole_sequences_from_the_ramp() -> None:
    line = heat_map(["a"], STEPS, grid([2.0**bit for bit in range(8)]), 60, colour=True, unicode=True)[0]
    cells = re.findall(r"\x1b\[38;5;(\d+)m█\x1b\[0m", line)
    assert len(cells) == 8 and cells == sorted(cells, key=[str(code) for code in RAMP].index)
    assert cells[0] == str(RAMP[0]) and "\x1b" not in re.sub(r"\x1b\[(38;5;\d+|0)m", "", line)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_needs_a_terminal_that_has_it() -> None:
    assert can_colour(Terminal(), {"TERM": "xterm-256color"})
    assert not can_colour(Terminal(), {"TERM": "xterm-256color", "NO_COLOR": "1"})
    assert not can_colour(Terminal(), {"TERM": "dumb"}) and not can_colour(Terminal(), {})
    assert not can_colour(io.StringIO(), {"TERM": "xterm-256color"})


def test_marks_need_an_encoding_that_has_them() -> None:
    for encoding, wanted in (("utf-8", True), ("ascii", False), ("latin-1", False), ("no-such", False)):
        stream = type("Stream", (), {"encoding": encoding})
        assert can_unicode(stream) is wanted
