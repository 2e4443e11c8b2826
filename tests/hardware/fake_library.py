"""The real packages amdsmi and pynvml with no library behind them: their ``ctypes.CDLL`` gives a Python object whose
entry points fill the packages' own structs. What is not filled is "not available", as ROCm's and NVIDIA's do it.

In this process: ``with hooked(FakeAmdSmi([...]))``. In another one: put ``hooked/`` on its PYTHONPATH and ``describe``
the library in its environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

VARIABLE = "FAKE_GPU_LIBRARY"
HERE = Path(__file__).resolve().parent
FIRST_HANDLE = 0x1000
GIB = 1 << 30


def mi300x(index: int, **changes: Any) -> dict[str, Any]:
    """An MI300X as amdsmi sees it; HIP counts the cards of this node from the other end."""
    return {
        "bus": 0x03 + 0x20 * index,
        "bdf_id": True,
        "metrics": {
            "temperature_hotspot": 61 + index,
            "temperature_mem": 58 + index,
            "average_gfx_activity": 73 + index,
            "average_umc_activity": 21,
            "current_socket_power": 612 + index,
            "current_gfxclks": [2100] * 8,
            "current_uclk": 1300,
            "pcie_link_width": 16,
            "pcie_link_speed": 320,
            "pcie_bandwidth_inst": 12,
            "xgmi_read_data_acc": [1000] * 8,
            "xgmi_write_data_acc": [2000] * 8,
            "num_partition": 1,
            "accumulation_counter": 1000,
            "prochot_residency_acc": 0,
            "ppt_residency_acc": 0,
            "socket_thm_residency_acc": 0,
            "vr_thm_residency_acc": 0,
            "hbm_thm_residency_acc": 0,
        },
        "xcds": [[73 - xcd for xcd in range(8)]],
        "activity": {"gfx_activity": 73 + index, "umc_activity": 21},
        "power": {"current_socket_power": 612 + index, "power_limit": 750},
        "power_cap": 750_000_000,
        "vram": (192 * GIB, 64 * GIB + index),
        "temperatures": {1: 61 + index, 2: 58 + index},
        "enumeration": {"drm_render": 128 + index, "drm_card": index, "hip_id": 7 - index},
        "uuid": f"GPU-{0xABC0000000000000 + index:016x}",
        "name": "AMD Instinct MI300X",
        "target": 0x942,
        "ecc": (index, 0),
        "compute": "SPX",
        "memory": "NPS1",
        "pcie": (16, 32000),
        "processes": [],
        **changes,
    }


class Function:
    """One of the library's entry points."""

    restype = None
    argtypes = None

    def __init__(self, library: FakeLibrary, name: str) -> None:
        self.library, self.name = library, name

    def __call__(self, *arguments: Any) -> int:
        library = self.library
        library.calls.append(self.name)
        if library.prints:
            os.write(1, b"the library prints on 1\n")
            os.write(2, b"and on 2\n")
        time.sleep(self._setting(library.delays, arguments) or 0)
        code = self._setting(library.errors, arguments)
        if code is not None:
            return int(code)
        answer: Callable[..., int] | None = getattr(library, "do_" + self.name, None)
        return library.not_supported if answer is None else answer(*arguments)

    def _setting(self, settings: dict[str, Any], arguments: tuple[Any, ...]) -> Any:
        """What is set for this entry point: for all GPUs, or by the number of the one that is asked for."""
        value = settings.get(self.name)
        return value.get(str(number(arguments[0]) - FIRST_HANDLE)) if isinstance(value, dict) else value


class FakeLibrary:
    """``errors``: entry point -> code; ``delays``: -> seconds; ``absent``: entry points that it has not yet."""

    file = ""
    not_supported = 2

    def __init__(self, gpus: list[dict[str, Any]], **settings: Any) -> None:
        self.gpus = gpus
        self.calls: list[str] = []
        self.errors: dict[str, Any] = settings.get("errors", {})
        self.delays: dict[str, float] = settings.get("delays", {})
        self.absent: list[str] = settings.get("absent", [])
        self.missing: bool = settings.get("missing", False)
        self.prints: bool = settings.get("prints", False)

    def __getattr__(self, name: str) -> Function:
        if name.startswith(("do_", "__")):
            raise AttributeError(name)
        if name in self.__dict__.get("absent", ()):
            raise AttributeError(f"/usr/lib/{self.file}: undefined symbol: {name}")
        function = Function(self, name)
        self.__dict__[name] = function
        return function

    def of(self, handle: Any) -> dict[str, Any]:
        return self.gpus[number(handle) - FIRST_HANDLE]


