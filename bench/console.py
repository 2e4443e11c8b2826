"""What the console costs: CPU and bytes a refresh through a real pty, first paint, ``--help``, memory.

Absolute times say little on a noisy machine, so each figure stands beside a ratio of the same run, and ``within`` goes
by the ratio: a refresh against plotext drawing the same decimated plots, a first paint against a process that only
imports textual.app, ``--help`` against a bare interpreter. Modes are interleaved and medians taken.

    python bench/console.py [--json] [--quick]
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import pty
import select
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WIDTH, HEIGHT, HZ = 160, 45, 5.0
STEPS_A_SECOND = 25
BUDGETS = {"refresh_ms": 8.0, "kib_per_second": 20.0, "help_ms": 100.0, "first_paint_ms": 300.0, "memory_mb": 90.0}
RATIOS = {"refresh": 0.1, "first_paint": 1.5, "help": 5.0}


class SyntheticRun:
    """A run directory with ``steps`` records, to which ``take`` adds more."""

    def __init__(self, folder: Path, steps: int) -> None:
        import numpy as np

        from fp8console.protocol import events, identity, numbers, paths, records

        self.folder = folder
        folder.mkdir(parents=True)
        me = identity.identify(os.getpid()).to_json()
        self._numbers, self._events, self._records = numbers, events, records
        info = {"id": folder.name, "name": "bench.py", "command": ["bench.py"], "created": time.time()}
        info |= {"host": platform.node(), "supervisor": me, "training": me, "exit_status": None, "socket": "none"}
        (folder / paths.RUN).write_text(numbers.dumps(info))
        dtype = np.dtype([(f.name, records.NUMPY_CODES[f.code]) for f in records.STEP_FIELDS])
        data = np.zeros(steps, dtype)
        index = np.arange(steps)
        random = np.random.default_rng(1)
        data["step"] = index + 1
        data["time"] = time.time() - (steps - index) / STEPS_A_SECOND
        data["duration"] = 1 / STEPS_A_SECOND
        data["loss"] = 2 + 3 * np.exp(-index / (steps / 8)) + random.normal(0, 0.05, steps)
        data["loss"][steps // 3 : steps // 3 + 5] = np.nan
        data["grad_norm"] = np.exp(random.normal(0, 0.3, steps))
        data["scale"] = 2.0 ** (16 - (index * 6 // steps))
        data["flags"][steps // 3 : steps // 3 + 5] = records.FLAGS["loss_nonfinite"]
        data["known"] = (1 << len(records.STEP_FIELDS)) - 1
        self.steps = steps
        self._file = open(paths.steps_file(folder, 0), "wb", buffering=0)  # noqa: SIM115
        self._file.write(records.header())
        self._file.write(data.tobytes())
        self._log = open(paths.events_file(folder, 0), "ab", buffering=0)  # noqa: SIM115
        self._output = open(folder / paths.OUTPUT, "ab", buffering=0)  # noqa: SIM115
        self._hardware = open(folder / paths.HARDWARE, "ab", buffering=0)  # noqa: SIM115
        fields = {"class_name": "GradScaler", "scale": 65536.0, "growth_interval": 2000}
        self._log.write(numbers.dumps(events.make("scaler", "GradScaler found", 1, **fields)).encode() + b"\n")

    def take(self, seconds: float) -> None:
        """One more step; now and then a line of output and a hardware sample, as a training has them."""
        self.steps += 1
        values: dict[str, float | int | None] = {
            "step": self.steps,
            "time": time.time(),
            "duration": seconds,
            "loss": 2 + 0.05 * ((self.steps * 7919) % 13 - 6) / 6,
            "grad_norm": 1 + 0.3 * ((self.steps * 104729) % 11 - 5) / 5,
            "scale": 1024.0,
        }
        self._file.write(self._records.pack_step(values, 0))
        if self.steps % STEPS_A_SECOND == 0:
            self._output.write(f"iter {self.steps}: loss {values['loss']:.4f}\n".encode())
            host = {"cpu_percent": float(self.steps % 50), "memory_used": 6e10, "memory_total": 1e12}
            sample = {"time": time.time(), "source": "none", "reason": "bench", "state": "ok", "gpus": [], "host": host}
            self._hardware.write(json.dumps(sample).encode() + b"\n")


class Terminal:
    """The console in a child on a pty of its own."""

    def __init__(self, run_dir: Path) -> None:
        code = (
            "import pathlib, sys; from fp8console.console.app import run_console; "
            f"run_console(pathlib.Path(sys.argv[1]), refresh_hz={HZ})"
        )
        environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "LANG": "C.UTF-8"}
        environment["PYTHONPATH"] = str(ROOT)
        environment.pop("NO_COLOR", None)
        self.started = time.perf_counter()
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, [sys.executable, "-c", code, str(run_dir)], environment)
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
        self.bytes = 0
        self.seen = b""

    def read(self, seconds: float, until: bytes | None = None, tick: Callable[[], None] | None = None) -> bool:
        """Read for so long, or until some bytes came; ``tick`` is called 25 times a second."""
        deadline = time.perf_counter() + seconds
        next_tick = time.perf_counter()
        while (now := time.perf_counter()) < deadline:
            if tick is not None and now >= next_tick:
                tick()
                next_tick += 1 / STEPS_A_SECOND
            ready, _, _ = select.select([self.fd], [], [], min(0.01, deadline - now))
            if ready:
                try:
                    data = os.read(self.fd, 65536)
                except OSError:
                    return False
                self.bytes += len(data)
                self.seen = (self.seen + data)[-400_000:]
                if until is not None and until in self.seen:
                    return True
        return until is None

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mb(self) -> tuple[float, float]:
        """Resident memory of the process, and the part of it that is pages of mapped files (shared, reclaimable)."""
        values = {}
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in ("VmRSS", "RssFile"):
                values[name] = int(rest.split()[0]) * 1024 / 1e6
        return values["VmRSS"], values["RssFile"]

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.fd)


def plotext_ms(repeats: int) -> float:
    """CPU of plotext for one drawing of four decimated plots of our size: envelopes of 180 dots as two lines each."""
    import plotext

    points = list(range(180))
    curves = [[((x * 37 + k * 11) % 97) / 97 for x in points] for k in range(8)]
    taken = []
    for _ in range(repeats):
        start = time.process_time()
        plotext.clear_figure()
        plotext.subplots(2, 2)
        plotext.plotsize(WIDTH, HEIGHT - 3)
        for plot in range(4):
            axes = plotext.subplot(plot // 2 + 1, plot % 2 + 1)
            axes.plot(points, curves[2 * plot], marker="braille")
            axes.plot(points, curves[2 * plot + 1], marker="braille")
        plotext.build()
        taken.append((time.process_time() - start) * 1000)
    return statistics.median(taken)


def wall_ms(arguments: list[str]) -> float:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, env=environment, stdout=subprocess.DEVNULL)
    return (time.perf_counter() - start) * 1000


def first_paint_ms(run_dir: Path) -> float:
    """Until the loss plot's title is on the terminal, that is: drawn with data."""
    terminal = Terminal(run_dir)
    try:
        found = terminal.read(20, until=b"GPUs")
        return (time.perf_counter() - terminal.started) * 1000 if found else float("nan")
    finally:
        terminal.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="under a minute, for CI")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    figures: list[dict[str, Any]] = []

    def figure(name: str, value: float, unit: str, budget: float | None, within: bool | None) -> None:
        figures.append({"name": name, "value": round(value, 3), "unit": unit, "budget": budget, "within": within})
        if not options.json:
            verdict = "" if within is None else "  ok" if within else "  OVER"
            print(f"{name:<44} {value:>10.2f} {unit:<6} budget {budget if budget is not None else '-'}{verdict}")

    folder = Path(tempfile.mkdtemp(prefix="fp8console-bench-"))
    try:
        seconds = 5.0 if options.quick else 20.0
        drawing = plotext_ms(3 if options.quick else 10)
        figure("plotext, the same plots, one drawing", drawing, "ms", None, None)
        runs = {steps: SyntheticRun(folder / f"run-{steps}", steps) for steps in (2_000, 1_000_000)}
        for steps, run in runs.items():
            terminal = Terminal(run.folder)
            try:
                terminal.read(4.0, tick=lambda run=run: run.take(0.04))  # type: ignore[misc]
                cpu, sent = terminal.cpu_seconds(), terminal.bytes
                terminal.read(seconds, tick=lambda run=run: run.take(0.04))  # type: ignore[misc]
                milliseconds = (terminal.cpu_seconds() - cpu) * 1000 / (seconds * HZ)
                rate = (terminal.bytes - sent) / seconds / 1024
                resident, mapped = terminal.memory_mb()
            finally:
                terminal.close()
            ratio = milliseconds / drawing
            name = f"{steps:,} steps: "
            figure(name + "CPU a refresh", milliseconds, "ms", BUDGETS["refresh_ms"], None)
            figure(name + "refresh against plotext", ratio, "ratio", RATIOS["refresh"], ratio <= RATIOS["refresh"])
            figure(
                name + "to the terminal", rate, "KiB/s", BUDGETS["kib_per_second"], rate <= BUDGETS["kib_per_second"]
            )
            private = resident - mapped
            figure(name + "memory, private", private, "MB", BUDGETS["memory_mb"], private <= BUDGETS["memory_mb"])
            figure(name + "memory, pages of mapped files", mapped, "MB", None, None)
        repeats = 3 if options.quick else 9
        paints, imports, helps, bares, opens = [], [], [], [], []
        for _ in range(repeats):
            imports.append(wall_ms(["-c", "import textual.app"]))
            paints.append(first_paint_ms(runs[2_000].folder))
            opens.append(first_paint_ms(runs[1_000_000].folder))
            bares.append(wall_ms(["-c", "pass"]))
            helps.append(wall_ms(["-m", "fp8console", "--help"]))
        textual, paint = statistics.median(imports), statistics.median(paints)
        figure("import textual.app", textual, "ms", None, None)
        figure("first paint", paint, "ms", BUDGETS["first_paint_ms"], None)
        ratio = paint / textual
        figure(
            "first paint against import textual.app",
            ratio,
            "ratio",
            RATIOS["first_paint"],
            ratio <= RATIOS["first_paint"],
        )
        figure("first paint, 1,000,000 steps", statistics.median(opens), "ms", 500.0, None)
        bare, helped = statistics.median(bares), statistics.median(helps)
        figure("bare interpreter", bare, "ms", None, None)
        figure("--help", helped, "ms", BUDGETS["help_ms"], None)
        ratio = helped / bare
        figure("--help against a bare interpreter", ratio, "ratio", RATIOS["help"], ratio <= RATIOS["help"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        machine = f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
        print(json.dumps({"figures": figures, "machine": machine, "date": time.strftime("%Y-%m-%d")}))
    return 0 if all(entry["within"] is not False for entry in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
