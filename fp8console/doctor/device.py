"""Checks of the cards: architecture, FP8 hardware, ECC, partitions, PCIe link, memory bandwidth."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fp8console.doctor.findings import FAIL, NOT_APPLICABLE, OK, WARN, Finding, merge, not_known, plural
from fp8console.doctor.inquiry import Answer
from fp8console.doctor.machine import Card, Machine, listing, number_in, text_in
from fp8console.doctor.tables import Tables

GROUP = "device"
#: Of KFD's node capabilities: ECC on the SRAM (HSA_CAP_SRAM_EDCSUPPORTED, the kernel's uapi/linux/kfd_sysfs.h).
SRAM_ECC = 0x04000000
#: Share of the peak bandwidth below which a copy says that something is wrong; sound cards reach 0.75 to 0.9.
LEAST_BANDWIDTH = 0.6
#: Per cent of utilisation from which a card has other work to do.
BUSY = 5
#: Architectures of data-centre cards, whose PCIe links do not slow down while they idle.
ALWAYS_FAST = ("gfx908", "gfx90a", "gfx94", "gfx95")


def check(machine: Machine, tables: Tables, answer: Answer, bandwidth: bool) -> list[Finding]:
    """All of them; ``bandwidth``: whether a copy was to be timed."""
    found = [_architecture(machine, answer)]
    if not machine.cards:
        return found + _by_torch_alone(tables, answer, bandwidth)
    found += _each(machine, lambda card: _formats(card, tables, answer))
    found += _each(machine, _ecc)
    found += [_ecc_errors(machine)] if machine.of("AMD") else []
    found += _partitions(machine)
    found += _each(machine, pcie)
    return found + _bandwidth(machine, tables, answer, bandwidth)


def _each(machine: Machine, judge: Callable[[Card], Finding]) -> list[Finding]:
    return merge((_label(machine, card), judge(card)) for card in machine.cards)


def _label(machine: Machine, card: Card) -> str:
    return f"{card.name} {card.bdf}"


def listed(cards: tuple[Card, ...]) -> str:
    """Cards by name and architecture: "2 x MI210 (gfx90a)"."""
    counted: dict[str, int] = {}
    for card in cards:
        words = f"{card.name} ({card.arch})" if card.arch else card.name
        counted[words] = counted.get(words, 0) + 1
    return ", ".join(f"{many} x {words}" if many > 1 else words for words, many in counted.items())


def _architecture(machine: Machine, answer: Answer) -> Finding:
    name = "architecture"
    trouble = f"; {'; '.join(machine.problems)}" if machine.problems else ""
    if not machine.cards:
        devices = answer.devices
        if devices:
            by_torch = ", ".join(f"{device['name']} ({arch_of(device)})" for device in devices)
            return Finding(GROUP, name, OK, f"{by_torch}, by torch")
        if machine.problems:
            return not_known(GROUP, name, f"no AMD or NVIDIA card was found, but {'; '.join(machine.problems)}")
        built_in = f"; a built-in GPU only: {listed(machine.built_in)}" if machine.built_in else ""
        evidence = f"no AMD or NVIDIA card by PCI, DRM or KFD{built_in}: trainings run on the CPU"
        return Finding(GROUP, name, NOT_APPLICABLE, evidence)
    unknown = [card for card in machine.cards if card.arch is None]
    source = "KFD" if machine.of("AMD") else "nvidia-smi"
    source = "KFD and nvidia-smi" if machine.of("AMD") and machine.of("NVIDIA") else source
    if not unknown:
        return Finding(GROUP, name, OK, f"{listed(machine.cards)}, by {source}{trouble}")
    idle = [card for card in unknown if card.driver is None]
    if idle:
        modules = sorted({"amdgpu" if card.vendor == "AMD" else "nvidia" for card in idle})
        evidence = f"{listed(machine.cards)}: no driver has taken {', '.join(card.bdf for card in idle)}{trouble}"
        remedy = f"load the driver: sudo modprobe {' '.join(modules)}; not installed: install the maker's driver"
        return Finding(GROUP, name, FAIL, evidence, remedy)
    if any(card.vendor == "AMD" for card in unknown):
        evidence = f"{listed(machine.cards)}: KFD, the driver's compute part, does not list them{trouble}"
        return Finding(GROUP, name, FAIL, evidence, "see dmesg | grep kfd, and that amdgpu is built with HSA_AMD")
    return not_known(GROUP, name, f"{listed(machine.cards)}: nvidia-smi tells nothing{trouble}")


def arch_of(device: dict[str, Any]) -> str:
    """The architecture of a device as torch tells it."""
    amd = str(device.get("arch") or "").split(":")[0]
    major, minor = device.get("capability") or (0, 0)
    return amd if amd.startswith("gfx") else f"sm_{major}{minor}"


def _formats(card: Card, tables: Tables, answer: Answer) -> Finding:
    if card.arch is None:
        return not_known(GROUP, "FP8 formats", "the card's architecture is not known")
    return _formats_of(card.arch, tables)


def _formats_of(arch: str, tables: Tables) -> Finding:
    name = "FP8 formats"
    formats = tables.formats(arch)
    if formats is None:
        return not_known(GROUP, name, f"{arch} is not in the table of architectures", "add it to doctor.toml")
    if not formats:
        evidence = f"no FP8 matrix hardware on {arch}: FP8 is emulated here"
        return Finding(GROUP, name, WARN, evidence, "train in BF16; use FP8 here for trying numerics out only")
    family = "FNUZ, not OCP: a byte means half as much" if formats[0].endswith("fnuz") else "OCP"
    return Finding(GROUP, name, OK, f"{' and '.join(formats)} in matrix hardware ({family})")


# -- ECC --------------------------------------------------------------------------------------------------------------
def _ecc(card: Card) -> Finding:
    name = "SRAM ECC"
    if card.vendor == "NVIDIA":
        mode = card.told.get("ecc.mode.current", "")
        if mode == "Enabled":
            return Finding(GROUP, name, OK, "ECC is on")
        if mode == "Disabled":
            return Finding(GROUP, name, WARN, "ECC is off", "sudo nvidia-smi -e 1, then reboot")
        return not_known(GROUP, name, "nvidia-smi does not tell it for this card")
    if not card.nodes:
        return not_known(GROUP, name, "KFD does not list the card")
    if any(node.capability is None for node in card.nodes):
        return not_known(GROUP, name, "KFD does not tell what the card is capable of")
    if all((node.capability or 0) & SRAM_ECC for node in card.nodes):
        return Finding(GROUP, name, OK, "SRAM ECC is on")
    if not (card.arch or "").startswith(ALWAYS_FAST):
        return Finding(GROUP, name, NOT_APPLICABLE, f"the driver shows none for {card.arch}")
    return Finding(GROUP, name, WARN, "SRAM ECC is off", "see amdgpu's ras_enable, and the board's firmware settings")


def _ecc_errors(machine: Machine) -> Finding:
    """The driver's counters, since it was loaded."""
    name = "ECC errors"
    lost = {card.bdf: _errors(card.device, "ue") for card in machine.of("AMD")}
    known = {bdf: many for bdf, many in lost.items() if many is not None}
    if not known:
        return not_known(GROUP, name, "the driver shows no counters here")
    corrected = sum(_errors(card.device, "ce") or 0 for card in machine.of("AMD"))
    words = f"{corrected:,} corrected"
    bad = [f"{bdf}: {many:,}" for bdf, many in known.items() if many]
    if bad:
        evidence = f"uncorrectable on {', '.join(bad)}; {words}"
        return Finding(GROUP, name, FAIL, evidence, "reboot the node; if they come back, have the card replaced")
    return Finding(GROUP, name, OK, f"none uncorrectable, {words}, on {plural(len(known), 'card')}")