def number(value: Any) -> int:
    return int(getattr(value, "value", value) or 0)


def target(reference: Any) -> Any:
    """What a byref() refers to."""
    return getattr(reference, "_obj", reference)


def fill(structure: Any, values: dict[str, Any]) -> int:
    """Ones everywhere, then the values."""
    ctypes.memset(ctypes.byref(structure), 0xFF, ctypes.sizeof(structure))
    for name, value in values.items():
        if isinstance(value, list):
            for index, one in enumerate(value):
                getattr(structure, name)[index] = one
        else:
            setattr(structure, name, value)
    return 0


class FakeAmdSmi(FakeLibrary):
    file = "libamd_smi.so"

    def do_amdsmi_init(self, flags: Any) -> int:
        return 0

    def do_amdsmi_shut_down(self) -> int:
        return 0

    def do_amdsmi_get_socket_handles(self, count: Any, handles: Any) -> int:
        target(count).value = len(self.gpus)
        for index in range(len(self.gpus) if handles else 0):
            handles[index] = FIRST_HANDLE + index
        return 0

    def do_amdsmi_get_processor_handles(self, socket: Any, count: Any, handles: Any) -> int:
        target(count).value = 1
        if handles:
            handles[0] = number(socket)
        return 0

    def do_amdsmi_get_gpu_metrics_info(self, handle: Any, out: Any) -> int:
        gpu, table = self.of(handle), target(out)
        fill(table, gpu["metrics"])
        for part, row in enumerate(gpu.get("xcds") or ()):
            for index, busy in enumerate(row):
                table.xcp_stats[part].gfx_busy_inst[index] = busy
        return 0

    def do_amdsmi_get_gpu_activity(self, handle: Any, out: Any) -> int:
        return fill(target(out), self.of(handle)["activity"])

    def do_amdsmi_get_power_info(self, handle: Any, out: Any) -> int:
        return fill(target(out), self.of(handle)["power"])

    def do_amdsmi_get_power_cap_info(self, handle: Any, sensor: Any, out: Any) -> int:
        cap = self.of(handle).get("power_cap")
        return 2 if cap is None else fill(target(out), {"power_cap": cap})

    def do_amdsmi_get_gpu_memory_total(self, handle: Any, kind: Any, out: Any) -> int:
        target(out).value = self.of(handle)["vram"][0]
        return 0

    def do_amdsmi_get_gpu_memory_usage(self, handle: Any, kind: Any, out: Any) -> int:
        target(out).value = self.of(handle)["vram"][1]
        return 0

    def do_amdsmi_get_gpu_vram_usage(self, handle: Any, out: Any) -> int:
        total, used = self.of(handle)["vram"]
        return fill(target(out), {"vram_total": total >> 20, "vram_used": used >> 20})

    def do_amdsmi_get_temp_metric(self, handle: Any, sensor: Any, metric: Any, out: Any) -> int:
        value = self.of(handle)["temperatures"].get(
            number(sensor), self.of(handle)["temperatures"].get(str(number(sensor)))
        )
        if value is None:
            return 2
        target(out).value = value
        return 0

    def do_amdsmi_get_gpu_bdf_id(self, handle: Any, out: Any) -> int:
        if not self.of(handle)["bdf_id"]:
            return 2
        target(out).value = self.of(handle)["bus"] << 8 | self.of(handle).get("partition", 0) << 28
        return 0

    def do_amdsmi_get_gpu_device_bdf(self, handle: Any, out: Any) -> int:
        address = target(out)
        ctypes.memset(ctypes.byref(address), 0, ctypes.sizeof(address))
        if self.of(handle).get("dri", True):
            ctypes.cast(ctypes.byref(address), ctypes.POINTER(ctypes.c_uint64))[0] = self.of(handle)["bus"] << 8
        return 0

    def do_amdsmi_get_gpu_enumeration_info(self, handle: Any, out: Any) -> int:
        gpu = self.of(handle)
        return fill(target(out), {**gpu["enumeration"], "hip_uuid": gpu["uuid"].encode()})

    def do_amdsmi_get_gpu_asic_info(self, handle: Any, out: Any) -> int:
        gpu = self.of(handle)
        texts = dict.fromkeys(("vendor_name", "asic_serial"), b"")
        return fill(
            target(out), {**texts, "market_name": gpu["name"].encode(), "target_graphics_version": gpu["target"]}
        )

    def do_amdsmi_get_gpu_total_ecc_count(self, handle: Any, out: Any) -> int:
        correctable, uncorrectable = self.of(handle)["ecc"]
        return fill(target(out), {"correctable_count": correctable, "uncorrectable_count": uncorrectable})

    def do_amdsmi_get_gpu_compute_partition(self, handle: Any, out: Any, length: Any) -> int:
        return self._string(self.of(handle).get("compute"), out)

    def do_amdsmi_get_gpu_memory_partition(self, handle: Any, out: Any, length: Any) -> int:
        return self._string(self.of(handle).get("memory"), out)

    def _string(self, text: str | None, out: Any) -> int:
        if text is None:
            return 2
        out.value = text.encode()
        return 0

    def do_amdsmi_get_pcie_info(self, handle: Any, out: Any) -> int:
        width, speed = self.of(handle)["pcie"]
        fill(target(out), {})
        target(out).pcie_static.max_pcie_width, target(out).pcie_static.max_pcie_speed = width, speed
        target(out).pcie_static.slot_type = 0
        return 0

    def do_amdsmi_get_gpu_process_list(self, handle: Any, count: Any, out: Any) -> int:
        listed = self.of(handle)["processes"]
        for index, (pid, vram) in enumerate(listed):
            ctypes.memset(ctypes.byref(out[index]), 0, ctypes.sizeof(out[index]))
            out[index].pid, out[index].memory_usage.vram_mem = pid, vram
        target(count).value = len(listed)
        return 0


