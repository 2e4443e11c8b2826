"""AMD GPUs through ROCm's own Python package, ``amdsmi``; only the sampler may import this module's library.

Importable beside a ROCm torch it can hide the GPUs from the training, so it comes from the console's environment or
from ROCm's folder and is loaded in the sampler's process alone. Not thread-safe before ROCm 7.2: one caller, one call
at a time. Never ``amdsmi_get_violation_status``, which sleeps 0.1 s: the residency counters say the same.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path
from typing import Any

from fp8console.hardware.gpu import (
    Counters,
    Gpu,
    Reading,
    Unavailable,
    address,
    degrees,
    known,
    mean,
    percent,
    short_name,
    used_of,
    watts,
    xcd_busy,
)
from fp8console.hardware.sources import gpu_metrics, kfd
from fp8console.hardware.sources.gpu_metrics import kilobytes
from fp8console.hardware.sources.quiet import quiet

NAME = "amdsmi"
NOT_SUPPORTED = 2
#: amdsmi_status_t, for the reasons shown.
ERRORS = {
    2: "not supported",
    10: "no permission: is the user in the groups render and video?",
    31: "no such device",
    34: "the amdgpu driver is not loaded",
    37: "not initialised",
    43: "data that this version of the library does not know",
}
MEGABYTE = 1 << 20


class AmdSmi:
    """The GPUs (or partitions of GPUs) that the library lists."""

    name = NAME

    def __init__(self, root: Path = Path("/sys")) -> None:
        """Load and initialise the library. Raises Unavailable with the reason."""
        self._root = root
        self._library = _load()
        with quiet() as printed:
            reason = self._begin()
        if reason is not None:
            raise Unavailable(f"amdsmi: {reason}" + (f" ({_line(printed.text)})" if printed.text else ""))
        self._gpus = {
            str(number): (self._about(str(number), handle, root), handle) for number, handle in enumerate(self._handles)
        }

    def _begin(self) -> str | None:
        try:
            self._library.amdsmi_init()
            self._handles = list(self._library.amdsmi_get_processor_handles())
        except Exception as error:
            return _words(error)
        return None if self._handles else "the library lists no GPU"

    def gpus(self) -> list[Gpu]:
        return [gpu for gpu, _ in self._gpus.values()]

    def close(self) -> None:
        with quiet():
            self._try([], "amdsmi_shut_down")

    def read(self, key: str, slow: bool, pids: frozenset[int]) -> Reading:
        """A GPU's values. Raises Unavailable when it answers nothing."""
        gpu, handle = self._gpus[key]
        problems: list[str] = []
        metrics = self._try(problems, "amdsmi_get_gpu_metrics_info", handle)
        counters = None
        if isinstance(metrics, dict):
            values, counters = _of_metrics(metrics), _counters(metrics)
            if counters.cycles is None:
                values["throttle"] = self._status(gpu)
        else:
            values = self._without_metrics(handle, problems)
        kind = getattr(self._library, "AmdSmiMemoryType", None)
        vram = getattr(kind, "VRAM", None)
        total = known(self._try(problems, "amdsmi_get_gpu_memory_total", handle, vram)) or None
        used = self._try(problems, "amdsmi_get_gpu_memory_usage", handle, vram)
        if total is None and used is None:
            usage = self._try(problems, "amdsmi_get_gpu_vram_usage", handle) or {}
            total, used = _megabytes(usage.get("vram_total")), _megabytes(usage.get("vram_used"))
        values["vram_total"], values["vram_used"] = total, used_of(used, total)
        for name, sensor in (("temperature_c", "HOTSPOT"), ("memory_temperature_c", "VRAM")):
            if values.get(name) is None:
                values[name] = self._temperature(problems, handle, sensor)
        if values.get("temperature_c") is None:
            values["temperature_c"] = self._temperature(problems, handle, "EDGE")
        reading = Reading(
            values,
            counters=counters,
            note=f"amdsmi: {problems[0]}" if problems else None,
            whole=not problems,
        )
        if slow:
            reading.slow = self._slowly(handle, pids)
        if not reading.known() and not reading.whole:
            raise Unavailable(reading.note)
        return reading

    def _status(self, gpu: Gpu) -> dict[str, float] | None:
        """What throttles now, by kind: the library makes one truth value of the bits, so from its table itself."""
        try:
            data = (self._root / "bus" / "pci" / "devices" / str(gpu.bdf) / "gpu_metrics").read_bytes()
        except OSError:
            return None
        return gpu_metrics.parse(data).values.get("throttle")

    def _without_metrics(self, handle: Any, problems: list[str]) -> dict[str, Any]:
        """What the library tells one by one, where its table of metrics can't be had."""
        activity = self._try(problems, "amdsmi_get_gpu_activity", handle) or {}
        power = self._try(problems, "amdsmi_get_power_info", handle) or {}
        return {
            "busy": percent(activity.get("gfx_activity")),
            "memory_busy": percent(activity.get("umc_activity")),
            "power_w": _first(watts, power, "current_socket_power", "average_socket_power", "socket_power"),
        }

    def _temperature(self, problems: list[str], handle: Any, sensor: str) -> float | None:
        kinds, metrics = self._library.AmdSmiTemperatureType, self._library.AmdSmiTemperatureMetric
        return degrees(
            self._try(problems, "amdsmi_get_temp_metric", handle, getattr(kinds, sensor, None), metrics.CURRENT)
        )

    def _slowly(self, handle: Any, pids: frozenset[int]) -> dict[str, Any]:
        ignored: list[str] = []
        ecc = self._try(ignored, "amdsmi_get_gpu_total_ecc_count", handle) or {}
        power = self._try(ignored, "amdsmi_get_power_info", handle) or {}
        cap = self._try(ignored, "amdsmi_get_power_cap_info", handle) or {}
        link = (self._try(ignored, "amdsmi_get_pcie_info", handle) or {}).get("pcie_static", {})
        compute = _text(self._try(ignored, "amdsmi_get_gpu_compute_partition", handle))
        memory = _text(self._try(ignored, "amdsmi_get_gpu_memory_partition", handle))
        processes = self._try(ignored, "amdsmi_get_gpu_process_list", handle)
        speed = known(link.get("max_pcie_speed"))
        return {
            "ecc_correctable": known(ecc.get("correctable_count")),
            "ecc_uncorrectable": known(ecc.get("uncorrectable_count")),
            "power_cap_w": _cap(cap.get("power_cap")) or _cap(power.get("power_limit")),
            "pcie_width_max": known(link.get("max_pcie_width"), 64) or None,
            # In MT/s from most versions, whatever their comment says.
            "pcie_speed_max_gts": (speed / 1000 if speed >= 1000 else float(speed)) if speed else None,
            "partition": {"compute": compute, "memory": memory} if compute or memory else None,
            "processes": _processes(processes, pids),
        }

    def _about(self, key: str, handle: Any, root: Path) -> Gpu:
        ignored: list[str] = []
        with quiet():
            bdf = _bdf_of_id(self._try(ignored, "amdsmi_get_gpu_bdf_id", handle))
            if bdf is None:
                # Without /dev/dri this one says 0000:00:00.0 of every card.
                bdf = address(self._try(ignored, "amdsmi_get_gpu_device_bdf", handle))
                bdf = None if bdf == "0000:00:00.0" else bdf
            about = self._try(ignored, "amdsmi_get_gpu_enumeration_info", handle) or {}
            asic = self._try(ignored, "amdsmi_get_gpu_asic_info", handle) or {}
            board = self._try(ignored, "amdsmi_get_gpu_board_info", handle) or {}
        nodes = [node for node in kfd.nodes(root) if bdf is not None and node.slot == bdf.rpartition(".")[0]]
        version = asic.get("target_graphics_version")
        name = _text(asic.get("market_name")) or _text(board.get("product_name"))
        return Gpu(
            key=key,
            name=short_name(name) if name else "AMD GPU",
            bdf=bdf,
            uuid=_text(about.get("hip_uuid")),
            arch=version
            if re.fullmatch(r"gfx[0-9a-f]{3,4}", str(version))
            else next((node.arch for node in nodes if node.arch), None),
            hip_id=known(about.get("hip_id")),
            orders=tuple(node.order for node in nodes),
        )

    def _try(self, problems: list[str], name: str, *arguments: Any) -> Any:
        """The call's result; None, and the reason in ``problems``, when it fails. "Not supported" is no problem."""
        call = getattr(self._library, name, None)
        if call is None:
            return None
        try:
            return call(*arguments)
        except Exception as error:  # the library's own, ctypes' and decoding's
            if _code(error) != NOT_SUPPORTED:
                problems.append(f"{name.removeprefix('amdsmi_get_')}: {_words(error)}")
            return None


