"""What is known of a GPU: who it is, what a source reads of it, and what counts as not known.

Libraries, driver and firmware have many ways to say "not available": 'N/A', a field of ones (16, 32 or 64 bits), a
percentage over 100. All of them become None here, never 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

SENTINELS = frozenset({0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF})
MOST = 0xFFFFFFFFFFFFFFFF
#: Characters of a card's name that are kept.
LONGEST_NAME = 60

#: Values of a sample, in the order of the record: percent, bytes, watts, degrees Celsius, MHz, bytes a second, GT/s.
MEASURED = (
    *("busy", "memory_busy", "xcd_busy", "partition", "vram_used", "vram_total", "power_w", "power_cap_w"),
    *("temperature_c", "memory_temperature_c", "clock_mhz", "memory_clock_mhz", "throttle"),
    *("pcie_bytes_s", "xgmi_read_bytes_s", "xgmi_write_bytes_s"),
    *("pcie_width", "pcie_speed_gts", "pcie_width_max", "pcie_speed_max_gts"),
    *("ecc_correctable", "ecc_uncorrectable", "processes"),
)

#: Degrees and watts beyond which a number is no measurement.
HOTTEST, STRONGEST = 200.0, 10_000.0


class Unavailable(Exception):
    """A source can't be used, or a GPU did not answer through it; its text is the reason, one line."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as one source knows it.

    ``key`` is what the source finds it by, ``bdf`` its PCI address. ``hip_id`` is the number that HIP gives it when
    nothing is hidden, as the library says; ``orders`` the same from the order of KFD's nodes: one number for each of
    its partitions, none where the kernel does not tell. An NVIDIA card's ``orders`` is its place by PCI address.
    """

    key: str
    name: str
    bdf: str | None = None
    uuid: str | None = None
    arch: str | None = None
    hip_id: int | None = None
    orders: tuple[int, ...] = ()


@dataclass
class Reading:
    """What a source read of a GPU: ``values`` by names of MEASURED, counters for rates, a note on what is missing.

    ``slow`` is what is read now and then; it stands until read again, where ``values`` does not know better. ``whole``
    is False when a call that should work failed, so that another source may know more.
    """

    values: dict[str, Any]
    slow: dict[str, Any] = field(default_factory=dict)
    counters: Counters | None = None
    note: str | None = None
    whole: bool = True
    age: float = 0.0  # seconds since the values were so

    def known(self) -> int:
        return sum(value is not None for value in self.values.values())


@dataclass
class Counters:
    """Counters that only grow; a rate is made of two readings. None for what the GPU does not count.

    ``cycles`` is the firmware's clock of the residencies ``power``, ``thermal`` and ``hbm``; ``wrap`` where these five
    start again from 0. Data are in bytes.
    """

    cycles: int | None = None
    power: int | None = None
    thermal: tuple[int | None, ...] = ()
    hbm: int | None = None
    wrap: int | None = None
    pcie: int | None = None
    xgmi_read: int | None = None
    xgmi_write: int | None = None


def known(value: Any, most: float = math.inf) -> Any:
    """The number, or None for what is none: text, a truth value, NaN, below 0, a field of ones, over ``most``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    # Whole numbers have any size in Python: beyond 64 bits they are none that a card tells.
    if isinstance(value, int) and abs(value) > MOST:
        return None
    return None if not math.isfinite(value) or value < 0 or value in SENTINELS or value > most else value


def percent(value: Any) -> Any:
    return known(value, 100)


def degrees(value: Any) -> float | None:
    value = known(value, HOTTEST)
    return None if value is None else float(value)


def watts(value: Any) -> float | None:
    value = known(value, STRONGEST)
    return None if value is None else float(value)


def total(values: Iterable[Any]) -> Any:
    """The sum of what is known; None when nothing is."""
    found = [value for value in map(known, values) if value is not None]
    return sum(found) if found else None


def mean(values: Iterable[Any]) -> float | None:
    found = [value for value in map(known, values) if value is not None]
    return round(sum(found) / len(found), 1) if found else None


def used_of(used: Any, of: Any) -> Any:
    """Memory in use, None where it is more than there is."""
    used, of = known(used), known(of)
    return None if used is None or (of is not None and used > of) else used


def xcd_busy(rows: Iterable[Iterable[Any]], partitions: Any) -> list[Any] | None:
    """Percent of each XCD of a card, partition after partition; None when the card tells of none.

    ``rows`` has a row of 8 for each of 8 partitions; what the card has not is a field of ones at a row's end. A card
    in one partition has its XCDs in the first row, one in two has 4 each in two rows.
    """
    found: list[Any] = []
    count = known(partitions, 8)
    for number, row in enumerate(rows):
        if count is not None and number >= count:
            break
        values = [known(value) for value in row]
        while values and values[-1] is None:
            values.pop()
        found += [percent(value) for value in values]
    return found or None


def address(text: Any) -> str | None:
    """A PCI address as 0000:05:00.0, from any usual way to write one; None for text that is none."""
    match = re.fullmatch(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", str(text).strip().lower())
    if match is None:
        return None
    return f"{int(match[1] or '0', 16):04x}:{match[2]}:{match[3]}.{match[4]}"


def short_name(name: str) -> str:
    """A card's name without its maker's, and without what no terminal should get."""
    name = "".join(character for character in name if character.isprintable())
    for word in ("AMD ", "Instinct ", "NVIDIA ", "Advanced Micro Devices, Inc. "):
        name = name.removeprefix(word)
    return name[:LONGEST_NAME].strip()