def h100(index: int, **changes: Any) -> dict[str, Any]:
    """An NVIDIA card as NVML sees it."""
    return {
        "bus": 0x18 + 0x20 * index,
        "name": "NVIDIA H100 80GB HBM3",
        "uuid": f"GPU-0000000{index}-1111-2222-3333-444444444444",
        "busy": (80 + index, 30),
        "memory": (80 * GIB, 20 * GIB),
        "power": 650_000,
        "limit": 700_000,
        "temperature": 55,
        "clocks": {"1": 1980, "2": 2619},
        "link": (16, 5, 16, 5),
        "ecc": (3, 0),
        "fields": {"82": 61, "197": 1 << 20, "198": 2 << 20},
        "violation": {"0": (1_000_000, 0), "1": (1_000_000, 0)},
        "processes": [],
        **changes,
    }


class FakeNvml(FakeLibrary):
    file = "libnvidia-ml.so.1"
    not_supported = 3

    def do_nvmlInitWithFlags(self, flags: Any) -> int:
        return 0

    def do_nvmlShutdown(self) -> int:
        return 0

    def do_nvmlErrorString(self, code: Any) -> Any:
        return b"Unknown Error"

    def do_nvmlDeviceGetCount_v2(self, out: Any) -> int:
        return self._set(out, len(self.gpus))

    def do_nvmlDeviceGetHandleByIndex_v2(self, index: Any, out: Any) -> int:
        ctypes.cast(ctypes.byref(target(out)), ctypes.POINTER(ctypes.c_uint64))[0] = FIRST_HANDLE + number(index)
        return 0

    def of(self, handle: Any) -> dict[str, Any]:
        address = ctypes.cast(ctypes.byref(handle), ctypes.POINTER(ctypes.c_uint64))[0]
        return self.gpus[address - FIRST_HANDLE]

    def _set(self, out: Any, value: Any) -> int:
        if value is None:
            return 3
        target(out).value = value
        return 0

    def _text(self, out: Any, value: str) -> int:
        out.value = value.encode()
        return 0

    def do_nvmlDeviceGetName(self, handle: Any, out: Any, length: Any) -> int:
        return self._text(out, self.of(handle)["name"])

    def do_nvmlDeviceGetUUID(self, handle: Any, out: Any, length: Any) -> int:
        return self._text(out, self.of(handle)["uuid"])

    def do_nvmlDeviceGetPciInfo_v3(self, handle: Any, out: Any) -> int:
        target(out).busId = f"00000000:{self.of(handle)['bus']:02X}:00.0".encode()
        return 0

    def do_nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        target(major).value, target(minor).value = 9, 0
        return 0

    def do_nvmlDeviceGetUtilizationRates(self, handle: Any, out: Any) -> int:
        if self.of(handle)["busy"] is None:
            return 3
        target(out).gpu, target(out).memory = self.of(handle)["busy"]
        return 0

    def do_nvmlDeviceGetMemoryInfo(self, handle: Any, out: Any) -> int:
        target(out).total, target(out).used = self.of(handle)["memory"]
        return 0

    def do_nvmlDeviceGetPowerUsage(self, handle: Any, out: Any) -> int:
        return self._set(out, self.of(handle)["power"])

    def do_nvmlDeviceGetEnforcedPowerLimit(self, handle: Any, out: Any) -> int:
        return self._set(out, self.of(handle)["limit"])

    def do_nvmlDeviceGetTemperature(self, handle: Any, sensor: Any, out: Any) -> int:
        return self._set(out, self.of(handle)["temperature"])

    def do_nvmlDeviceGetClockInfo(self, handle: Any, kind: Any, out: Any) -> int:
        return self._set(out, self.of(handle)["clocks"].get(str(number(kind))))

    def do_nvmlDeviceGetCurrPcieLinkWidth(self, handle: Any, out: Any) -> int:
        return self._set(out, self.of(handle)["link"][0])

    def do_nvmlDeviceGetCurrPcieLinkGeneration(self, handle: Any, out: Any) -> int:
        return self._set(out, self.of(handle)["link"][1])

    def do_nvmlDeviceGetMaxPcieLinkWidth(self, handle: Any, out: Any) -> int:
        return self._set(out, self.of(handle)["link"][2])

    def do_nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Any, out: Any) -> int:
        return self._set(out, self.of(handle)["link"][3])

    def do_nvmlDeviceGetTotalEccErrors(self, handle: Any, kind: Any, counter: Any, out: Any) -> int:
        return self._set(out, self.of(handle)["ecc"][number(kind)])

    def do_nvmlDeviceGetViolationStatus(self, handle: Any, policy: Any, out: Any) -> int:
        status = self.of(handle)["violation"].get(str(number(policy)))
        if status is None:
            return 3
        target(out).referenceTime, target(out).violationTime = status
        return 0

    def do_nvmlDeviceGetFieldValues(self, handle: Any, count: Any, out: Any) -> int:
        for answer in target(out):
            value = self.of(handle)["fields"].get(str(answer.fieldId))
            answer.nvmlReturn = 3 if value is None else 0
            answer.value.ullVal = value or 0
        return 0

    def do_nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, out: Any) -> int:
        listed = self.of(handle)["processes"]
        target(count).value = len(listed)
        if listed and out is None:
            return 7
        for index, (pid, memory) in enumerate(listed):
            out[index].pid, out[index].usedGpuMemory = pid, memory
        return 0