NOT_INSTALLED = "the package is not installed in the console's environment, nor with ROCm"


def _load() -> Any:
    """The package, from this environment or else from ROCm's folder. Raises Unavailable."""
    reasons = []
    for place in _places():
        if place is not None:
            sys.path.append(place)
        for name in [name for name in sys.modules if name.partition(".")[0] == "amdsmi"]:
            del sys.modules[name]
        with quiet():
            try:
                return importlib.import_module("amdsmi")
            except Exception as error:
                reasons.append(_why_not_loaded(error))
    raise Unavailable("amdsmi: " + next((reason for reason in reasons if reason != NOT_INSTALLED), NOT_INSTALLED))


def _places() -> list[str | None]:
    """None for this environment, then ROCm's folders that hold a package of its own."""
    found: list[str | None] = [None]
    for base in (os.environ.get("ROCM_PATH"), os.environ.get("ROCM_HOME"), "/opt/rocm"):
        place = f"{base}/share/amd_smi"
        if base and place not in found and os.path.isdir(place):
            found.append(place)
    return found


def _why_not_loaded(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == "amdsmi":
        return NOT_INSTALLED
    if isinstance(error, AttributeError) and "symbol" in str(error):
        return f"libamd_smi.so is older than the Python package ({_line(str(error))})"
    if isinstance(error, (KeyError, OSError)) and "libamd_smi" in str(error):
        return "ROCm's library libamd_smi.so was not found"
    return f"{type(error).__name__}: {_line(str(error))}"


def _of_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    """From the library's gpu_metrics; which names are filled depends on the card and the library."""
    clocks = metrics.get("current_gfxclks")
    clock = mean(clocks) if isinstance(clocks, list) else None
    bandwidth = known(metrics.get("pcie_bandwidth_inst"))
    speed = known(metrics.get("pcie_link_speed"), 10_000)
    rows = metrics.get("xcp_stats.gfx_busy_inst")
    return {
        "busy": percent(metrics.get("average_gfx_activity")),
        "memory_busy": percent(metrics.get("average_umc_activity")),
        "xcd_busy": xcd_busy(rows, metrics.get("num_partition")) if isinstance(rows, list) else None,
        # An MI200 has the average, an MI300 the present value.
        "power_w": _first(watts, metrics, "current_socket_power", "average_socket_power"),
        "temperature_c": _first(degrees, metrics, "temperature_hotspot"),
        "memory_temperature_c": _first(degrees, metrics, "temperature_mem"),
        "clock_mhz": clock
        if clock is not None
        else _first(known, metrics, "current_gfxclk", "average_gfxclk_frequency"),
        "memory_clock_mhz": _first(known, metrics, "current_uclk", "average_uclk_frequency"),
        # In GB/s (kgd_pp_interface.h), so that a card at less shows 0.
        "pcie_bytes_s": None if bandwidth is None else bandwidth * 1e9,
        "pcie_width": known(metrics.get("pcie_link_width"), 64) or None,
        "pcie_speed_gts": speed / 10 if speed else None,
    }


def _counters(metrics: dict[str, Any]) -> Counters:
    return Counters(
        cycles=known(metrics.get("accumulation_counter")),
        power=known(metrics.get("ppt_residency_acc")),
        thermal=tuple(known(metrics.get(f"{name}_residency_acc")) for name in ("prochot", "socket_thm", "vr_thm")),
        hbm=known(metrics.get("hbm_thm_residency_acc")),
        wrap=1 << 32,
        xgmi_read=kilobytes(metrics.get("xgmi_read_data_acc") or ()),
        xgmi_write=kilobytes(metrics.get("xgmi_write_data_acc") or ()),
    )


def _processes(listed: Any, pids: frozenset[int]) -> list[dict[str, Any]] | None:
    """Those of this run, from dictionaries or, in older libraries, from handles that can't be told (None)."""
    if not isinstance(listed, list) or not all(isinstance(process, dict) for process in listed):
        return None
    found = []
    for process in listed:
        if process.get("pid") in pids:
            memory = process.get("memory_usage")
            vram = memory.get("vram_mem") if isinstance(memory, dict) else process.get("mem")
            found.append({"pid": process["pid"], "vram": known(vram)})
    return sorted(found, key=lambda process: process["pid"])


def _first(rule: Any, values: dict[str, Any], *names: str) -> Any:
    for name in names:
        value = rule(values.get(name))
        if value is not None:
            return value
    return None


def _cap(value: Any) -> float | None:
    """Watts; the library says microwatts in some versions and watts in others."""
    value = known(value)
    return None if not value else watts(value / 1e6 if value >= 100_000 else value)


def _megabytes(value: Any) -> int | None:
    value = known(value)
    return None if value is None else int(value) * MEGABYTE


def _bdf_of_id(value: Any) -> str | None:
    """0000:05:00.0 from the library's 64 bits: domain, partition, bus, device, function."""
    value = known(value)
    if not value:
        return None
    function = value & 0x7 or value >> 28 & 0xF
    return f"{value >> 32:04x}:{value >> 8 & 0xFF:02x}:{value >> 3 & 0x1F:02x}.{function & 0x7}"


def _text(value: Any) -> str | None:
    if not isinstance(value, str) or value.strip() in ("", "N/A", "UNKNOWN"):
        return None
    return value.strip()


def _line(text: str) -> str:
    return " ".join(text.split())[:200]


def _code(error: Exception) -> int | None:
    code = getattr(error, "err_code", None)
    return code if isinstance(code, int) else None


def _words(error: Exception) -> str:
    code = _code(error)
    if code is None:
        return f"{type(error).__name__}: {_line(str(error))}"
    return f"error {code}, {ERRORS[code]}" if code in ERRORS else f"error {code}"
