"""Hardware samples as rows for other programs, with the balance, the data wait and what bounded the step then."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from fp8console.diagnosis.bounds import bounds
from fp8console.diagnosis.cards import WINDOW, Sample, balance, gpus_of, recent
from fp8console.protocol import hardware, paths
from fp8console.protocol.numbers import dumps, number, to_jsonable
from fp8console.runs.reader import StepRecords

SAMPLE_FIELDS = ("time", "source", "state", "reason", "silent", "balance", "data_wait_share", "bounds")
GPU_FIELDS = (
    *("index", "name", "arch", "bdf", "uuid", "torch_index", "used", "age", "busy", "memory_busy", "xcd_busy"),
    *("vram_used", "vram_total", "power_w", "power_cap_w", "temperature_c", "memory_temperature_c"),
    *("clock_mhz", "memory_clock_mhz", "throttle_power", "throttle_thermal", "throttle_hbm"),
    *("pcie_bytes_s", "xgmi_read_bytes_s", "xgmi_write_bytes_s"),
    *("pcie_width", "pcie_speed_gts", "pcie_width_max", "pcie_speed_max_gts"),
    *("ecc_correctable", "ecc_uncorrectable", "partition_compute", "partition_memory", "processes"),
)
HOST_FIELDS = (
    *("cpu_percent", "memory_used", "memory_total", "run_dir_free", "run_dir_total"),
    *("process_cpu_percent", "process_rss", "load_1m"),
)


def samples(run_dir: Path) -> Iterator[Sample]:
    """Every sample of a run, with ``balance``, ``data_wait_share`` and ``bounds`` as of then.

    The share is over the steps that ended in the 10 s before the sample. A torn or foreign line is left out.
    """
    waits = _DataWait(StepRecords(paths.steps_file(run_dir, 0)))
    window: list[Sample] = []
    with open(run_dir / paths.HARDWARE, "rb") as file:
        for line in file:
            sample = hardware.parse(line)
            moment = number(sample.get("time")) if sample is not None else None
            if sample is None or moment is None:
                continue
            window = recent([*window, sample])
            share = waits.share(moment - WINDOW, moment)
            found = [asdict(bound) for bound in bounds(window, share)]
            yield {**sample, "balance": balance(window), "data_wait_share": share, "bounds": found or None}


class _DataWait:
    """Sums over the step records, so that any stretch of time is two look-ups."""

    def __init__(self, steps: StepRecords) -> None:
        self._times = np.empty(0)
        if not {"time", "duration", "data_wait"} <= set(steps.names) or not len(steps):
            return
        known = steps.known("data_wait") & steps.known("duration")
        self._times = np.asarray(steps.column("time"), np.float64)
        self._waits = np.append(0.0, np.cumsum(np.where(known, steps.column("data_wait"), 0.0), dtype=np.float64))
        self._spans = np.append(0.0, np.cumsum(np.where(known, steps.column("duration"), 0.0), dtype=np.float64))

    def share(self, start: float, end: float) -> float | None:
        first, last = np.searchsorted(self._times, (start, end), side="right")
        if last <= first:
            return None
        span = float(self._spans[last] - self._spans[first])
        return float(self._waits[last] - self._waits[first]) / span if span > 0 else None


def hardware_lines(run_dir: Path, form: str) -> Iterator[str]:
    """The samples in "jsonl", one object each, or in "csv", a row for each sample and card.

    CSV: unknown is empty; a card's XCDs are one value, separated by spaces, and so are the things that bound the step,
    separated by semicolons; the host's figures are repeated with each card. Raises OSError.
    """
    if form != "csv":
        for sample in samples(run_dir):
            yield dumps(sample) + "\n"
        return
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    parts = (("", SAMPLE_FIELDS), ("gpu_", GPU_FIELDS), ("host_", HOST_FIELDS))
    writer.writerow([prefix + name for prefix, names in parts for name in names])
    for sample in samples(run_dir):
        host = sample.get("host") if isinstance(sample.get("host"), dict) else {}
        about = [sample.get(name) for name in SAMPLE_FIELDS[:-1]]
        about.append(";".join(bound["what"] for bound in sample["bounds"] or ()) or None)
        for gpu in gpus_of(sample) or [{}]:
            row = [*about, *_gpu(gpu), *((host or {}).get(name) for name in HOST_FIELDS)]
            writer.writerow([int(value) if isinstance(value, bool) else to_jsonable(value) for value in row])
        yield buffer.getvalue()
        buffer.seek(0)
        buffer.truncate()


def _gpu(gpu: dict[str, Any]) -> list[Any]:
    flat = dict(gpu)
    for name in ("throttle", "partition"):
        inner = gpu.get(name)
        for key, value in inner.items() if isinstance(inner, dict) else ():
            flat[f"{name}_{key}"] = value
    xcds, processes = gpu.get("xcd_busy"), gpu.get("processes")
    told = isinstance(xcds, list) and xcds
    flat["xcd_busy"] = " ".join("" if value is None else f"{value:g}" for value in xcds) if told and xcds else None
    flat["processes"] = len(processes) if isinstance(processes, list) else None
    return [flat.get(name) for name in GPU_FIELDS]
