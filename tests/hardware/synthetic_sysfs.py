"""A folder that looks like the parts of /sys that amdgpu and KFD fill, for cards as they are on real machines.

Put over /sys in a namespace of its own (``over_sys``) it also drives ROCm's real rocm-smi.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import metrics_tables

MI210: dict[str, Any] = {
    "device": 0x740F,
    "product_name": "AMD Instinct MI210",
    "arch": 90010,
    "vram": 68_702_699_520,
    "power": "power1_average",
    "cap": 300,
    "labels": ("edge", "junction", "mem"),
    "revision": 3,
    "kfd_name": "aldebaran",
}
MI300X: dict[str, Any] = {
    "device": 0x74A1,
    "product_name": "AMD Instinct MI300X",
    "arch": 90402,
    "vram": 206_141_652_992,
    "power": "power1_input",
    "cap": 750,
    "labels": (None, "junction", "mem"),  # no edge sensor
    "revision": 6,
    "kfd_name": "ip discovery",
    "partition": ("SPX", "NPS1"),
}
DEGREES = (46, 61, 58)
BUSY, WATTS = 73, 310
CLOCKS = {3: 1700, 6: 2100}
#: Parts of the real /sys that other programs need.
KEPT = ("block", "fs", "kernel", "firmware", "power", "dev", "devices/system")


def build(root: Path, model: dict[str, Any], count: int) -> list[Path]:
    """The device folders of ``count`` cards, each one percent and one watt over the one before."""
    write(root / "module" / "amdgpu", {"initstate": "live", "version": "6.8.5"})
    for folder in ("class/drm", "class/hwmon", "bus/pci/devices"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    kfd = root / "devices" / "virtual" / "kfd" / "kfd"
    (kfd / "proc").mkdir(parents=True)
    link(root / "class" / "kfd" / "kfd", kfd)
    write(kfd / "topology", {"generation_id": 1, "system_properties": "platform_oem 0\nplatform_id 0\nplatform_rev 0"})
    processor = f"cpu_cores_count 64\nsimd_count 0\nio_links_count {count}\nlocation_id 0\ndomain 0\nhive_id 0"
    write(kfd / "topology" / "nodes" / "0", {"gpu_id": 0, "name": "", "properties": processor})
    devices = []
    for index in range(count):
        bus = 0x03 + 0x20 * index
        device = root / "devices" / "pci0000:00" / f"0000:00:{index + 1:02x}.1" / f"0000:{bus:02x}:00.0"
        sensors = device / "hwmon" / f"hwmon{index + 4}"
        _card(device, model, index)
        _sensors(sensors, model, index)
        link(root / "class" / "hwmon" / sensors.name, sensors)
        link(root / "bus" / "pci" / "devices" / device.name, device)
        for kind, number in (("card", index), ("renderD", 128 + index)):
            folder = device / "drm" / f"{kind}{number}"
            write(folder, {"dev": f"226:{number}"})
            link(folder / "device", device)
            link(root / "class" / "drm" / folder.name, folder)
        (root / "class" / "drm" / f"card{index}-DP-1").mkdir()
        node(kfd, index + 1, bus, model, index)
        write(kfd / "topology" / "nodes" / "0" / "io_links" / str(index), {"properties": io_link(0, index + 1)})
        devices.append(device)
    return devices


def node(kfd: Path, number: int, bus: int, model: dict[str, Any], index: int) -> None:
    """One of KFD's nodes: a card, or a partition of one."""
    properties = {
        "cpu_cores_count": 0,
        "simd_count": 416,
        "array_count": 8,
        "simd_arrays_per_engine": 1,
        "cu_per_simd_array": 14,
        "simd_per_cu": 4,
        "gfx_target_version": model["arch"],
        "vendor_id": 0x1002,
        "device_id": model["device"],
        "location_id": bus << 8,
        "domain": 0,
        "drm_render_minor": 128 + index,
        "unique_id": 0xABC0000000000000 + index,
        "hive_id": 0,
        "io_links_count": 1,
        "mem_banks_count": 1,
        "fw_version": 78,
    }
    text = "\n".join(f"{name} {value}" for name, value in properties.items())
    folder = kfd / "topology" / "nodes" / str(number)
    write(folder, {"gpu_id": 51000 + index, "name": model["kfd_name"], "properties": text})
    write(folder / "io_links" / "0", {"properties": io_link(number, 0)})
    bank = f"heap_type 1\nsize_in_bytes {model['vram']}\nflags 0\nwidth 4096\nmem_clk_max 1600"
    write(folder / "mem_banks" / "0", {"properties": bank})


def io_link(start: int, end: int) -> str:
    unused = ("min_latency", "max_latency", "min_bandwidth", "max_bandwidth", "recommended_transfer_size")
    zeros = "".join(f"{name} 0\n" for name in unused)
    return f"type 2\nversion_major 0\nversion_minor 0\nnode_from {start}\nnode_to {end}\nweight 20\n{zeros}flags 1"


