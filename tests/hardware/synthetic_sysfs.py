"""A folder that looks like the parts of /sys that amdgpu fills, for cards as they are on real machines."""

from __future__ import annotations

import os
from pathlib import Path

MI210 = {
    "device": 0x740F,
    "product_name": "AMD Instinct MI210",
    "vram": 68_702_699_520,
    "power": "power1_average",
    "cap": 300,
    "labels": ("edge", "junction", "mem"),
}
MI300X = {
    "device": 0x74A1,
    "product_name": "AMD Instinct MI300X",
    "vram": 206_141_652_992,
    "power": "power1_input",
    "cap": 750,
    "labels": (None, "junction", "mem"),  # no edge sensor
}
DEGREES = (46, 61, 58)
BUSY, WATTS = 73, 310


def build(root: Path, model: dict, count: int) -> list[Path]:
    """The device folders of ``count`` cards, each one percent and one watt over the one before."""
    drm = root / "class" / "drm"
    drm.mkdir(parents=True, exist_ok=True)
    devices = []
    for index in range(count):
        device = root / "devices" / "pci0000:00" / f"0000:{0x03 + 0x20 * index:02x}:00.0"
        hwmon = device / "hwmon" / f"hwmon{index + 4}"
        hwmon.mkdir(parents=True)
        node = device / "drm" / f"card{index}"
        node.mkdir(parents=True)
        (node / "device").symlink_to("../..")
        (drm / f"card{index}").symlink_to(node)
        (drm / f"card{index}-DP-1").mkdir()
        (drm / f"renderD{128 + index}").mkdir()
        files = {
            "vendor": "0x1002",
            "device": f"{model['device']:#06x}",
            "product_name": model["product_name"],
            "gpu_busy_percent": BUSY + index,
            "mem_busy_percent": 21,
            "mem_info_vram_total": model["vram"],
            "mem_info_vram_used": model["vram"] // 3 + index,
        }
        sensors = {model["power"]: (WATTS + index) * 10**6, "power1_cap": model["cap"] * 10**6, "name": "amdgpu"}
        for number, (label, degrees) in enumerate(zip(model["labels"], DEGREES), start=1):
            if label is not None:
                sensors[f"temp{number}_label"] = label
                sensors[f"temp{number}_input"] = (degrees + index) * 1000
        for folder, contents in ((device, files), (hwmon, sensors)):
            for name, value in contents.items():
                (folder / name).write_text(f"{value}\n")
        devices.append(device)
    return devices


def change(file: Path, value: object) -> None:
    """Give a file a new content in one step, as a reader of the real one would see it."""
    aside = file.with_name(file.name + ".new")
    aside.write_text(f"{value}\n")
    aside.rename(file)


def never_answer(file: Path) -> None:
    """Put something in the file's place that makes whoever reads it wait for ever."""
    file.unlink()
    os.mkfifo(file)


def hwmon(device: Path) -> Path:
    return next(device.glob("hwmon/hwmon*"))
