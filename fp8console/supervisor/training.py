"""The training's process: started in a session of its own, waited for, signalled as a group."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path
from typing import Any

from fp8console.protocol import identity, paths


class StartError(RuntimeError):
    """The command could not be started; ``status`` is the exit status a shell would give."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class Training:
    """One training process. ``wait()`` gives (exit status as a shell gives it, signal name or None)."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.who = identity.identify(process.pid)

    async def wait(self) -> tuple[int, str | None]:
        code = await self._process.wait()
        return (code, None) if code >= 0 else (128 - code, _signal_name(-code))

    def signal(self, number: signal.Signals) -> bool:
        """Signal the whole group, if the leader still is the process that was started."""
        return self._process.returncode is None and identity.send_signal(self.who, number, group=True)

    async def terminate(self, grace_seconds: float) -> None:
        """SIGTERM, and SIGKILL if it still runs after the grace."""
        self.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), grace_seconds)
        except asyncio.TimeoutError:
            self.signal(signal.SIGKILL)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


async def start(command: list[str], cwd: str, run_dir: Path, link: str) -> Training:
    """Start ``command`` with the probe's folder on PYTHONPATH and its output in the run directory. Raises StartError.

    The output goes to a file: with a pipe or a terminal a training dies of its reader's death.
    """
    site = str(run_dir / paths.SITE)
    inherited = os.environ.get("PYTHONPATH")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([site, inherited] if inherited else [site]),
        paths.ENV_RUN_DIR: str(run_dir),
        paths.ENV_LINK: link,
    }
    with open(run_dir / paths.OUTPUT, "ab") as output:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                cwd=cwd,
                env=environment,
                stdin=None,  # the supervisor's: what was piped into the launch, or /dev/null
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        except FileNotFoundError:
            raise StartError(f"can't start {command[0]!r}: no such program; is it on PATH?", 127) from None
        except OSError as error:
            raise StartError(f"can't start {command[0]!r}: {error.strerror}", 126) from None
    return Training(process)


def last_error(run_dir: Path, limit: int = 1 << 16) -> str | None:
    """The last line of the last traceback in the output, or None when there is none near its end."""
    try:
        with open(run_dir / paths.OUTPUT, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - limit))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return None
    errors = []
    inside = False
    for raw in lines:
        line = re.sub(r"^\[rank\d+\]: ?", "", raw)  # torch marks each rank's lines
        if line.lstrip().startswith("Traceback (most recent call last)"):
            inside = True
        elif inside and re.match(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Warning)?(: |:?$)", line):
            errors.append(line.strip())
            inside = False
    # torchrun's own error only says that a rank failed; the rank's stands before it.
    told = [error for error in errors if not error.split(":")[0].endswith("ChildFailedError")]
    named = told or errors
    return named[-1] if named else None


def describe_end(status: int, signal_name: str | None) -> dict[str, Any]:
    """The text of an end, for the event."""
    if signal_name is not None:
        return {"text": f"the training was ended by {signal_name} (exit status {status})"}
    return {
        "text": "the training finished, exit status 0" if status == 0 else f"the training failed, exit status {status}"
    }
