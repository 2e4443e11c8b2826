"""AMD GPUs as the amdgpu driver shows them in /sys; no library, no root, nothing to install.

Files and units: the kernel's documentation of amdgpu (gpu_busy_percent, mem_busy_percent, mem_info_vram_*, ras,
current_compute_partition), of PCI (current_link_*, max_link_*) and of the hwmon interface (power in microwatts,
temperatures in thousandths of a degree). What only firmware tells is in gpu_metrics.
"""

from __future__ import annotations

import glob
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fp8console.hardware.gpu import Gpu, Reading, address, degrees, known, percent, short_name, used_of, watts
from fp8console.hardware.sources import gpu_metrics, kfd

NAME = "sysfs"
AMD = 0x1002

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


@dataclass(frozen=True)
class Card:
    """One GPU and where its files are; ``sensors`` are files of temperatures by their labels."""

    gpu: Gpu
    device: str
    hwmon: str | None
    sensors: dict[str, str] = field(default_factory=dict)
    gpu_ids: tuple[str, ...] = ()


class Sysfs:
    """The cards below ``root``, normally /sys."""

    name = NAME

    def __init__(self, root: Path) -> None:
        self._root = root
        self._cards = {card.gpu.key: card for card in find_cards(root)}

    def gpus(self) -> list[Gpu]:
        return [card.gpu for card in self._cards.values()]

    def read(self, key: str, slow: bool, pids: frozenset[int]) -> Reading:
        """A card's values; with ``slow`` also those that hardly change or cost much. Raises nothing."""
        card = self._cards[key]
        if slow and (card.hwmon is None or not os.path.isdir(card.hwmon)):
            # A driver that was loaded anew gives them another number.
            hwmon, sensors = _sensors(Path(card.device))
            card = self._cards[key] = replace(card, hwmon=hwmon, sensors=sensors)
        reading = read_card(card)
        if slow:
            reading.slow = read_slowly(card)
            reading.slow["processes"] = kfd.processes(self._root, card.gpu_ids, pids) if card.gpu_ids else None
        return reading

    def close(self) -> None:
        """Nothing is held open."""


def find_cards(root: Path) -> list[Card]:
    """The AMD cards below ``root`` by PCI address; empty where there are none."""
    found: dict[str, Path] = {}
    for node in (root / "class" / "drm").glob("card*"):
        # Connectors (card0-DP-1) are beside the cards; a partition's node has a device without a vendor.
        if re.fullmatch(r"card\d+", node.name) and _integer(f"{node}/device/vendor") == AMD:
            device = (node / "device").resolve()
            found[_address(device)] = device
    nodes = kfd.nodes(root)
    return [_card(bdf, device, nodes) for bdf, device in sorted(found.items())]


def _card(bdf: str, device: Path, nodes: list[kfd.Node]) -> Card:
    mine = [node for node in nodes if node.slot == bdf.rpartition(".")[0]]
    unique = _text(f"{device}/unique_id")
    hwmon, sensors = _sensors(device)
    gpu = Gpu(
        key=bdf,
        name=_name(device),
        bdf=address(bdf),
        uuid=f"GPU-{unique.lower()}" if unique and re.fullmatch(r"[0-9a-fA-F]{16}", unique) else None,
        arch=next((node.arch for node in mine if node.arch), None),
        orders=tuple(node.order for node in mine),
    )
    return Card(gpu, str(device), hwmon, sensors, tuple(node.gpu_id for node in mine))


def _sensors(device: Path) -> tuple[str | None, dict[str, str]]:
    """The folder of a card's sensors, and those of temperatures by their labels."""
    hwmon = next(iter(sorted(glob.glob(f"{glob.escape(str(device))}/hwmon/hwmon*"))), None)
    labels = sorted(glob.glob(f"{glob.escape(hwmon)}/temp*_label")) if hwmon is not None else []
    texts = {path: _text(path) for path in labels}
    return hwmon, {label: path.removesuffix("_label") + "_input" for path, label in texts.items() if label}


