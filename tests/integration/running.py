"""Runs real trainings, with and without the console, and reads what was recorded."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8console.protocol import events as event_lines
from fp8console.protocol import paths, records

ROOT = Path(__file__).resolve().parents[2]
TRAININGS = ROOT / "tests" / "trainings"


def environment(folder: Path, **more: str) -> dict[str, str]:
    """The environment of a test's command: its own folder of runs, one thread, no settings from outside."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("FP8CONSOLE_")}
    env.update(XDG_STATE_HOME=str(folder / "state"), XDG_CONFIG_HOME=str(folder / "config"), OMP_NUM_THREADS="1")
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env.update(more)
    return env


@dataclass
class Run:
    """A run that was launched through the command line."""

    folder: Path
    run_dir: Path
    result: subprocess.CompletedProcess[str] | None = None
    extra: dict[str, str] = field(default_factory=dict)

    def info(self) -> dict[str, Any]:
        return json.loads((self.run_dir / paths.RUN).read_text())

    def records(self, rank: int = 0) -> list[dict[str, Any]]:
        file = paths.steps_file(self.run_dir, rank)
        if not file.exists():
            return []
        data = file.read_bytes()
        if len(data) < records.HEADER_BYTES:
            return []  # just made
        width = records.parse_header(data)["record_bytes"]
        body = data[records.HEADER_BYTES :]
        return [records.unpack_step(body[i : i + width]) for i in range(0, len(body) - len(body) % width, width)]

    def events(self, kind: str | None = None, rank: int | None = None) -> list[dict[str, Any]]:
        """Events of one kind: the supervisor's, or a rank's."""
        file = paths.events_file(self.run_dir, rank)
        lines = file.read_bytes().splitlines() if file.exists() else []
        parsed = [event for line in lines if (event := event_lines.parse_line(line))]
        return [event for event in parsed if kind is None or event["kind"] == kind]

    def command(self, *words: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """``fp8console ctl RUN words``."""
        return fp8console(self.folder, "ctl", str(self.run_dir), *words, timeout=timeout)

    def ctl(self, *words: str) -> dict[str, Any]:
        """The same with ``--json``; must be applied."""
        done = self.command(*words, "--json")
        assert done.returncode == 0, done.stderr + done.stdout
        return json.loads(done.stdout.strip().splitlines()[-1])

    def status(self) -> dict[str, Any]:
        done = fp8console(self.folder, "status", str(self.run_dir), "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def output(self) -> str:
        return (self.run_dir / paths.OUTPUT).read_text(errors="replace")

    def wait_for_step(self, step: int, timeout: float = 60) -> None:
        self.wait_until(lambda: len(self.records()) >= step, timeout, f"step {step}")

    def wait_until(self, condition: Any, timeout: float = 60, what: str = "the condition") -> None:
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, f"{what} did not come within {timeout} s:\n{self.output()[-2000:]}"
            time.sleep(0.02)

    def wait_for_end(self, timeout: float = 60) -> int:
        self.wait_until(lambda: self.info()["exit_status"] is not None, timeout, "the end")
        return int(self.info()["exit_status"])


def fp8console(folder: Path, *words: str, timeout: float = 120, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the command line and collect what it says."""
    command = [sys.executable, "-m", "fp8console", *words]
    env = environment(folder, **more)
    return subprocess.run(
        command, env=env, cwd=folder, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
    )


def run(folder: Path, *words: str, options: tuple[str, ...] = (), **more: str) -> Run:
    """Run a training headless to its end."""
    folder.mkdir(parents=True, exist_ok=True)
    run_dir = folder / "run"
    done = fp8console(folder, "--run-dir", str(run_dir), *options, *words, **more)
    return Run(folder, run_dir, done)


def start(folder: Path, *words: str, options: tuple[str, ...] = ()) -> Run:
    """Launch a training detached."""
    folder.mkdir(parents=True, exist_ok=True)
    run_dir = folder / "run"
    done = fp8console(folder, "--detach", "--run-dir", str(run_dir), *options, *words)
    assert done.returncode == 0, done.stderr
    return Run(folder, run_dir, done)


def plain(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The same training under plain python."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, *words]
    return subprocess.run(command, env=environment(folder), cwd=folder, capture_output=True, text=True, timeout=120)


def training(name: str) -> str:
    return str(TRAININGS / f"{name}.py")


def close(found: float | None, wanted: float | str | None, relative: float = 1e-5) -> bool:
    """Equal up to float32 rounding; NaN is equal to NaN only, None (unknown) to None only."""
    if found is None or wanted is None:
        return found is None and wanted is None
    wanted = float(wanted)
    if math.isnan(wanted):
        return math.isnan(found)
    if math.isinf(wanted) or wanted == 0:
        return found == wanted
    return math.isclose(found, wanted, rel_tol=relative)
