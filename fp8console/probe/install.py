"""Gets the probe into a process: waits for torch to be imported, then hooks it."""

from __future__ import annotations

import atexit
import errno
import io
import json
import multiprocessing.util
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from fp8console.probe.importing import AfterImport
from fp8console.protocol import paths, settings

OLDEST_TORCH = (2, 4)
#: The probe of this process. The hooks hold it as well; this name is for the script's own attach().
ACTIVE: list[Any] = []


def arm() -> None:
    """Called by sitecustomize at the start of Python; imports nothing heavy."""
    _line_buffer_output()
    AfterImport({"torch": _torch_imported}).arm()


def _torch_imported(torch: ModuleType) -> None:
    run_dir = Path(os.environ[paths.ENV_RUN_DIR])
    try:
        version = tuple(int(part) for part in str(torch.__version__).split("+")[0].split(".")[:2])
        (run_dir / "torch").touch()  # tells the supervisor that torch was imported at all
        if version < OLDEST_TORCH:
            text = f"torch {torch.__version__} is too old to be measured (2.4 or newer is needed); the training runs on"
            early_event(run_dir, "notice", text, part="probe")
            return
        _install(run_dir)
    except Exception as error:
        early_event(run_dir, "fault", f"the probe did not start: {error!r}; the training runs unmeasured", part="probe")


def _install(run_dir: Path) -> None:
    import torch

    from fp8console.probe import hooks
    from fp8console.probe.core import Probe

    try:
        info = json.loads((run_dir / paths.RUN).read_text())
    except (OSError, ValueError):
        info = {}
    chosen = settings.from_json(info.get("settings"))
    probe = Probe(run_dir, os.environ.get(paths.ENV_LINK), chosen)
    patches = hooks.Patches()
    hooks.install(probe.observer, patches)
    if chosen.full_precision:
        from fp8console.probe.emulate import without_low_precision

        without_low_precision(patches.replace)
    seen: set[type] = {torch.amp.GradScaler}

    def hook_subclass(scaler_class: type) -> None:
        for base in reversed(scaler_class.__mro__):
            if issubclass(base, torch.amp.GradScaler) and base not in seen:
                seen.add(base)
                hooks.hook_scaler_class(probe.observer, patches, base)

    probe.observer.on_scaler_class = hook_subclass
    AfterImport({"torch._dynamo": patches.hide_from_dynamo}).arm()
    ACTIVE.append(probe)
    atexit.register(probe.close)
    # A multiprocessing child ends without atexit; its own finalizers do run.
    multiprocessing.util.Finalize(None, probe.close, exitpriority=100)
    os.register_at_fork(after_in_child=lambda: _forked(probe))


def _forked(probe: Any) -> None:
    probe.forget_parent()
    # multiprocessing clears its finalizers in a fork.
    multiprocessing.util.register_after_fork(
        probe, lambda self: multiprocessing.util.Finalize(None, self.close, exitpriority=100)
    )


def early_event(run_dir: Path, kind: str, text: str, **fields: Any) -> None:
    """An event of a process that has no rank (yet)."""
    event = {"time": time.time(), "kind": kind, "step": None, "text": text, **fields}
    try:
        with open(run_dir / "events.start.jsonl", "a") as file:
            file.write(json.dumps(event) + "\n")
    except OSError:
        pass


class _FullDiskIsNoError(io.FileIO):
    """The run's log as the script's output: that its disk is full must not end a training at a print."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return len(data)
            raise


def _line_buffer_output() -> None:
    """Output that goes to the run's log is written line by line, as on a terminal, so that the console can show it."""
    try:
        log = os.stat(os.path.join(os.environ[paths.ENV_RUN_DIR], paths.OUTPUT))
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            about = os.fstat(stream.fileno())
            if (about.st_dev, about.st_ino) == (log.st_dev, log.st_ino):
                tolerant = io.TextIOWrapper(
                    io.BufferedWriter(_FullDiskIsNoError(stream.fileno(), "wb", closefd=False)),
                    encoding=stream.encoding,
                    errors=stream.errors,
                    line_buffering=True,
                )
                tolerant.mode = "w"  # type: ignore[misc]  # as sys.stdout has it
                stream.flush()
                setattr(sys, name, tolerant)
                setattr(sys, f"__{name}__", tolerant)
    except (OSError, AttributeError, ValueError, KeyError):
        pass
