"""The kernel's list of compute devices (KFD), below ``class/kfd/kfd``: HIP's numbers, architectures, who uses them.

HIP numbers GPUs in the order of KFD's nodes, and a partition of an MI300 is a node of its own. Files and their meaning:
the kernel's kfd_topology.c (gfx_target_version = major * 10000 + minor * 100 + stepping) and kfd_process.c.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

#: The process namespace of the machine itself; in any other one KFD's process numbers are not ours.
MACHINE_NAMESPACE = "pid:[4026531836]"


@dataclass(frozen=True)
class Node:
    """One GPU or partition. ``order`` is the number that HIP gives it when nothing is hidden."""

    order: int
    gpu_id: str
    slot: str  # PCI address without the function: 0000:05:00
    arch: str | None
    render_minor: int | None
    unique_id: int | None


def nodes(root: Path) -> list[Node]:
    """All GPU nodes below ``root`` (normally /sys) in HIP's order; empty where KFD or the permission is missing."""
    folder = root / "class" / "kfd" / "kfd" / "topology" / "nodes"
    try:
        numbers = sorted(int(name) for name in os.listdir(folder) if name.isdecimal())
    except OSError:
        return []
    found: list[Node] = []
    for number in numbers:
        try:
            gpu_id = (folder / str(number) / "gpu_id").read_text(errors="replace").strip()
            properties = _properties((folder / str(number) / "properties").read_text(errors="replace"))
        except OSError:
            # A node that may not be read is a GPU hidden from this container: HIP does not count it either.
            continue
        # The processor's node has 0.
        if not re.fullmatch(r"0*[1-9]\d*", gpu_id, re.ASCII) or not properties.get("simd_count"):
            continue
        location, domain = properties.get("location_id", 0), properties.get("domain", 0)
        found.append(
            Node(
                order=len(found),
                gpu_id=gpu_id,
                slot=f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}",
                arch=arch_of(properties.get("gfx_target_version")),
                render_minor=properties.get("drm_render_minor"),
                unique_id=properties.get("unique_id") or None,
            )
        )
    return found


def _properties(text: str) -> dict[str, int]:
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        try:
            found[name] = int(value)
        except ValueError:
            continue
    return found


def arch_of(version: int | None) -> str | None:
    """gfx90a for 90010, gfx942 for 90402, gfx1100 for 110000; the stepping is a hexadecimal digit."""
    if not version or not 0 < version < 1_000_000:
        return None
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def processes(root: Path, gpu_ids: Iterable[str], pids: frozenset[int]) -> list[dict[str, int | None]] | None:
    """Those of ``pids`` that use a GPU, with their bytes there; None when that can't be told.

    In a container with processes of its own KFD's numbers are other ones, so nothing is known.
    """
    try:
        if os.readlink("/proc/self/ns/pid") != MACHINE_NAMESPACE:
            return None
        names = set(os.listdir(root / "class" / "kfd" / "kfd" / "proc"))
    except OSError:
        return None
    gpu_ids = list(gpu_ids)
    found: list[dict[str, int | None]] = []
    for pid in sorted(pids):
        if str(pid) not in names:
            continue
        vram = None
        for gpu_id in gpu_ids:
            try:
                with open(root / "class" / "kfd" / "kfd" / "proc" / str(pid) / f"vram_{gpu_id}", "rb") as file:
                    vram = (vram or 0) + int(file.read())
            except (OSError, ValueError):
                continue
        if vram:
            found.append({"pid": pid, "vram": vram})
    return found
