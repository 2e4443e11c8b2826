"""The binary table in ``gpu_metrics``, revisions 1.0 to 1.8.

Offsets and units: the structs gpu_metrics_v1_* of the kernel's kgd_pp_interface.h, which are natural C layouts (not
packed), little-endian on every machine that has these cards. The driver fills a table with ones before it writes what
the card has. Revision 1.9 has no fixed layout and is told as unknown, like any other.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from fp8console.hardware.gpu import Counters, Reading, degrees, known, mean, percent, total, watts, xcd_busy

HEADER = struct.Struct("<HBB")  # size in bytes, revision of the format, of its content
MOST_PARTITIONS = 8


@dataclass(frozen=True)
class Layout:
    """``sizes`` that a revision's table may have, and (offset, struct code) of each field that is used."""

    sizes: tuple[int, ...]
    fields: dict[str, tuple[int, str]]
    partitions: int | None = None  # offset of the first partition's part


_FIRST = {
    "temperature_edge": (4, "H"),
    "temperature_hotspot": (6, "H"),
    "temperature_mem": (8, "H"),
    "gfx_activity": (16, "H"),
    "umc_activity": (18, "H"),
    "power": (22, "H"),
    "average_gfxclk": (40, "H"),
    "average_uclk": (44, "H"),
    "gfxclk": (54, "H"),
    "uclk": (58, "H"),
    "pcie_link_width": (74, "H"),
    "pcie_link_speed": (76, "H"),
}
_INSTINCT = {
    "temperature_hotspot": (4, "H"),
    "temperature_mem": (6, "H"),
    "power": (10, "H"),
    "gfx_activity": (12, "H"),
    "umc_activity": (14, "H"),
}


def _instinct(link: int, bandwidth: int, xgmi: int, clocks: int, **others: tuple[int, str]) -> dict[str, Any]:
    """The fields that revisions 1.4 and up have in the same groups at different offsets."""
    return {
        **_INSTINCT,
        "pcie_link_width": (link, "H"),
        "pcie_link_speed": (link + 2, "H"),
        "pcie_bandwidth_inst": (bandwidth, "Q"),
        "xgmi_read": (xgmi, "8Q"),
        "xgmi_write": (xgmi + 64, "8Q"),
        "gfxclk": (clocks, "8H"),
        "uclk": (clocks + 40, "H"),
        **others,
    }


def _residency(start: int) -> dict[str, tuple[int, str]]:
    names = ("cycles", "prochot", "ppt", "socket_thm", "vr_thm", "hbm_thm")
    return {name: (start + 4 * number, "I") for number, name in enumerate(names)}


LAYOUTS = {
    0: Layout(
        (80,),
        {
            **{name: (offset + 12, code) for name, (offset, code) in _FIRST.items() if offset <= 22},
            **{name: (offset, code) for name, (offset, code) in _FIRST.items() if 40 <= offset <= 58},
            "pcie_link_width": (74, "B"),
            "pcie_link_speed": (75, "B"),
        },
    ),
    1: Layout((96,), _FIRST),
    2: Layout((104,), _FIRST),
    3: Layout((120,), {**_FIRST, "independent_status": (112, "Q")}),
    4: Layout((288,), _instinct(48, 72, 104, 240, throttle_status=(40, "I"))),
    5: Layout((360,), _instinct(112, 136, 176, 312, throttle_status=(104, "I"))),
    6: Layout((1664,), _instinct(60, 88, 128, 264, **_residency(32), num_partition=(306, "H")), 312),
    7: Layout((2208,), _instinct(68, 96, 136, 296, **_residency(40), num_partition=(338, "H")), 344),
    # A partition's part grew by a field while the revision was new.
    8: Layout((3360, 3872), _instinct(68, 96, 136, 296, **_residency(40), num_partition=(338, "H")), 344),
}

#: Bits of the status that is the same for all cards (SMU_THROTTLER_*_BIT): limits of power and current, the memory's
#: temperature, every other temperature.
INDEPENDENT_BITS = {"power": 0x00FF_00FF, "hbm": 1 << 34, "thermal": 0xFFFB_0000_0000}
#: Bits of the MI300's own status, in revisions 1.4 and 1.5 (THROTTLER_*_BIT of smu13_driver_if_v13_0_6.h).
INSTINCT_BITS = {"power": 1 << 1, "hbm": 1 << 4, "thermal": 1 << 0 | 1 << 2 | 1 << 3}


