"""Which sources are worth trying on this machine: a library is not loaded where there is no such card."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fp8console.hardware.chain import Source
from fp8console.hardware.gpu import Unavailable
from fp8console.hardware.sources import smi_command
from fp8console.hardware.sources.sysfs import Sysfs

NVIDIA = "0x10de"
AMD = "0x1002"


def openers(root: Path, forced: str | None) -> list[tuple[str, Callable[[], Source]]]:
    """The chain of sources below ``root`` (normally /sys); only the ``forced`` one where a user forces one."""
    all_of_them: dict[str, Callable[[], Source]] = {
        "amdsmi": lambda: _amdsmi(root),
        "sysfs": lambda: _sysfs(root),
        "amd-smi": lambda: smi_command.SmiCommand("amd-smi"),
        "rocm-smi": lambda: smi_command.SmiCommand("rocm-smi"),
        "nvml": lambda: _nvml(root),
    }
    if forced is not None:
        return [(forced, all_of_them[forced])]
    vendors = vendors_of(root)
    names = []
    if AMD in vendors or (root / "module" / "amdgpu").exists() or Path("/dev/kfd").exists():
        names += ["amdsmi", "sysfs"]
        names += [name for name in ("amd-smi", "rocm-smi") if smi_command.available(name)]
    if NVIDIA in vendors or (root / "module" / "nvidia").exists() or Path("/dev/nvidiactl").exists():
        names.append("nvml")
    return [(name, all_of_them[name]) for name in names]


def vendors_of(root: Path) -> set[str]:
    """PCI vendor numbers of the graphics devices below ``root``."""
    found = set()
    for path in (root / "class" / "drm").glob("card*/device/vendor"):
        try:
            found.add(path.read_text(errors="replace").strip().lower())
        except OSError:
            continue
    return found


def nothing(root: Path) -> str:
    return f"no AMD or NVIDIA GPU in {root / 'class' / 'drm'}"


def _amdsmi(root: Path) -> Source:
    from fp8console.hardware.sources.amdsmi import AmdSmi

    return AmdSmi(root)


def _nvml(root: Path) -> Source:
    from fp8console.hardware.sources.nvml import Nvml

    return Nvml(root)


def _sysfs(root: Path) -> Source:
    source = Sysfs(root)
    if not source.gpus():
        raise Unavailable(f"sysfs: no AMD GPU in {root / 'class' / 'drm'}")
    return source
