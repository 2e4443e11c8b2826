"""What the training's Python tells of itself and of torch, asked in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Seconds for importing torch and asking it; the import may be slow on a cold network disk.
SECONDS = 180.0
#: Seconds more for the timed copies.
BANDWIDTH_SECONDS = 120.0

# The file is run by its path: neither our package nor the working folder, where a torch.py may lie, gets onto sys.path.
_CODE = """\
import runpy, sys
sys.path[:] = [entry for entry in sys.path if entry]
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""
SURVEY = Path(__file__).resolve().parent.parent / "numerics" / "survey.py"


@dataclass(frozen=True)
class Answer:
    """``facts`` as numerics/survey.py gives them, as far as it came; ``trouble``: what ended it early, in one line."""

    python: str
    facts: dict[str, Any] = field(default_factory=dict)
    trouble: str | None = None
    failed: str | None = None  # what it was doing then

    @property
    def torch(self) -> dict[str, Any] | None:
        """torch's version and build; None when it could not be imported."""
        about = self.facts.get("torch")
        return about if isinstance(about, dict) else None

    @property
    def packages(self) -> dict[str, str]:
        """Versions of the installed packages that matter, by name."""
        return self.facts.get("packages") or {}

    @property
    def devices(self) -> list[dict[str, Any]]:
        """torch's devices, in its order."""
        return self.facts.get("devices") or []

    @property
    def count(self) -> int | None:
        """``torch.cuda.device_count()``."""
        return self.facts.get("count")


def ask(
    python: str, environ: Mapping[str, str], bandwidth: bool = False, without: str | None = None, seconds: float = 0.0
) -> Answer:
    """Ask ``python``; ``without``: a package kept from being imported. A hang or a crash is part of the answer."""
    limit = seconds or SECONDS + (BANDWIDTH_SECONDS if bandwidth else 0.0)
    words = ["--bandwidth"] if bandwidth else []
    words += ["--without", without] if without else []
    with tempfile.TemporaryDirectory(prefix="fp8console-doctor-") as folder:
        output, errors = Path(folder) / "stdout", Path(folder) / "stderr"
        with open(output, "wb") as stdout, open(errors, "wb") as stderr:
            try:
                process = subprocess.Popen(
                    [python, "-c", _CODE, str(SURVEY), *words],
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    env=dict(environ),
                    start_new_session=True,
                )
            except OSError as error:
                return Answer(python, {}, f"{python} can't be started: {error.strerror}", "start")
            ended = _wait(process, limit)
        facts, doing = _read(output)
        if ended == 0 and "end" in facts:
            return Answer(python, facts)
        last = [line.strip() for line in errors.read_text(errors="replace").splitlines() if line.strip()]
        how = f"no answer within {limit:g} s" if ended is None else _ending(ended)
        said = f": {last[-1][:200]}" if last and ended else ""
        return Answer(python, facts, f"{doing}: {how}{said}", doing)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Its exit status; None when it was silent for too long, and has been killed."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(5.0)
            except (OSError, subprocess.TimeoutExpired):
                pass  # waits for a device in the kernel: it can't be killed, and must not hold us


def _read(path: Path) -> tuple[dict[str, Any], str]:
    facts: dict[str, Any] = {}
    doing = "start"
    for line in path.read_text(errors="replace").splitlines():
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            continue  # printed by something before the survey took stdout over
        if isinstance(said, dict):
            doing = said.pop("begin", doing)
            facts.update(said)
    return facts, doing


def _ending(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"ended by signal {-status}"