def _errors(device: Path | None, kind: str) -> int | None:
    """Sum of the driver's error counters (files of lines "ue: 0", "ce: 0"); None where it has none."""
    if device is None:
        return None
    texts = [text_in(path) or "" for path in listing(device / "ras", "*_err_count")]
    counts = [int(found[1]) for text in texts if (found := re.search(rf"^{kind}:\s*(\d+)", text, re.MULTILINE))]
    return sum(counts) if counts else None


# -- partitions -------------------------------------------------------------------------------------------------------
def _partitions(machine: Machine) -> list[Finding]:
    name = "partitions"
    modes: dict[str, int] = {}
    for card in machine.cards:
        mode = _mode(card)
        if mode is not None:
            modes[mode] = modes.get(mode, 0) + 1
    if not modes:
        return [Finding(GROUP, name, NOT_APPLICABLE, "the cards have no partition modes, or the driver shows none")]
    words = ", ".join(f"{mode} on {plural(many, 'card')}" for mode, many in modes.items())
    devices = sum(len(card.nodes) for card in machine.of("AMD"))
    words += f": ROCm has {plural(devices, 'device')}" if devices else ""
    if len(modes) > 1:
        remedy = "one mode for all: sudo amd-smi set --compute-partition SPX, or start ranks on like devices only"
        return [Finding(GROUP, name, WARN, words, remedy)]
    return [Finding(GROUP, name, OK, words)]


def _mode(card: Card) -> str | None:
    if card.vendor == "NVIDIA":
        mode = card.told.get("mig.mode.current", "")
        return {"Enabled": "MIG", "Disabled": "no MIG"}.get(mode)
    if card.device is None:
        return None
    compute = text_in(card.device / "current_compute_partition")
    memory = text_in(card.device / "current_memory_partition")
    known = [mode for mode in (compute, memory) if mode and mode.upper() != "UNKNOWN"]
    return "/".join(known) or None


