"""Keeps a sampler process running, for the supervisor: standard library and asyncio only.

A sampler that falls silent is killed by its handle and replaced after a pause that grows; meanwhile a sample a second
still comes, with nothing measured and the time since each card last answered. It also joins the sampler's GPUs with
the training's devices (joins.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fp8console.hardware.joins import RankDevice, join

INTERVAL = 1.0
SILENCE = 2.0  # seconds beyond the interval that a sampler may be silent
START_SILENCE = 10.0  # the same until its first line, and while it loads a library: both are slow on a busy node
DEATH = 2.0  # seconds that a killed process may take to go
FIRST_BACKOFF = 1.0
LAST_BACKOFF = 60.0
STEADY = 30.0  # seconds of samples after which a failure counts as the first one again
LINE_LIMIT = 1 << 20

#: Keys of a GPU's sample that stay when nothing is known of it.
IDENTITY = ("index", "name", "arch", "bdf", "uuid", "source", "torch_index", "torch_indices", "used")


class Sampler:
    """One sampler for one run. ``write`` gets every sample, with its "state": ok, stalled or restarting.

    ``python`` is an interpreter that can import this package, ``sysfs`` a folder to read in place of /sys, ``source`` a
    source's name for GPU values from that one only, ``environment`` the training's. ``pid``, the training's process,
    may be set later, as long as that is before ``run``; ``ranks`` may grow as they join.
    """

    def __init__(
        self,
        run_dir: Path,
        write: Callable[[dict[str, Any]], None],
        python: str = sys.executable,
        sysfs: Path | None = None,
        pid: int | None = None,
        interval: float = INTERVAL,
        source: str | None = None,
        environment: Mapping[str, str] = os.environ,
        ranks: Mapping[int, RankDevice] | None = None,
    ) -> None:
        self.pid = pid
        self.ranks = ranks if ranks is not None else {}
        self._source = source
        self._training_environment = dict(environment)
        self._run_dir = Path(run_dir).resolve()
        self._write = write
        self._python = python
        self._sysfs = sysfs
        self._interval = interval
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._stopped = asyncio.Event()
        self._last: dict[str, Any] = {}
        self._answered: dict[str, float] = {}  # GPU -> when its values were so, monotonic
        self._sampled: float | None = None  # when the last whole sample came
        self._reading: str | None = None
        self._stuck: set[str] = set()

    async def run(self) -> None:
        """Sample until ``stop``. Raises nothing: what goes wrong is told in the samples."""
        backoff = FIRST_BACKOFF
        while not self._stopping:
            began = time.monotonic()
            try:
                problem = await self._run_one()
            except OSError as error:
                problem = f"the sampler could not be started: {error.strerror}"
            if self._stopping:
                break
            if time.monotonic() - began >= STEADY:
                backoff = FIRST_BACKOFF
            await self._report_while(self._pause(backoff), "restarting", problem)
            backoff = min(2 * backoff, LAST_BACKOFF)
        await self._kill()

    async def stop(self) -> None:
        """End the sampler; ``run`` returns soon after."""
        self._stopping = True
        self._stopped.set()
        await self._kill()

    async def _run_one(self) -> str:
        """Start one sampler and pass its samples on until it ends or falls silent; returns why, in words."""
        self._reading = None
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            cwd="/",  # -m puts the working folder on the path, and the training's may hold anything
            env=_environment(),
            limit=LINE_LIMIT,
            start_new_session=True,  # its commands end with it
        )
        assert process.stdout is not None
        patience = START_SILENCE
        heard = time.monotonic()
        while True:
            try:
                line = await asyncio.wait_for(process.stdout.readline(), max(0.0, heard + patience - time.monotonic()))
            except asyncio.TimeoutError:
                return await self._end_of_silent_one(patience)
            except ValueError:
                await self._kill()
                return "the sampler wrote a line without an end"
            if not line:
                await process.wait()
                return f"the sampler ended with exit status {process.returncode}"
            if not self._take(line):
                continue  # whatever printed that, it is no answer
            heard = time.monotonic()
            loading = self._reading is not None and self._reading != "host" and " " not in self._reading
            patience = START_SILENCE if loading else self._interval + SILENCE

    def _command(self) -> list[str]:
        command = [self._python, "-m", "fp8console.hardware.sampler"]
        command += ["--interval", f"{self._interval:g}", "--run-dir", str(self._run_dir)]
        if self.pid is not None:
            command += ["--pid", str(self.pid)]
        if self._sysfs is not None:
            command += ["--sysfs", str(Path(self._sysfs).resolve())]
        if self._source is not None:
            command += ["--source", self._source]
        for part in sorted(self._stuck):
            command += ["--skip", part]
        return command

    def _take(self, line: bytes) -> bool:
        """Whether the line was one of a sampler's."""
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return False
        if isinstance(message, dict) and isinstance(message.get("reading"), str):
            self._reading = message["reading"]
            self._stuck.discard(message["reading"])
            return True
        if not _is_sample(message):
            return False
        now = time.monotonic()
        for gpu in message.get("gpus", ()):
            if gpu.get("age") is not None:
                self._answered[_who(gpu)] = now - gpu["age"]
            else:
                gpu["age"] = self._age(gpu, now)
        join(message.get("gpus", ()), [self.ranks[rank] for rank in sorted(self.ranks)], self._training_environment)
        self._last, self._sampled, self._reading = message, now, None
        self._write({**message, "state": "ok", "silent": 0.0})
        return True

    async def _end_of_silent_one(self, silence: float) -> str:
        part = self._reading
        if part is None:
            problem = f"the sampler said nothing for {silence:g} s"
        else:
            self._stuck.add(part)
            problem = f"reading {part} has not returned for {silence:g} s"
        self._report("stalled", problem)
        if not await self._kill():
            # A second one would only hang beside it.
            problem += "; the sampler can't be killed, it is stuck in the kernel"
            await self._report_while(self._death(), "stalled", problem)
        return problem

    async def _report_while(self, wait: Any, state: str, problem: str) -> None:
        """A sample an interval, with nothing measured, until ``wait`` is over."""
        task = asyncio.ensure_future(wait)
        while not task.done():
            self._report(state, problem)
            await asyncio.wait({task}, timeout=self._interval)

    def _report(self, state: str, problem: str) -> None:
        now = time.monotonic()
        gpus = []
        for gpu in self._last.get("gpus", ()):
            unknown = {key: gpu[key] if key in IDENTITY else None for key in gpu}
            gpus.append({**unknown, "age": self._age(gpu, now)})
        self._write(
            {
                "time": time.time(),
                "source": self._last.get("source", "none"),
                "reason": problem,
                "state": state,
                "silent": None if self._sampled is None else round(now - self._sampled, 1),
                "gpus": gpus,
                "host": dict.fromkeys(self._last.get("host", ())),
            }
        )

    def _age(self, gpu: dict[str, Any], now: float) -> float | None:
        answered = self._answered.get(_who(gpu))
        return None if answered is None else round(now - answered, 1)

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._stopped.wait(), seconds)
        except asyncio.TimeoutError:
            pass

    async def _death(self) -> None:
        """Until the killed process is gone or ``stop`` is called."""
        assert self._process is not None
        dead, stopped = asyncio.ensure_future(self._process.wait()), asyncio.ensure_future(self._stopped.wait())
        await asyncio.wait({dead, stopped}, return_when=asyncio.FIRST_COMPLETED)
        dead.cancel()
        stopped.cancel()

    async def _kill(self) -> bool:
        """SIGKILL the present sampler; whether it is gone."""
        process = self._process
        if process is None:
            return True
        if process.returncode is None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
            try:
                await asyncio.wait_for(process.wait(), DEATH)
            except asyncio.TimeoutError:
                return False
        return True


def _is_sample(message: Any) -> bool:
    """Whether a sampler's line has a sample's shape: nothing else prints there, but what loads libraries may fail."""
    if not isinstance(message, dict) or not isinstance(message.get("host"), dict):
        return False
    gpus = message.get("gpus") if _is_finite(message.get("time")) else None
    return isinstance(gpus, list) and all(
        isinstance(gpu, dict)
        and (gpu.get("age") is None or _is_finite(gpu["age"]))
        and isinstance(gpu.get("join"), (dict, type(None)))
        and isinstance(gpu.get("processes"), (list, type(None)))
        and all(isinstance(process, dict) for process in gpu.get("processes") or ())
        for gpu in gpus
    )


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15  # NaN is not either


def _who(gpu: Mapping[str, Any]) -> str:
    return str(gpu.get("bdf") or gpu.get("uuid") or gpu.get("index"))


def _environment() -> dict[str, str]:
    """This process's environment, with this package's folder on the path unless it is an installed one."""
    environment = dict(os.environ)
    folder = Path(__file__).resolve().parents[2]
    if folder.name not in ("site-packages", "dist-packages"):
        rest = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = str(folder) + (os.pathsep + rest if rest else "")
    return environment
