"""run.json: what is run, where, by which versions; written by the supervisor, replaced as a whole."""

from __future__ import annotations

import getpass
import json
import os
import platform
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from fp8console import __version__
from fp8console.protocol import paths
from fp8console.protocol.numbers import dumps
from fp8console.protocol.settings import Settings

#: Environment variables that decide how a training runs; others (which may hold secrets) are not stored.
PREFIXES = ("CUDA_", "HIP_", "ROCR_", "HSA_", "NCCL_", "RCCL_", "PYTORCH_", "TORCH_", "OMP_", "MKL_", "SLURM_", "AMD_")
NAMES = (
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "PYTHONPATH",
    "PYTHONHASHSEED",
    "MASTER_ADDR",
    "MASTER_PORT",
    "WORLD_SIZE",
    "RANK",
)


def describe(run_id: str, name: str, command: list[str], cwd: str, python: str, settings: Settings) -> dict[str, Any]:
    """The first content of run.json."""
    return {
        "id": run_id,
        "name": name,
        "command": command,
        "cwd": cwd,
        "python": python,
        "created": time.time(),
        "host": socket.gethostname(),
        "user": _user(),
        "versions": {"fp8console": __version__, "python": platform.python_version(), "torch": None},
        "git": None,
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(PREFIXES) or k in NAMES},
        "settings": settings.to_json(),
        "socket": None,
        "supervisor": None,
        "training": None,
        "world_size": None,
        "exit_status": None,
        "signal": None,
        "ended": None,
        "error": None,
    }


def write(run_dir: Path, info: dict[str, Any]) -> None:
    """Replace run.json. Raises OSError."""
    aside = run_dir / f".{paths.RUN}.tmp"
    aside.write_text(dumps(info, indent=1) + "\n")
    os.replace(aside, run_dir / paths.RUN)


def read(run_dir: Path) -> dict[str, Any]:
    """The content of run.json. Raises OSError or ValueError."""
    info = json.loads((run_dir / paths.RUN).read_text())
    if not isinstance(info, dict):
        raise ValueError(f"{run_dir / paths.RUN} is not a JSON object")
    return info


def git_state(cwd: str) -> dict[str, Any] | None:
    """Commit and whether tracked files differ from it, or None outside a git checkout."""
    try:
        ask = ["git", "-C", cwd, "rev-parse", "HEAD"]
        commit = subprocess.run(ask, capture_output=True, text=True, timeout=2, check=True).stdout.strip()
        ask = ["git", "-C", cwd, "status", "--porcelain", "--untracked-files=no"]
        dirty = subprocess.run(ask, capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "dirty": bool(dirty.strip())}


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return None
