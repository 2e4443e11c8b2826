"""AMD GPUs as the amdgpu driver shows them in /sys; no library, no root, nothing to install.

Files and units: the kernel's documentation of amdgpu (gpu_busy_percent, mem_busy_percent, mem_info_vram_*) and of the
hwmon interface (power in microwatts, temperatures in thousandths of a degree).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

AMD = 0x1002

#: What the driver and the firmware write for "not available", in fields of 16, 32 and 64 bits.
SENTINELS = frozenset({0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF})

#: PCI device numbers of AMD Instinct cards, for drivers that leave product_name empty.
INSTINCT_NAMES = {
    0x738C: "MI100",
    0x7408: "MI250X",
    0x740C: "MI250",
    0x740F: "MI210",
    0x74A0: "MI300A",
    0x74A1: "MI300X",
    0x74A2: "MI308X",
    0x74A5: "MI325X",
    0x75A0: "MI350X",
    0x75A3: "MI355X",
}

MEASURED = (
    "busy",
    "memory_busy",
    "vram_used",
    "vram_total",
    "power_w",
    "power_cap_w",
    "temperature_c",
    "memory_temperature_c",
)


@dataclass(frozen=True)
class Card:
    """One GPU: its number in order of PCI address, its name, address, and its folders in sysfs."""

    index: int
    name: str
    bdf: str
    device: Path
    hwmon: Path | None


def find_cards(root: Path) -> list[Card]:
    """The AMD cards below ``root`` (normally /sys), by PCI address; empty where there are none."""
    found: dict[str, Path] = {}
    for node in (root / "class" / "drm").glob("card*"):
        # Connectors (card0-DP-1) are beside the cards; a partition's node has a device without a vendor.
        if re.fullmatch(r"card\d+", node.name) and _integer(node / "device" / "vendor") == AMD:
            device = (node / "device").resolve()
            found[_address(device)] = device
    return [
        Card(index, _name(device), bdf, device, next(iter(sorted(device.glob("hwmon/hwmon*"))), None))
        for index, (bdf, device) in enumerate(sorted(found.items()))
    ]


def read_card(card: Card) -> dict[str, Any]:
    """One sample of a card: percent, bytes, watts and degrees Celsius; None for whatever the card does not tell."""
    used = _count(card.device / "mem_info_vram_used")
    total = _count(card.device / "mem_info_vram_total") or None
    if used is not None and total is not None and used > total:
        used = None
    sample: dict[str, Any] = {
        "index": card.index,
        "name": card.name,
        "bdf": card.bdf,
        "busy": _percent(card.device / "gpu_busy_percent"),
        "memory_busy": _percent(card.device / "mem_busy_percent"),
        "vram_used": used,
        "vram_total": total,
        "power_w": None,
        "power_cap_w": None,
        "temperature_c": None,
        "memory_temperature_c": None,
        "age": 0.0,
    }
    if card.hwmon is not None:
        # An MI200 has the average, an MI300 the present value.
        power = _watts(card.hwmon / "power1_average")
        sample["power_w"] = power if power is not None else _watts(card.hwmon / "power1_input")
        sample["power_cap_w"] = _watts(card.hwmon / "power1_cap") or None
        temperatures = _temperatures(card.hwmon)
        # An MI300 has no edge sensor; the hottest spot is what throttles a card anyway.
        sample["temperature_c"] = temperatures.get("junction", temperatures.get("edge"))
        sample["memory_temperature_c"] = temperatures.get("mem")
    return sample


def unknown_card(card: Card) -> dict[str, Any]:
    """A sample of a card that nothing is known of, not even since when."""
    return {
        "index": card.index,
        "name": card.name,
        "bdf": card.bdf,
        **dict.fromkeys(MEASURED),
        "age": None,
    }


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def _integer(path: Path) -> int | None:
    text = _text(path)
    if not text:
        return None
    try:
        return int(text, 0)
    except ValueError:
        return None


def _count(path: Path) -> int | None:
    value = _integer(path)
    return None if value is None or value < 0 or value in SENTINELS else value


def _percent(path: Path) -> int | None:
    value = _count(path)
    return None if value is None or value > 100 else value


def _watts(path: Path) -> float | None:
    value = _count(path)
    return None if value is None else value / 1e6


def _temperatures(hwmon: Path) -> dict[str, float]:
    """Degrees by sensor label ("edge", "junction", "mem")."""
    found = {}
    for path in sorted(hwmon.glob("temp*_label")):
        label = _text(path)
        value = _integer(path.with_name(path.name.replace("_label", "_input")))
        # 0xFFFF in the driver's tables arrives multiplied by a thousand, or as such.
        if label and value is not None and value not in SENTINELS and -50_000 <= value <= 200_000:
            found[label] = value / 1000
    return found


def _address(device: Path) -> str:
    if re.fullmatch(r"[0-9a-fA-F]{4,}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]", device.name):
        return device.name.lower()
    match = re.search(r"^PCI_SLOT_NAME=(\S+)$", _text(device / "uevent") or "", re.MULTILINE)
    return match.group(1).lower() if match else device.name


def _name(device: Path) -> str:
    name = _text(device / "product_name")
    if name:
        return name.removeprefix("AMD ").removeprefix("Instinct ")
    number = _integer(device / "device")
    if number is None:
        return "AMD GPU"
    return INSTINCT_NAMES.get(number, f"AMD GPU {number:#06x}")