def hook(library: FakeLibrary) -> Callable[[], None]:
    """From now on ``ctypes.CDLL`` gives ``library`` for its file's name; returns what undoes it."""
    real = ctypes.CDLL

    def load(name: Any = None, *arguments: Any, **options: Any) -> Any:
        if name is not None and Path(str(name)).name.startswith(library.file):
            if library.missing:
                raise OSError(f"{name}: cannot open shared object file: No such file or directory")
            return library
        return real(name, *arguments, **options)

    ctypes.CDLL = load  # type: ignore[misc, assignment]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("amdsmi", "pynvml")]:
        del sys.modules[name]

    def undo() -> None:
        ctypes.CDLL = real  # type: ignore[misc]

    return undo


@contextlib.contextmanager
def hooked(library: FakeLibrary) -> Iterator[Any]:
    undo = hook(library)
    try:
        yield library
    finally:
        undo()


KINDS = {"amdsmi": FakeAmdSmi, "nvml": FakeNvml}


def describe(kind: str, gpus: list[dict[str, Any]], **settings: Any) -> dict[str, str]:
    """Variables that give a Python process this library; ``settings`` as FakeLibrary's."""
    rest = os.environ.get("PYTHONPATH")
    return {
        VARIABLE: json.dumps({"kind": kind, "gpus": gpus, "settings": settings}),
        "PYTHONPATH": os.pathsep.join([str(HERE / "hooked"), *([rest] if rest else [])]),
    }


def hook_as_described() -> None:
    """In the other process: what ``describe`` said."""
    about = json.loads(os.environ[VARIABLE])
    hook(KINDS[about["kind"]](about["gpus"], **about["settings"]))
