"""After a training has ended: records that a killed rank had not yet written are moved from its shared memory."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from fp8console.protocol import paths, records


def recover(run_dir: Path) -> int:
    """Append to each rank's file the records that only its spool has, and remove the spools; how many were saved."""
    saved = 0
    for file in sorted(run_dir.glob("steps.*.rec")):
        rank = file.name.split(".")[1]
        if not rank.isdigit():
            continue
        spool = paths.spool_file(run_dir, int(rank))
        if _held(run_dir / f"rank.{rank}.lock"):
            continue  # a process of this run has outlived its launcher and still writes
        try:
            saved += _recover_rank(file, spool)
            spool.unlink(missing_ok=True)
        except (OSError, ValueError):
            continue
    return saved


def _held(lock: Path) -> bool:
    try:
        with open(lock, "r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:
        pass  # no such file, or a file system without locks
    return False


def _recover_rank(file: Path, spool: Path) -> int:
    if not spool.exists() or spool.stat().st_uid != os.getuid():
        return 0
    width = records.STEP_STRUCT.size
    kept = spool.read_bytes()
    slots = [kept[start : start + width] for start in range(0, len(kept) - width + 1, width)]
    with open(file, "r+b") as out:
        if records.parse_header(out.read(records.HEADER_BYTES))["record_bytes"] != width:
            return 0
        size = os.fstat(out.fileno()).st_size
        whole = size - (size - records.HEADER_BYTES) % width
        last = 0
        if whole > records.HEADER_BYTES:
            out.seek(whole - width)
            last = int(records.unpack_step(out.read(width))["step"] or 0)
        stepped = [(int(records.unpack_step(slot)["step"] or 0), slot) for slot in slots]
        missing = sorted((step, slot) for step, slot in stepped if step > last)
        out.truncate(whole)
        out.seek(whole)
        out.write(b"".join(slot for _, slot in missing))
    return len(missing)
