"""Lines of text with roles, before any terminal or theme: what widgets draw and what tests read."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size

from fp8console.console.glyphs import Glyphs

#: A piece of text and its role; console.tcss gives each role its colour as ``role--<name>``.
Span = tuple[str, str]
Line = list[Span]

ROLES = (
    "text",
    "rule",
    "title",
    "value",
    "faint",
    "good",
    "warning",
    "alarm",
    "asked",
    "key",
    "cursor",
    "abandoned",
    "loss",
    "norm",
    "scale",
    "skipped",
    "alert",
    "rollback",
    "point",
    "bar",
    "bar-rest",
)

_CONTROLS = dict.fromkeys((*range(32), *range(127, 160), 8232, 8233), " ")


_TO_ASCII = str.maketrans({"·": "-", "…": "~", "×": "x", "÷": "/", "°": " ", "→": ">", "←": "<"})


def clean(text: str, ascii_only: bool = False) -> str:
    """The text with a space for every control character: what comes from a run is data, never an instruction.

    ``ascii_only`` also replaces whatever a terminal without Unicode could not show.
    """
    if not text.isprintable():
        text = text.translate(_CONTROLS)
    if ascii_only and not text.isascii():
        text = text.translate(_TO_ASCII).encode("ascii", "replace").decode()
    return text


def width_of(line: Sequence[Span]) -> int:
    """Cells that a line takes."""
    return sum(cell_len(text) for text, _ in line)


def plain(line: Sequence[Span]) -> str:
    """The text alone."""
    return "".join(text for text, _ in line)


def fit(line: Sequence[Span], width: int, ellipsis: str = "") -> Line:
    """The line cut or padded to exactly ``width`` cells; a cut one ends with ``ellipsis``."""
    fitted: Line = []
    room = width
    for text, role in line:
        cells = cell_len(text)
        if cells <= room:
            fitted.append((text, role))
            room -= cells
            continue
        if room > 0:
            keep = room - len(ellipsis)
            fitted.append((set_cell_size(text, max(0, keep)) + ellipsis[:room], role))
        elif fitted and ellipsis:
            last, last_role = fitted[-1]
            fitted[-1] = (set_cell_size(last, max(0, cell_len(last) - len(ellipsis))) + ellipsis, last_role)
        return fitted
    if room > 0:
        fitted.append((" " * room, "text"))
    return fitted


def spread(left: Sequence[Span], right: Sequence[Span], width: int, ellipsis: str = "") -> Line:
    """Two parts at the ends of one line; the left one gives way."""
    room = width - width_of(right)
    if room < 1:
        return fit(left, width, ellipsis)
    return [*fit(left, room, ellipsis), *right]


def rule(width: int, title: Sequence[Span], note: Sequence[Span], corners: tuple[str, str], glyphs: Glyphs) -> Line:
    """A horizontal rule with a title at its left and a note at its right end."""
    inner = width - 2
    head: Line = [(" ", "rule"), *title, (" ", "rule")] if title else []
    tail: Line = [(" ", "rule"), *note, (" ", "rule")] if note else []
    if width_of(head) + width_of(tail) > inner:
        tail = tail if width_of(tail) <= inner // 2 else []
        head = fit(head, min(width_of(head), max(0, inner - width_of(tail))), glyphs.ellipsis) if head else []
    between = max(0, inner - width_of(head) - width_of(tail))
    return [(corners[0], "rule"), *head, (glyphs.horizontal * between, "rule"), *tail, (corners[1], "rule")]


def frame(
    body: Sequence[Sequence[Span]],
    width: int,
    height: int,
    glyphs: Glyphs,
    title: Sequence[Span],
    note: Sequence[Span] = (),
    first: bool = True,
    last: bool = True,
    legend: Sequence[Span] = (),
) -> list[Line]:
    """The body in a frame of ``height`` lines. One that is not ``first`` hangs on the one above it, and one that is
    not ``last`` leaves its lower edge to the next."""
    if width < 4 or height < 1:
        return [fit([], width) for _ in range(height)]
    top = (glyphs.top_left, glyphs.top_right) if first else (glyphs.tee_left, glyphs.tee_right)
    lines = [rule(width, title, note, top, glyphs)]
    rows = height - 1 - int(last)
    for index in range(rows):
        content = body[index] if index < len(body) else []
        inside = fit(content, width - 2, glyphs.ellipsis)
        lines.append([(glyphs.vertical, "rule"), *inside, (glyphs.vertical, "rule")])
    if last and height > 1:
        bottom = (glyphs.bottom_left, glyphs.bottom_right)
        lines.append(rule(width, legend, (), bottom, glyphs))
    return lines[:height]
