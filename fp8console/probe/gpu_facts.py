"""Which GPU this process trains on, for joining torch's devices with a library's: their orders differ."""

from __future__ import annotations

import os
from typing import Any

import torch

#: Variables that choose and order devices.
VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


def gpu_facts(device: str) -> dict[str, Any] | None:
    """UUID, PCI address without the function, name and architecture of ``device``; None when it is no GPU.

    Properties are only asked for where the script has initialised CUDA, for asking would do it. Which of them torch
    has depends on its version. Raises nothing.
    """
    try:
        if not device.startswith("cuda") or not torch.cuda.is_initialized():
            return None
        properties = torch.cuda.get_device_properties(torch.device(device))
        arch = getattr(properties, "gcnArchName", None)
        return {
            "uuid": _text(getattr(properties, "uuid", None)),
            "slot": _slot(properties),
            "name": _text(getattr(properties, "name", None)),
            "arch": arch.partition(":")[0] if isinstance(arch, str) else None,
            "visible": {name: os.environ[name] for name in VISIBLE if name in os.environ},
        }
    except Exception:
        return None  # only a join is lost


def _slot(properties: Any) -> str | None:
    numbers = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    known = [number for number in numbers if isinstance(number, int)]
    return "{:04x}:{:02x}:{:02x}".format(*known) if len(known) == 3 else None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