def parse(data: bytes) -> Reading:
    """The table's values and counters; with a note and no values for one that can't be read."""
    if len(data) < HEADER.size:
        return Reading({}, note="gpu_metrics is empty" if not data else f"gpu_metrics has only {len(data)} bytes")
    size, format_revision, revision = HEADER.unpack_from(data)
    layout = LAYOUTS.get(revision) if format_revision == 1 else None
    if layout is None:
        return Reading({}, note=f"gpu_metrics v{format_revision}.{revision} is not known here")
    if size not in layout.sizes or len(data) < size:
        wanted = " or ".join(map(str, layout.sizes))
        return Reading(
            {}, note=f"gpu_metrics v1.{revision} has {min(size, len(data))} bytes where {wanted} are expected"
        )
    raw: dict[str, Any] = {}
    for name, (offset, code) in layout.fields.items():
        numbers = struct.unpack_from("<" + code, data, offset)
        if code == "B" and numbers[0] == 0xFF:
            numbers = (0xFFFF,)
        raw[name] = numbers[0] if len(numbers) == 1 else numbers
    return Reading(_values(raw, layout, data[:size]), counters=_counters(raw))


def _values(raw: dict[str, Any], layout: Layout, data: bytes) -> dict[str, Any]:
    hotspot = degrees(raw["temperature_hotspot"])
    clock = mean(_several(raw["gfxclk"]))
    memory_clock = known(raw["uclk"])
    speed = known(raw["pcie_link_speed"], 10_000)
    bandwidth = known(raw.get("pcie_bandwidth_inst"))
    return {
        "busy": percent(raw["gfx_activity"]),
        "memory_busy": percent(raw["umc_activity"]),
        "xcd_busy": _xcds(raw, layout, data),
        "power_w": watts(raw["power"]),
        "temperature_c": hotspot if hotspot is not None else degrees(raw.get("temperature_edge")),
        "memory_temperature_c": degrees(raw["temperature_mem"]),
        "clock_mhz": clock if clock is not None else known(raw.get("average_gfxclk")),
        "memory_clock_mhz": memory_clock if memory_clock is not None else known(raw.get("average_uclk")),
        "throttle": throttle_now(raw.get("independent_status"), raw.get("throttle_status")),
        "pcie_bytes_s": None if bandwidth is None else bandwidth * 1e9,
        "pcie_width": known(raw["pcie_link_width"], 32) or None,
        "pcie_speed_gts": speed / 10 if speed else None,
    }


def _xcds(raw: dict[str, Any], layout: Layout, data: bytes) -> list[Any] | None:
    if layout.partitions is None:
        return None
    stride = (len(data) - layout.partitions - 8) // MOST_PARTITIONS  # 8: a counter of 4 bytes at the end, and padding
    rows = [struct.unpack_from("<8I", data, layout.partitions + stride * part) for part in range(MOST_PARTITIONS)]
    return xcd_busy(rows, raw["num_partition"])


def throttle_now(independent: Any, instinct: Any) -> dict[str, float] | None:
    """What throttles at this moment, 0 or 1 each, from the status bits of cards that have no residency counters.

    ``independent`` is gpu_metrics' indep_throttle_status (64 bits of ones for none), ``instinct`` an MI300's own.
    """
    if known(independent) is not None:
        return {name: float(bool(independent & bits)) for name, bits in INDEPENDENT_BITS.items()}
    if known(instinct) is not None:
        return {name: float(bool(instinct & bits)) for name, bits in INSTINCT_BITS.items()}
    return None


def _counters(raw: dict[str, Any]) -> Counters | None:
    if "xgmi_read" not in raw:
        return None
    return Counters(
        cycles=known(raw.get("cycles")),
        power=known(raw.get("ppt")),
        # PROCHOT is another part of the node calling the card too hot.
        thermal=tuple(known(raw.get(name)) for name in ("prochot", "socket_thm", "vr_thm")),
        hbm=known(raw.get("hbm_thm")),
        wrap=1 << 32,
        xgmi_read=kilobytes(raw["xgmi_read"]),
        xgmi_write=kilobytes(raw["xgmi_write"]),
    )


def kilobytes(links: Any) -> int | None:
    """Bytes over all links, from each link's kilobytes."""
    data = total(links)
    return None if data is None else int(data) * 1024


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
