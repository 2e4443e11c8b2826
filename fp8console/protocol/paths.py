"""Where things are: the run directory's files, the folder of runs, sockets."""

from __future__ import annotations

import os
from pathlib import Path

RUN = "run.json"
OUTPUT = "output.log"
HARDWARE = "hardware.jsonl"
SUPERVISOR_EVENTS = "events.jsonl"
CHECKPOINTS = "checkpoints"
SITE = "site"
#: Space held for the supervisor's last words on a full disk.
RESERVE = ".reserve"
RESERVE_BYTES = 128 * 1024
#: Longest path that a socket is given: systems take 104 to 108 bytes.
SOCKET_BYTES = 100

# Environment of the training process.
ENV_RUN_DIR = "FP8CONSOLE_RUN_DIR"
ENV_LINK = "FP8CONSOLE_LINK"
ENV_SITE = "FP8CONSOLE_SITE"


def steps_file(run_dir: Path, rank: int) -> Path:
    """Step records of one rank."""
    return run_dir / f"steps.{rank}.rec"


def layers_file(run_dir: Path, rank: int) -> Path:
    """Layer records of one rank."""
    return run_dir / f"layers.{rank}.rec"


def layers_about(run_dir: Path, rank: int = 0) -> Path:
    """What the layers of the layer records are: rank 0's, and where another rank has written its own, that one's."""
    return run_dir / ("layers.json" if rank == 0 else f"layers.{rank}.json")


def events_file(run_dir: Path, rank: int | None = None) -> Path:
    """Events of one rank's probe, or of the supervisor when ``rank`` is None."""
    return run_dir / (SUPERVISOR_EVENTS if rank is None else f"events.{rank}.jsonl")


def state_root() -> Path:
    """The default folder of runs: ``$XDG_STATE_HOME/fp8console/runs``; not created here."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "fp8console" / "runs"


def fallback_root() -> Path:
    """The folder of runs when the default one can't be written: one in the temporary folder, by user."""
    return _temporary() / "runs"


def socket_path(run_dir: Path) -> Path:
    """The supervisor's socket for a run: short (``SOCKET_BYTES``) and in a folder of this user's.

    The name comes from the run directory's real path, so two runs with one id in two folders do not meet. Not in
    $XDG_RUNTIME_DIR: that folder goes when the user logs out, and a run is there to be come back to.
    """
    name = f"{_digest(run_dir)}.sock"
    usual = _temporary() / "sockets" / name
    if len(os.fsencode(usual)) <= SOCKET_BYTES:
        return usual
    return Path("/tmp") / f"fp8console-{os.getuid()}" / "sockets" / name


def _digest(run_dir: Path) -> str:
    import hashlib  # with tempfile below, a fifth of what a plain command takes to start

    return hashlib.sha256(os.fsencode(os.path.realpath(run_dir))).hexdigest()[:16]


def _temporary() -> Path:
    import tempfile

    return Path(tempfile.gettempdir()) / f"fp8console-{os.getuid()}"


def spool_file(run_dir: Path, rank: int) -> Path:
    """Where a rank keeps its newest records in shared memory, until they are in the file: they survive its kill."""
    return Path("/dev/shm") / f"fp8console-{os.getuid()}-{_digest(run_dir)}.{rank}"
