"""NVIDIA GPUs through ``nvidia-ml-py`` (module pynvml). Units and meanings: nvml.h."""

from __future__ import annotations

import importlib
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
    percent,
    short_name,
    used_of,
    watts,
)
from fp8console.hardware.sources.quiet import quiet

NAME = "nvml"
#: GT/s a lane by PCIe generation.
SPEEDS = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}
#: nvmlReturn_t that says that a card has not what was asked for.
ABSENT = frozenset({2, 3, 6, 13})  # invalid argument, not supported, not found, function not found


class Nvml:
    """The GPUs that the driver lists, by PCI address."""

    name = NAME

    def __init__(self, root: Path = Path("/sys")) -> None:
        """Load and initialise the library. Raises Unavailable with the reason."""
        del root
        with quiet():
            try:
                self._library: Any = importlib.import_module("pynvml")
            except ImportError:
                raise Unavailable("nvml: nvidia-ml-py is not installed (pip install 'fp8console[nvidia]')") from None
            try:
                self._library.nvmlInit()
                handles = [
                    self._library.nvmlDeviceGetHandleByIndex(number)
                    for number in range(self._library.nvmlDeviceGetCount())
                ]
            except Exception as error:
                raise Unavailable(f"nvml: {error}") from None
        if not handles:
            raise Unavailable("nvml: the driver lists no GPU")
        self._gpus = {str(number): (self._about(number, handle), handle) for number, handle in enumerate(handles)}

    def gpus(self) -> list[Gpu]:
        return [gpu for gpu, _ in self._gpus.values()]

    def close(self) -> None:
        self._try([], "nvmlShutdown")

    def read(self, key: str, slow: bool, pids: frozenset[int]) -> Reading:
        """A GPU's values. Raises Unavailable when it answers nothing."""
        _, handle = self._gpus[key]
        problems: list[str] = []
        busy = self._try(problems, "nvmlDeviceGetUtilizationRates", handle)
        memory = self._try(problems, "nvmlDeviceGetMemoryInfo", handle)
        total = known(getattr(memory, "total", None)) or None
        fields = self._fields(handle)
        values = {
            "busy": percent(getattr(busy, "gpu", None)),
            "memory_busy": percent(getattr(busy, "memory", None)),
            "vram_used": used_of(getattr(memory, "used", None), total),
            "vram_total": total,
            "power_w": _milliwatts(self._try(problems, "nvmlDeviceGetPowerUsage", handle)),
            "temperature_c": degrees(self._try(problems, "nvmlDeviceGetTemperature", handle, 0)),
            "memory_temperature_c": degrees(fields.get("temperature")) or None,
            "clock_mhz": known(self._try(problems, "nvmlDeviceGetClockInfo", handle, 1)),
            "memory_clock_mhz": known(self._try(problems, "nvmlDeviceGetClockInfo", handle, 2)),
            "pcie_width": known(self._try(problems, "nvmlDeviceGetCurrPcieLinkWidth", handle), 64) or None,
            "pcie_speed_gts": SPEEDS.get(self._try(problems, "nvmlDeviceGetCurrPcieLinkGeneration", handle)),
        }
        reading = Reading(
            values,
            counters=self._counters(handle, fields),
            note=f"nvml: {problems[0]}" if problems else None,
            whole=not problems,
        )
        if slow:
            reading.slow = self._slowly(handle, pids)
        if not reading.known() and problems:
            raise Unavailable(reading.note)
        return reading

    def _slowly(self, handle: Any, pids: frozenset[int]) -> dict[str, Any]:
        ignored: list[str] = []
        processes = self._try(ignored, "nvmlDeviceGetComputeRunningProcesses", handle)
        return {
            "power_cap_w": _milliwatts(self._try(ignored, "nvmlDeviceGetEnforcedPowerLimit", handle)) or None,
            "pcie_width_max": known(self._try(ignored, "nvmlDeviceGetMaxPcieLinkWidth", handle), 64) or None,
            "pcie_speed_max_gts": SPEEDS.get(self._try(ignored, "nvmlDeviceGetMaxPcieLinkGeneration", handle)),
            # Kind (0 corrected, 1 not) and counter (0: since the driver was loaded).
            "ecc_correctable": known(self._try(ignored, "nvmlDeviceGetTotalEccErrors", handle, 0, 0)),
            "ecc_uncorrectable": known(self._try(ignored, "nvmlDeviceGetTotalEccErrors", handle, 1, 0)),
            "processes": None
            if processes is None
            else [
                {"pid": process.pid, "vram": known(process.usedGpuMemory)}
                for process in processes
                if process.pid in pids
            ],
        }

    def _fields(self, handle: Any) -> dict[str, Any]:
        """What is only to be had as numbered fields; nothing for a library or card without them."""
        wanted = {
            "temperature": "NVML_FI_DEV_MEMORY_TEMP",
            "sent": "NVML_FI_DEV_PCIE_COUNT_TX_BYTES",
            "received": "NVML_FI_DEV_PCIE_COUNT_RX_BYTES",
        }
        numbers = {name: getattr(self._library, constant, None) for name, constant in wanted.items()}
        numbers = {name: number for name, number in numbers.items() if number is not None}
        answers = self._try([], "nvmlDeviceGetFieldValues", handle, list(numbers.values()))
        found = {}
        for name, answer in zip(numbers, answers or ()):
            if answer.nvmlReturn == 0:
                wide = name != "temperature"
                found[name] = answer.value.ullVal if wide else answer.value.uiVal
        return found

    def _counters(self, handle: Any, fields: dict[str, Any]) -> Counters:
        power = self._try([], "nvmlDeviceGetViolationStatus", handle, 0)
        thermal = self._try([], "nvmlDeviceGetViolationStatus", handle, 1)
        # The time of the reading is in microseconds, the time throttled in nanoseconds.
        cycles = next((known(status.referenceTime) for status in (power, thermal) if status is not None), None)
        sent, received = known(fields.get("sent")), known(fields.get("received"))
        return Counters(
            cycles=None if cycles is None else cycles * 1000,
            power=known(getattr(power, "violationTime", None)),
            thermal=(known(getattr(thermal, "violationTime", None)),),
            pcie=sent + received if sent is not None and received is not None else None,
        )

    def _about(self, number: int, handle: Any) -> Gpu:
        ignored: list[str] = []
        pci = self._try(ignored, "nvmlDeviceGetPciInfo", handle)
        capability = self._try(ignored, "nvmlDeviceGetCudaComputeCapability", handle)
        return Gpu(
            key=str(number),
            name=short_name(_text(self._try(ignored, "nvmlDeviceGetName", handle)) or "NVIDIA GPU"),
            bdf=address(_text(getattr(pci, "busId", None))),
            uuid=_text(self._try(ignored, "nvmlDeviceGetUUID", handle)),
            arch=f"sm_{capability[0]}{capability[1]}" if capability else None,
            orders=(number,),
        )

    def _try(self, problems: list[str], name: str, *arguments: Any) -> Any:
        call = getattr(self._library, name, None)
        if call is None:
            return None
        try:
            return call(*arguments)
        except Exception as error:
            if getattr(error, "value", None) not in ABSENT:
                problems.append(f"{name.removeprefix('nvmlDeviceGet')}: {error}")
            return None


def _text(value: Any) -> str | None:
    """Older versions of the package give bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _milliwatts(value: Any) -> float | None:
    value = known(value)
    return None if value is None else watts(value / 1000)
