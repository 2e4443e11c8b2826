"""``fp8console check`` without a training: the device's FP8 against a float64 reference, in the training's Python."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fp8console.cli.arguments import CommandFailed, UsageError
from fp8console.cli.junit import Case

#: Seconds that importing torch may take, on a cold network disk.
START_SECONDS = 180.0
#: Seconds that its end may take: GPU libraries clear up there.
END_SECONDS = 60.0

# The package's copy comes first and the working folder not at all: a file there may be called torch.py.
_CODE = """\
import sys
sys.path[:] = [sys.argv.pop(1)] + [entry for entry in sys.path if entry]
try:
    import torch
except ImportError as error:
    import json
    why = "no torch in " + sys.executable + " (" + str(error) + "); choose another with --python"
    print(json.dumps({"error": why}))
    sys.exit(2)
from fp8console.numerics.consistency import main
sys.exit(main(sys.argv[1:]))
"""


class DeviceCheck:
    """One run of the checks. ``machine`` says what was checked, ``checks`` and ``cases`` what came out, as it comes."""

    def __init__(self, python: str, device: str | None, formats: list[str], timeout: float) -> None:
        self.machine: dict[str, Any] = {}
        self.checks: list[dict[str, Any]] = []
        self.cases: list[Case] = []
        self._words = [word for name in formats for word in ("--format", name)]
        self._words += ["--device", device] if device else []
        self._python = python
        self._timeout = timeout
        self._begun: dict[str, Any] | None = None

    def run(self, told: Callable[[Case | None], None]) -> None:
        """Run to the end; ``told(None)`` once the machine is known, then ``told(case)`` for each check.

        A process that crashes or hangs is a case of its own. Raises UsageError for a device or format that can't be
        checked, CommandFailed when nothing could be started.
        """
        from fp8console.supervisor import site

        with tempfile.TemporaryDirectory(prefix="fp8console-check-") as folder:
            package = Path(folder) / "site"
            package.mkdir()
            site.build(package)
            errors = Path(folder) / "stderr"
            with open(errors, "wb") as stderr:
                process = self._start(package, stderr)
                try:
                    hung = self._read(process, told)
                    if not hung:
                        process.wait(END_SECONDS)
                except subprocess.TimeoutExpired:
                    hung = True
                finally:
                    if process.poll() is None:
                        process.kill()
                    process.wait()
            crashed = process.returncode not in (0, 1, 2)
            if hung or crashed or not self.checks:
                told(self._unfinished(hung, process.returncode, errors.read_text(errors="replace")))

    def _start(self, package: Path, stderr: Any) -> subprocess.Popen[bytes]:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
        command = [self._python, "-c", _CODE, str(package), *self._words]
        try:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, env=environment
            )
        except OSError as error:
            raise CommandFailed(f"{self._python} can't be started: {error.strerror}") from None

    def _read(self, process: subprocess.Popen[bytes], told: Callable[[Case | None], None]) -> bool:
        """Take the lines until the process ends; whether it was silent for too long."""
        assert process.stdout is not None
        for line in _lines(process.stdout.fileno(), lambda: self._timeout if self.machine else START_SECONDS):
            if line is None:
                return True
            try:
                said = json.loads(line)
            except ValueError:
                continue  # printed by something before our entry took stdout over
            if not isinstance(said, dict):
                continue
            if "error" in said:
                raise UsageError(f"fp8console check: {said['error']}")
            if "machine" in said:
                self.machine = said["machine"]
                told(None)
            elif "begin" in said:
                self._begun = said["begin"]
            elif "check" in said:
                self._begun = None
                self.checks.append(said["check"])
                self.cases.append(_case(said["check"]))
                told(self.cases[-1])
        return False

    def _unfinished(self, hung: bool, status: int, errors: str) -> Case:
        begun = self._begun or {"group": "start", "format": "device", "name": "process"}
        how = f"no result within {self._timeout:g} s" if hung else _ending(status)
        last = [line for line in errors.splitlines() if line.strip()]
        detail = how + (f"; its last words: {last[-1].strip()[:200]}" if last else "")
        check = {**begun, "verdict": "crashed", "detail": detail, "count": 0, "worst": None, "findings": []}
        self.checks.append({**check, "seconds": 0.0})
        self.cases.append(_case(self.checks[-1]))
        return self.cases[-1]


def _ending(status: int) -> str:
    if status < 0:
        import signal

        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return f"the process was ended by {name}"
    return f"the process ended with exit status {status}"


def _case(check: dict[str, Any]) -> Case:
    group = f"{check['group']}.{check['format']}"
    notes = [str(note) for note in check["findings"]]
    return Case(group, check["name"], check["verdict"], str(check["detail"]), float(check["seconds"]), notes)


def _lines(fd: int, patience: Callable[[], float]) -> Iterator[bytes | None]:
    """Lines from a pipe as they come; None, and the end, after that many seconds without any."""
    data = b""
    end = time.monotonic() + patience()
    while True:
        ready, _, _ = select.select([fd], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            yield None
            return
        piece = os.read(fd, 1 << 16)
        if not piece:
            return
        data += piece
        *whole, data = data.split(b"\n")
        yield from whole
        if whole:
            end = time.monotonic() + patience()


def heading(machine: dict[str, Any]) -> str:
    """One line: what is checked, and what its FP8 hardware is."""
    hardware = ", ".join(machine["hardware_formats"])
    runtime = f", ROCm {machine['hip']}" if machine.get("hip") else ""
    runtime = f", CUDA {machine['cuda']}" if machine.get("cuda") else runtime
    what = f"FP8 matrix hardware for {hardware}" if hardware else "no FP8 matrix hardware"
    return f"{machine['name']} ({machine['architecture']}), torch {machine['torch']}{runtime}: {what}"


def row(check: dict[str, Any]) -> list[str]:
    """The table's lines for one check: the row, and what is to be said below it."""
    worst = check["worst"]
    share = "" if worst is None else f"{float(worst):.3f}"
    count = f"{check['count']:,}" if check["count"] else ""
    name = f"{check['group']}: {check['name']}"
    said = "; ".join(check["findings"])
    lines = [f"{check['format']:<10}{name:<28}{check['verdict']:<11}{count:>9}  {share:<7}{said}".rstrip()]
    if check["verdict"] not in ("passed", "skipped"):
        lines.append(f"    {check['detail']}")
    return lines


HEAD = f"{'format':<10}{'check':<28}{'result':<11}{'compared':>9}  error  (the largest, as a share of what is allowed)"