def _card(device: Path, model: dict[str, Any], index: int) -> None:
    files: dict[str, Any] = {
        "vendor": "0x1002",
        "device": f"{model['device']:#06x}",
        "subsystem_vendor": "0x1002",
        "subsystem_device": "0x0c34",
        "revision": "0x02",
        "class": "0x120000",
        "vbios_version": "113-D67301-059",
        "unique_id": f"{0xABC0000000000000 + index:016x}",
        "product_name": model["product_name"],
        "gpu_busy_percent": BUSY + index,
        "mem_busy_percent": 21,
        "mem_info_vram_total": model["vram"],
        "mem_info_vram_used": model["vram"] // 3 + index,
        "pp_dpm_sclk": "0: 500Mhz\n1: 1700Mhz *",
        "pp_dpm_mclk": "0: 400Mhz\n1: 1600Mhz *",
        "pcie_replay_count": 0,
        "numa_node": 0,
        "max_link_speed": "32.0 GT/s PCIe",
        "max_link_width": 16,
        "current_link_speed": "32.0 GT/s PCIe",
        "current_link_width": 16,
    }
    if "partition" in model:
        files["current_compute_partition"], files["current_memory_partition"] = model["partition"]
    write(device, files)
    write(device / "ras", {"umc_err_count": f"ue: 0\nce: {index}", "gfx_err_count": "ue: 0\nce: 0", "features": "0x0"})
    (device / "gpu_metrics").write_bytes(metrics(model, index))


def metrics(model: dict[str, Any], index: int, **changes: Any) -> bytes:
    """A card's gpu_metrics, with ``changes``."""
    revision = model["revision"]
    values: dict[str, Any] = {
        "temperature_hotspot": 61 + index,
        "temperature_mem": 58 + index,
        "average_gfx_activity": BUSY + index,
        "average_umc_activity": 21,
        "pcie_link_width": 16,
        "pcie_link_speed": 320,
    }
    if revision == 3:
        values |= {
            "temperature_edge": 46 + index,
            "average_socket_power": WATTS + index,
            "current_gfxclk": 1700,
            "current_uclk": 1600,
            "indep_throttle_status": 0,
            "energy_accumulator": 1 << 20,
            "temperature_hbm": (55, 56, 57, 58),
        }
    else:
        values |= {
            "curr_socket_power": WATTS + index,
            "current_gfxclk": [2100] * 8,
            "current_uclk": 1300,
            "pcie_bandwidth_inst": 12,
            "xgmi_read_data_acc": [1000] * 8,
            "xgmi_write_data_acc": [2000] * 8,
        }
        if revision >= 6:
            values |= {
                "num_partition": 1,
                "xcds": [[BUSY - xcd for xcd in range(8)]],
                "accumulation_counter": 1000,
                "prochot_residency_acc": 0,
                "ppt_residency_acc": 0,
                "socket_thm_residency_acc": 0,
                "vr_thm_residency_acc": 0,
                "hbm_thm_residency_acc": 0,
            }
        else:
            values["throttle_status"] = 0
    return metrics_tables.table(revision, **{**values, **changes})


def _sensors(folder: Path, model: dict[str, Any], index: int) -> None:
    files: dict[str, Any] = {model["power"]: (WATTS + index) * 10**6, "name": "amdgpu"}
    files |= dict.fromkeys(("power1_cap", "power1_cap_max", "power1_cap_default"), model["cap"] * 10**6)
    files |= {"power1_cap_min": 0, "power1_label": "PPT", "freq1_input": 1_650_000_000, "freq1_label": "sclk"}
    for number, (label, degrees) in enumerate(zip(model["labels"], DEGREES), start=1):
        if label is not None:
            files[f"temp{number}_label"] = label
            files[f"temp{number}_input"] = (degrees + index) * 1000
    if model["revision"] == 3:
        # ROCm-SMI 5.2.3 does not start without; an MI300X has no such sensor, and it can't serve one.
        files |= {"in0_input": 850, "in0_label": "vddgfx"}
    write(folder, files)


def write(folder: Path, files: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name).write_text(f"{value}\n")


def link(place: Path, target: Path) -> None:
    """A relative link, as sysfs has them: the folder may be put elsewhere."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(os.path.relpath(target, place.parent))


def change(file: Path, value: object) -> None:
    """Give a file a new content in one step, as a reader of the real one would see it."""
    aside = file.with_name(file.name + ".new")
    if isinstance(value, bytes):
        aside.write_bytes(value)
    else:
        aside.write_text(f"{value}\n")
    aside.rename(file)


def never_answer(file: Path) -> None:
    """Put something in the file's place that makes whoever reads it wait for ever."""
    file.unlink()
    os.mkfifo(file)


def hwmon(device: Path) -> Path:
    return next(device.glob("hwmon/hwmon*"))


def over_sys(root: Path, command: list[str], **options: Any) -> subprocess.Popen[str]:
    """Start a command for which ``root`` is /sys, in a mount namespace of its own. Skips where that is refused."""
    unshare = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-Urm"]
    allowed = subprocess.run([*unshare, "--propagation", "private", "true"], capture_output=True, text=True)
    if allowed.returncode:
        import pytest

        pytest.skip(f"a mount namespace is refused here: {allowed.stderr.strip()}")
    mounts = "".join(f'mount --rbind /sys/{part} "$ROOT/{part}" && ' for part in KEPT if Path(f"/sys/{part}").exists())
    for part in KEPT:
        (root / part).mkdir(parents=True, exist_ok=True)
    script = f'{mounts} mount --rbind "$ROOT" /sys && exec "$@"'
    return subprocess.Popen(
        [*unshare, "--propagation", "private", "bash", "-c", script, "over_sys", *command],
        env={**os.environ, **options.pop("env", {}), "ROOT": str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
