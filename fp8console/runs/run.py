"""One run as its directory tells it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fp8console.protocol import paths
from fp8console.runs.find import RunNotFound, find_runs, resolve
from fp8console.runs.reader import EventLog, HardwareLog, OutputTail, StepRecords

__all__ = ["Run", "RunNotFound", "find_runs", "resolve"]


class Run:
    """A run directory, read lazily and again at each ``refresh``.

    ``info`` is run.json ({} until it exists); ``problem`` is one line when it can't be read. ``memo`` is for what is
    computed over a run step by step (runs/status.py keeps its sums there).
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = Path(run_dir)
        self.info: dict[str, Any] = {}
        self.problem: str | None = None
        self.events = EventLog(self.run_dir)
        self.output = OutputTail(self.run_dir / paths.OUTPUT)
        self.hardware = HardwareLog(self.run_dir)
        self.memo: dict[str, Any] = {}
        self._ranks: dict[int, StepRecords] = {}
        self._stamp: tuple[int, int, int] | None = None
        self.refresh()

    @property
    def id(self) -> str:
        """The run's id: the one in run.json, else its directory's name."""
        word = self.info.get("id")
        return word if isinstance(word, str) and word else self.run_dir.resolve().name

    def rank(self, r: int = 0) -> StepRecords:
        """The step records of one rank; empty where it has none."""
        if r not in self._ranks:
            self._ranks[r] = StepRecords(paths.steps_file(self.run_dir, r))
        return self._ranks[r]

    def refresh(self) -> None:
        """Reads on in everything that was asked for before."""
        self._refresh_info()
        for step_records in self._ranks.values():
            step_records.refresh()
        self.events.refresh()
        self.output.refresh()
        self.hardware.refresh()

    def _refresh_info(self) -> None:
        path = self.run_dir / paths.RUN
        try:
            stat = os.stat(path)
            stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if stamp == self._stamp:
                return
            data = json.loads(path.read_bytes())
            if not isinstance(data, dict):
                raise ValueError("not a JSON object")
        except FileNotFoundError:
            self.problem = f"{path}: no such file"
        except (OSError, ValueError) as error:
            self.problem = f"{path}: {error}"
        else:
            self.info, self.problem, self._stamp = data, None, stamp
