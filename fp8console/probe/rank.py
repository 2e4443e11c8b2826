"""Which rank this process is, and its claim on that rank's files."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from pathlib import Path


def world() -> tuple[int, int]:
    """(rank, world size): torch.distributed's if it is initialised, else the launcher's environment, else (0, 1)."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    for rank_name, size_name in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        try:
            return int(os.environ[rank_name]), int(os.environ[size_name])
        except (KeyError, ValueError):
            continue
    return 0, 1


class RankClaim:
    """A lock on ``rank.<n>.lock`` in the run directory, held until this process ends.

    Processes that don't know of each other (two trainings started by one command) all think that they are rank 0: the
    second takes the next free number. The lock is a POSIX record lock: a fork does not inherit it, a kill frees it.
    On a file system without locks (Lustre often) the number is taken unclaimed.
    """

    def __init__(self, run_dir: Path, rank: int, most: int = 4096) -> None:
        for candidate in range(rank, rank + most):
            fd = os.open(run_dir / f"rank.{candidate}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    os.close(fd)
                    continue
            self._fd = fd
            self.rank = candidate
            return
        raise OSError(f"no free rank from {rank} up in {run_dir}")
