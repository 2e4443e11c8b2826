"""Machines, Pythons and surroundings to try the doctor on: folders and scripts, made up from what real ones hold."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from fp8console.doctor import access, machine, tables
from fp8console.doctor.findings import Finding
from fp8console.doctor.inquiry import Answer

#: PCI device number, product name, memory, KFD's gfx_target_version (major * 10000 + minor * 100 + stepping).
MI210 = (0x740F, "AMD Instinct MI210", 68_702_699_520, 90010)
MI300X = (0x74A1, "AMD Instinct MI300X", 206_141_652_992, 90402)
RX9070 = (0x7550, "", 17_095_983_104, 120001)
RYZEN = (0x164E, "", 536_870_912, 100306)
SRAM_ECC = 1 << 26


def machine_of(root: Path, *models: tuple, nodes: int = 1, kfd: bool = True, **files: object) -> machine.Machine:
    """A machine with these cards, each with so many KFD nodes; ``files``: more files of each card's folder."""
    (root / "bus/pci/devices").mkdir(parents=True)
    (root / "class/drm").mkdir(parents=True)
    topology = root / "class/kfd/kfd/topology/nodes"
    node = write(topology / "0/properties", "cpu_cores_count 64\ngfx_target_version 0\n") if kfd else None
    number = 1
    for index, (device, product, memory, version) in enumerate(models):
        bus = 3 + 0x20 * index
        slot = root / "devices/pci0000:00" / f"0000:00:{index + 1:02x}.0"
        card = slot / f"0000:{bus:02x}:00.0"
        contents = {
            "vendor": "0x1002",
            "device": f"{device:#06x}",
            "class": "0x038000",
            "product_name": product,
            "mem_info_vram_total": memory,
            "current_link_width": 16,
            "max_link_width": 16,
            "current_link_speed": "16.0 GT/s PCIe",
            "max_link_speed": "16.0 GT/s PCIe",
            **files,
        }
        for name, value in contents.items():
            write(card / name, value)
        write(slot / "max_link_width", 16)
        write(slot / "max_link_speed", "32.0 GT/s PCIe")
        (root / "bus/pci/devices" / card.name).symlink_to(card)
        (root / "class/drm" / f"card{index}").mkdir()
        (root / "class/drm" / f"card{index}" / "device").symlink_to(card)
        for partition in range(nodes if node else 0):
            lines = {"gfx_target_version": version, "vendor_id": 0x1002, "location_id": bus << 8 | partition}
            text = "".join(f"{key} {value}\n" for key, value in {**lines, "domain": 0, "capability": SRAM_ECC}.items())
            write(topology / str(number) / "properties", text)
            number += 1
    return look(root)


def look(root: Path) -> machine.Machine:
    return machine.look(root, TABLES, {})


def write(path: Path, value: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{value}\n" if not str(value).endswith("\n") else str(value))
    return path


TABLES = tables.load(None)
CPU = Answer("python", {"torch": {"version": "2.13.0+cpu", "hip": None, "cuda": None}, "packages": {}, "count": 0})


def rocm(count: int = 1, arch: str = "gfx90a", runtime: int | None = None, **packages: str) -> Answer:
    """A ROCm build of torch that counts so many devices."""
    runtime = count if runtime is None else runtime
    device = {"name": "AMD Instinct MI210", "arch": f"{arch}:sramecc+:xnack-", "capability": [9, 0], "memory": 1}
    facts = {
        "torch": {"version": "2.9.1+rocm6.4", "hip": "6.4.43484-123eb5128", "cuda": None},
        "packages": packages,
        "count": count,
        "runtime_count": runtime,
        "archs": ["gfx900", "gfx90a", "gfx942", "gfx1100"],
        "devices": [device] * runtime,
        "nccl": "2.22.3",
    }
    return Answer("/venv/bin/python", facts)


def surroundings(**changes: object) -> access.Surroundings:
    """A host where all is well, with a card, but for ``changes``."""
    fine = access.Surroundings(
        user="ann",
        root=False,
        groups=frozenset({"ann", "render", "video"}),
        kfd=access.Device("/dev/kfd", True, "render"),
        render=(access.Device("/dev/dri/renderD128", True, "render"),),
        nvidia=(),
        container=None,
        shm=64 << 30,
        memlock=-1,
        rdma=False,
        runs=access.Folder(Path("/home/ann/.local/state/fp8console/runs"), Path("/home/ann"), True, "ext4", 900 << 30),
        killed_at_logout=None,
        systemd=True,
        environ={"LANG": "en_GB.UTF-8", "TERM": "xterm-256color"},
    )
    return replace(fine, **changes)  # type: ignore[arg-type]


def python_with(folder: Path, **modules: str) -> str:
    """A Python in which these modules, given as source, are found before any that is installed."""
    for name, source in modules.items():
        write(folder / "modules" / name / "__init__.py", source)
    return script(folder, f'PYTHONPATH={folder / "modules"} exec {sys.executable} -S "$@"')


def script(folder: Path, line: str) -> str:
    path = write(folder / "python", f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return str(path)


def torch_source(hip: str | None = None, cuda: str | None = None, counting: str = "return 0", runtime: int = 0) -> str:
    """A torch with a version, a build, and devices to count."""
    return f"""
import types
__version__ = "2.9.1"
version = types.SimpleNamespace(hip={hip!r}, cuda={cuda!r})
class cuda:
    def device_count():
        {counting}
    def get_arch_list():
        return ["gfx90a", "gfx942"]
    def get_device_properties(index):
        return types.SimpleNamespace(
            name="AMD Instinct MI210", gcnArchName="gfx90a:sramecc+:xnack-", major=9, minor=0, total_memory=68 << 30)
    class nccl:
        def version():
            return (2, 22, 3)
class _C:
    def _cuda_getDeviceCount():
        return {runtime}
"""


def environ() -> dict[str, str]:
    hidden = ("PYTHONPATH", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    return {name: value for name, value in os.environ.items() if name not in hidden}


def verdicts(found: list[Finding]) -> dict[str, str]:
    return {finding.name: finding.verdict for finding in found}


def named(found: list[Finding], name: str) -> Finding:
    fitting = [finding for finding in found if finding.name == name]
    assert len(fitting) == 1, found
    return fitting[0]


def bad(found: list[Finding]) -> set[str]:
    """The names of what warns or fails."""
    return {finding.name for finding in found if finding.verdict in ("warn", "fail")}