# -- PCIe -------------------------------------------------------------------------------------------------------------
def pcie(card: Card) -> Finding:
    """The card's link against the most that card and slot can do."""
    name = "PCIe"
    if card.device is None:
        return not_known(GROUP, name, "the card has no folder in /sys here")
    width, most_width = (_width(card.device / f"{which}_link_width") for which in ("current", "max"))
    speed, most_speed = (_speed(card.device / f"{which}_link_speed") for which in ("current", "max"))
    if None in (width, most_width, speed, most_speed):
        return not_known(GROUP, name, "the kernel does not tell the link's width and speed")
    assert width is not None and most_width is not None and speed is not None and most_speed is not None
    now, most = f"x{width} at {speed:g} GT/s", f"x{most_width} at {most_speed:g} GT/s"
    if width >= most_width and speed >= most_speed:
        return Finding(GROUP, name, OK, f"{now}, the card's maximum")
    above = card.device.parent
    slot = (_width(above / "max_link_width"), _speed(above / "max_link_speed"))
    if slot[0] is not None and slot[1] is not None and width >= min(slot[0], most_width) and speed >= slot[1]:
        evidence = f"{now}; the card can do {most}, its slot or switch {above.name} no more than this"
        return Finding(GROUP, name, WARN, evidence, "move the card to a faster slot if there is one")
    busy = number_in(card.device / "gpu_busy_percent")
    if width >= most_width and not (card.arch or "").startswith(ALWAYS_FAST) and not (busy or 0) > BUSY:
        return not_known(GROUP, name, f"{now} of {most}: links may slow down while the card idles; look under load")
    evidence = f"{now}; the card can do {most}"
    return Finding(GROUP, name, WARN, evidence, "reseat the card and its riser; look for link settings in the firmware")


def _width(path: Path) -> int | None:
    value = number_in(path)
    return value if value is not None and 0 < value <= 32 else None


def _speed(path: Path) -> float | None:
    match = re.match(r"(\d+(?:\.\d+)?) GT/s", text_in(path) or "")
    return float(match[1]) if match else None


# -- bandwidth --------------------------------------------------------------------------------------------------------
def _bandwidth(machine: Machine, tables: Tables, answer: Answer, asked: bool) -> list[Finding]:
    name = "memory bandwidth"
    if not asked:
        return [Finding(GROUP, name, NOT_APPLICABLE, "not measured; --bandwidth times a copy on each device")]
    measured = answer.facts.get("bandwidth")
    if not measured:
        return [not_known(GROUP, name, answer.trouble or "torch sees no device to time a copy on")]
    partitioned = any(len(card.nodes) > 1 and _mode(card) not in (None, "SPX", "SPX/NPS1") for card in machine.cards)
    busy = any((number_in(card.device / "gpu_busy_percent") or 0) > BUSY for card in machine.cards if card.device)
    return merge(
        (f"device {item['index']}", judge_bandwidth(item, answer.devices, tables, partitioned, busy))
        for item in measured
    )


def judge_bandwidth(
    item: dict[str, Any], devices: list[dict[str, Any]], tables: Tables, partitioned: bool, busy: bool
) -> Finding:
    """One device's timed copy (bytes read and written a second) against the card's known figure."""
    name = "memory bandwidth"
    if item.get("error"):
        return not_known(GROUP, name, f"the copy failed: {item['error']}")
    label = str(devices[item["index"]]["name"]) if item["index"] < len(devices) else "device"
    rate = float(item["bytes_per_second"]) / 1e9
    known = tables.bandwidth(label)
    if partitioned:
        return not_known(GROUP, name, f"{rate:,.0f} GB/s in a copy; a partition's share of the card's figure is not")
    if known is None:
        remedy = "put the card's bandwidth into doctor.toml"
        return not_known(GROUP, name, f"{rate:,.0f} GB/s in a copy; no figure for {label!r} to compare with", remedy)
    share = rate / known
    words = f"{rate:,.0f} GB/s in a copy, {share:.0%} of {label}'s {known:,.0f}"
    if share >= LEAST_BANDWIDTH:
        return Finding(GROUP, name, OK, words)
    if busy:
        return not_known(GROUP, name, f"{words}, while the cards had other work")
    remedy = "look at clocks and throttling under load (fp8console's GPU screen), and at the power cap"
    return Finding(GROUP, name, WARN, words, remedy)


def _by_torch_alone(tables: Tables, answer: Answer, bandwidth: bool) -> list[Finding]:
    """Where the system shows no card but torch does (WSL, some containers)."""
    if not answer.devices:
        return []
    found = merge((f"device {i}", _formats_of(arch_of(device), tables)) for i, device in enumerate(answer.devices))
    return found + _bandwidth(Machine(Path("/")), tables, answer, bandwidth)