def read_card(card: Card) -> Reading:
    """One reading of a card; None for whatever it does not tell."""
    metrics = _metrics(card)
    device = card.device
    total = known(_integer(f"{device}/mem_info_vram_total")) or None
    values = {
        "busy": percent(_integer(f"{device}/gpu_busy_percent")),
        "memory_busy": percent(_integer(f"{device}/mem_busy_percent")),
        "vram_used": used_of(_integer(f"{device}/mem_info_vram_used"), total),
        "vram_total": total,
        "power_w": None,
        "power_cap_w": None,
        # An MI300 has no edge sensor; the hottest spot is what throttles a card anyway.
        "temperature_c": _sensor(card, "junction"),
        "memory_temperature_c": _sensor(card, "mem"),
    }
    if values["temperature_c"] is None:
        values["temperature_c"] = _sensor(card, "edge")
    if card.hwmon is not None:
        # An MI200 has the average, an MI300 the present value.
        power = _millionths(f"{card.hwmon}/power1_average")
        values["power_w"] = power if power is not None else _millionths(f"{card.hwmon}/power1_input")
        values["power_cap_w"] = _millionths(f"{card.hwmon}/power1_cap") or None
    # The files of one value each go before the table: the driver has checked them.
    merged = {**metrics.values, **{name: value for name, value in values.items() if value is not None}}
    for name in values:
        merged.setdefault(name, None)
    if merged.get("clock_mhz") is None and card.hwmon is not None:
        merged["clock_mhz"] = _megahertz(f"{card.hwmon}/freq1_input")
    return Reading(merged, counters=metrics.counters, note=metrics.note)


def read_slowly(card: Card) -> dict[str, Any]:
    """What hardly changes: partitioning, the PCIe link's limits, ECC errors since the driver started."""
    device = card.device
    compute, memory = (_mode(f"{device}/current_{kind}_partition") for kind in ("compute", "memory"))
    return {
        "partition": {"compute": compute, "memory": memory} if compute or memory else None,
        # For cards whose gpu_metrics does not tell; what it tells comes first.
        "pcie_width": known(_integer(f"{device}/current_link_width"), 64) or None,
        "pcie_speed_gts": _link_speed(f"{device}/current_link_speed"),
        "pcie_width_max": known(_integer(f"{device}/max_link_width"), 64) or None,
        "pcie_speed_max_gts": _link_speed(f"{device}/max_link_speed"),
        **_ecc(device),
    }


def _metrics(card: Card) -> Reading:
    try:
        with open(f"{card.device}/gpu_metrics", "rb") as file:
            return gpu_metrics.parse(file.read())
    except OSError as error:
        return Reading({}, note=f"gpu_metrics: {error.strerror}")


def _ecc(device: str) -> dict[str, int | None]:
    """Errors of all blocks of the card that count them, from lines like "ue: 0" and "ce: 3"."""
    counts: dict[str, int | None] = {"ue": None, "ce": None}
    try:
        names = [name for name in os.listdir(f"{device}/ras") if name.endswith("_err_count")]
    except OSError:
        names = []
    for name in names:
        for kind, number in re.findall(r"^(ue|ce):\s*(\d+)$", _text(f"{device}/ras/{name}") or "", re.MULTILINE):
            if known(int(number)) is not None:
                counts[kind] = (counts[kind] or 0) + int(number)
    return {"ecc_correctable": counts["ce"], "ecc_uncorrectable": counts["ue"]}


def _text(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            return file.read(4096).decode(errors="replace").strip()
    except OSError:
        return None


def _integer(path: str) -> int | None:
    text = _text(path)
    if not text:
        return None
    try:
        return int(text, 0)
    except ValueError:
        return None


def _mode(path: str) -> str | None:
    """A partition mode, such as SPX or NPS1."""
    text = _text(path) or ""
    return text if re.fullmatch(r"[A-Z]{3}\d*", text) else None


def _millionths(path: str) -> float | None:
    value = known(_integer(path))
    return None if value is None else watts(value / 1e6)


def _megahertz(path: str) -> float | None:
    value = known(_integer(path))
    return None if value is None else value / 1e6


def _sensor(card: Card, label: str) -> float | None:
    path = card.sensors.get(label)
    value = known(_integer(path)) if path is not None else None
    # 0xFFFF in the driver's tables arrives multiplied by a thousand, or as such.
    return None if value is None else degrees(value / 1000)


def _link_speed(path: str) -> float | None:
    match = re.match(r"(\d+(?:\.\d+)?) GT/s", _text(path) or "")
    return float(match[1]) if match else None


def _address(device: Path) -> str:
    if re.fullmatch(r"[0-9a-fA-F]{4,}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]", device.name):
        return device.name.lower()
    match = re.search(r"^PCI_SLOT_NAME=(\S+)$", _text(f"{device}/uevent") or "", re.MULTILINE)
    return match.group(1).lower() if match else device.name


def _name(device: Path) -> str:
    name = _text(f"{device}/product_name")
    if name:
        return short_name(name)
    number = _integer(f"{device}/device")
    if number is None:
        return "AMD GPU"
    return INSTINCT_NAMES.get(number, f"AMD GPU {number:#06x}")
