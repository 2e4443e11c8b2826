"""The host and the training's processes, through psutil; without it only the run directory's disk is known."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

#: Sweeps between looks for new processes of the training: finding them costs more than reading them.
SWEEPS_BETWEEN_SEARCHES = 10


class Host:
    """Reads one host; keeps what percentages are differences from."""

    def __init__(self, run_dir: Path, pid: int | None) -> None:
        self._run_dir = run_dir
        self._pid = pid
        self._processes: dict[int, Any] = {}
        self._cpu_seconds: dict[int, float] = {}
        self._read_at: float | None = None
        self._sweeps = 0
        try:
            import psutil

            self._psutil: Any = psutil
            psutil.cpu_percent()  # the first call has nothing to compare with and says 0
        except Exception:
            self._psutil = None

    @property
    def pids(self) -> frozenset[int]:
        """The training's processes as last looked for."""
        return frozenset(self._processes) | (frozenset() if self._pid is None else {self._pid})

    def read(self) -> dict[str, Any]:
        """Bytes and percent; the host's CPU of all its cores, the training's of one core. None for unknown."""
        sample: dict[str, Any] = dict.fromkeys(
            (
                "cpu_percent",
                "memory_used",
                "memory_total",
                "run_dir_free",
                "run_dir_total",
                "process_cpu_percent",
                "process_rss",
                "load_1m",
            )
        )
        try:
            disk = shutil.disk_usage(self._run_dir)
            sample["run_dir_free"], sample["run_dir_total"] = disk.free, disk.total
        except OSError:
            pass
        try:
            sample["load_1m"] = round(os.getloadavg()[0], 2)
        except OSError:
            pass
        if self._psutil is not None:
            try:
                self._read_host(sample)
                self._read_processes(sample)
            except Exception:
                # psutil's errors vary with the container; what was read before one stays.
                pass
        return sample

    def _read_host(self, sample: dict[str, Any]) -> None:
        if self._sweeps:
            sample["cpu_percent"] = self._psutil.cpu_percent()
        self._sweeps += 1
        memory = self._psutil.virtual_memory()
        sample["memory_used"], sample["memory_total"] = memory.total - memory.available, memory.total

    def _read_processes(self, sample: dict[str, Any]) -> None:
        """The training's process and its descendants (workers, ranks), added up."""
        if self._pid is None:
            return
        if self._sweeps % SWEEPS_BETWEEN_SEARCHES == 1 or not self._processes:
            self._search()
        resident, spent = 0, 0.0
        previous, self._cpu_seconds = self._cpu_seconds, {}
        for pid, process in list(self._processes.items()):
            try:
                # Through is_running(), which compares start times: the number may be another process's by now.
                if not process.is_running():
                    raise self._psutil.NoSuchProcess(pid)
                times = process.cpu_times()
                resident += process.memory_info().rss
            except (self._psutil.NoSuchProcess, self._psutil.AccessDenied):
                del self._processes[pid]
                continue
            self._cpu_seconds[pid] = times.user + times.system
            if pid in previous:
                spent += self._cpu_seconds[pid] - previous[pid]
        now = time.monotonic()
        if self._processes:
            sample["process_rss"] = resident
            if self._read_at is not None and now > self._read_at and previous:
                sample["process_cpu_percent"] = round(100 * spent / (now - self._read_at), 1)
        self._read_at = now

    def _search(self) -> None:
        try:
            root = self._processes.get(self._pid or 0) or self._psutil.Process(self._pid)
            everyone = [root, *root.children(recursive=True)]
        except (self._psutil.NoSuchProcess, self._psutil.AccessDenied):
            return
        self._processes = {process.pid: self._processes.get(process.pid, process) for process in everyone}
