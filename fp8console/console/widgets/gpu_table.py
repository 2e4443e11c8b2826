"""All that is known of every card, a row each.

Columns that no card fills are left out; where there is little room, the least important ones too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fp8console.console import lines
from fp8console.console.glyphs import Glyphs
from fp8console.console.lines import Line, Span
from fp8console.console.snapshot import Snapshot
from fp8console.console.widgets.bars import bar
from fp8console.console.widgets.gpus import STALE, gpus_of, no_answer, no_gpus, sample_age, short_name, source_spans
from fp8console.console.widgets.panel import Panel
from fp8console.console.wording import of_text, percent_text, plural
from fp8console.diagnosis.cards import xcd_balance
from fp8console.diagnosis.conditions import THROTTLING
from fp8console.diagnosis.wording import CAUSES
from fp8console.protocol.numbers import number

Gpu = dict[str, Any]
GAP = 2
#: Cells of the bar before a card's utilisation, at least.
LEAST_BAR = 6


@dataclass(frozen=True)
class Column:
    """A title, its cells, and how soon it gives way where there is little room (0: never)."""

    title: str
    cell: Callable[[Gpu], Span | None]
    gives_way: int
    left: bool = False
    speaks: bool = True  # also without its title


def _figure(*names: str, unit: str = "", factor: float = 1.0) -> Callable[[Gpu], Span | None]:
    """Cells of figures beside each other: "612/750 W"; None where not even the first is known."""

    def cell(gpu: Gpu) -> Span | None:
        found = [number(gpu.get(name)) for name in names]
        if found[0] is None:
            return None
        words = "/".join("?" if value is None else f"{value / factor:,.0f}" for value in found)
        return words + unit, "text"

    return cell


def _rate(*names: str) -> Callable[[Gpu], Span | None]:
    return _figure(*names, unit=" GB/s", factor=1e9)


def _name(gpu: Gpu) -> Span:
    return f"{gpu.get('index', '?')} {short_name(gpu.get('name'))[:12]}", "title"


def _busy(gpu: Gpu) -> Span | None:
    busy = number(gpu.get("busy"))
    return None if busy is None else (f"{busy:.0f}%", "value")


def _memory(gpu: Gpu) -> Span | None:
    used, total = number(gpu.get("vram_used")), number(gpu.get("vram_total"))
    return None if used is None or total is None else (of_text(used, total), "text")


def _held_back(gpu: Gpu) -> Span | None:
    """The cause of most throttling since the last sample, with its share of the time."""
    told = gpu.get("throttle")
    shares = {name: number(told.get(name)) for name in CAUSES} if isinstance(told, dict) else {}
    known = {name: share for name, share in shares.items() if share is not None}
    if not known:
        return None
    name = max(known, key=lambda cause: known[cause] / THROTTLING[cause].bad)
    if not known[name]:
        return "no", "faint"
    role = "warning" if known[name] >= THROTTLING[name].bad else "text"
    return f"{CAUSES[name].removesuffix(' limit').removeprefix('the ')} {percent_text(known[name])}", role


def _xcds(gpu: Gpu) -> Span | None:
    told = gpu.get("xcd_busy")
    known = [value for value in map(number, told) if value is not None] if isinstance(told, list) else []
    if not known:
        return None
    even = xcd_balance(told)
    span = f"{min(known):.0f}-{max(known):.0f}%" if min(known) < max(known) else f"{max(known):.0f}%"
    return span, "warning" if even is not None and even < 0.8 else "text"


def _errors(gpu: Gpu) -> Span | None:
    wrong, mended = number(gpu.get("ecc_uncorrectable")), number(gpu.get("ecc_correctable"))
    if wrong is None and mended is None:
        return None
    words = "/".join("?" if count is None else f"{count:,.0f}" for count in (wrong, mended))
    return words, "alarm" if wrong else "text"


def _link(gpu: Gpu) -> Span | None:
    width, speed = number(gpu.get("pcie_width")), number(gpu.get("pcie_speed_gts"))
    if width is None:
        return None
    most, fastest = number(gpu.get("pcie_width_max")), number(gpu.get("pcie_speed_max_gts"))
    less = (most is not None and width < most) or (speed is not None and fastest is not None and speed < fastest)
    return f"x{width:.0f}" + ("" if speed is None else f" {speed:.0f} GT/s"), "warning" if less else "text"


def _partition(gpu: Gpu) -> Span | None:
    told = gpu.get("partition")
    if not isinstance(told, dict) or not told.get("compute"):
        return None
    return lines.clean(f"{told['compute']}/{told.get('memory') or '?'}"), "text"


def _torch(gpu: Gpu) -> Span | None:
    index, several = gpu.get("torch_index"), gpu.get("torch_indices")
    if isinstance(several, list) and len(several) > 1:  # a partitioned card
        whole = several == list(range(several[0], several[0] + len(several)))
        return f"cuda:{several[0]}-{several[-1]}" if whole else f"cuda:{','.join(map(str, several))}", "text"
    return (f"cuda:{index}", "text") if index is not None else ("unused", "faint") if gpu.get("used") is False else None


def _processes(gpu: Gpu) -> Span | None:
    told = gpu.get("processes")
    return (plural(len(told), "process", "processes"), "text") if isinstance(told, list) else None


def _address(gpu: Gpu) -> Span | None:
    return (lines.clean(str(gpu["bdf"])), "faint") if gpu.get("bdf") else None


def columns(glyphs: Glyphs) -> list[Column]:
    """All columns in their order."""
    degree = glyphs.degree or "C"
    return [
        Column("", _name, 0, left=True),
        Column("gfx", _busy, 0),
        Column("XCDs", _xcds, 6, speaks=False),
        Column("memory", _memory, 1),
        Column("mem busy", _figure("memory_busy", unit="%"), 5, speaks=False),
        Column("power", _figure("power_w", "power_cap_w", unit=" W"), 2),
        Column("spot/mem", _figure("temperature_c", "memory_temperature_c", unit=degree), 3),
        Column("held back", _held_back, 4, left=True),
        Column("clock", _figure("clock_mhz", unit=" MHz"), 8),
        Column("ECC un/corr", _errors, 7, speaks=False),
        Column("xgmi in/out", _rate("xgmi_read_bytes_s", "xgmi_write_bytes_s"), 11, speaks=False),
        Column("PCIe", _rate("pcie_bytes_s"), 10, speaks=False),
        Column("link", _link, 12),
        Column("torch", _torch, 9, left=True),
        Column("partition", _partition, 13, left=True),
        Column("", _processes, 14, left=True),
        Column("", _address, 15, left=True),
    ]


def table(sample: dict[str, Any] | None, sampled: float, width: int, glyphs: Glyphs, heading: bool) -> list[Line]:
    """A row a card, under a heading if there is room for one; ``sampled`` is the sample's age in seconds."""
    gpus = gpus_of(sample)
    if not gpus:
        return [[(lines.clean(no_gpus(sample)), "faint")]]
    old = [sampled + (number(gpu.get("age")) or 0.0) > STALE for gpu in gpus]
    cells = [(column, [column.cell(gpu) for gpu in gpus]) for column in columns(glyphs)]
    kept = [pair for pair in cells if pair[0].gives_way < 3 or any(span is not None for span in pair[1])]
    kept = [pair for pair in kept if heading or pair[0].speaks]
    widths = {
        column.title + str(column.gives_way): max(
            len(column.title) if heading else 0, *(len(span[0]) if span else 1 for span in spans)
        )
        for column, spans in kept
    }

    def wide(column: Column) -> int:
        return widths[column.title + str(column.gives_way)]

    least_bar = LEAST_BAR + 1 if heading else 0
    while sum(wide(column) + GAP for column, _ in kept) - GAP + least_bar > width and len(kept) > 1:
        least = max(kept, key=lambda pair: pair[0].gives_way)
        if least[0].gives_way == 0:
            break
        kept.remove(least)
    spare = width - (sum(wide(column) + GAP for column, _ in kept) - GAP)
    cell_bar = min(16, spare - 1) if spare >= 5 else 0
    body: list[Line] = [_heading([column for column, _ in kept], wide, cell_bar)] if heading else []
    for index, gpu in enumerate(gpus):
        row: Line = []
        for column, spans in kept:
            if row:
                row.append((" " * GAP, "text"))
            if column.title == "gfx" and old[index]:
                row.append((no_answer(sampled + (number(gpu.get("age")) or 0.0)), "warning"))
                break
            if column.title == "gfx" and cell_bar:
                busy = number(gpu.get("busy"))
                row += bar(busy / 100, cell_bar, glyphs) if busy is not None else [(" " * cell_bar, "text")]
                row.append((" ", "text"))
            text, role = spans[index] or ("?", "faint")
            row.append((text.ljust(wide(column)) if column.left else text.rjust(wide(column)), role))
        body.append(row)
    return body


def _heading(kept: list[Column], wide: Callable[[Column], int], cell_bar: int) -> Line:
    words = []
    for column in kept:
        text = column.title.ljust(wide(column)) if column.left else column.title.rjust(wide(column))
        words.append((" " * (cell_bar + 1) if column.title == "gfx" and cell_bar else "") + text)
    return [((" " * GAP).join(words), "faint")]


class GpuTable(Panel):
    """The newest sample's cards."""

    heading = True

    def draw(self, snapshot: Snapshot, width: int, height: int) -> list[Line]:
        sample = snapshot.status.hardware
        body = table(sample, sample_age(sample, snapshot), width - 4, self.glyphs, self.heading)
        room = height - 1
        if len(body) > room:
            more = len(body) - room + 1
            body = [*body[: room - 1], [(f"and {plural(more, 'more GPU')}; the map below scrolls to all", "faint")]]
        inside = [[(" ", "text"), *row] for row in body]
        title: Line = [("GPUs", "title")]
        return lines.frame(inside, width, height, self.glyphs, title, source_spans(snapshot), True, False)
