"""Step records on their way to the file: queued by the training thread, written by the link's thread.

The newest also lie in a ring in shared memory, which is never a disk and never slow: if this process is killed, the
supervisor moves from there what had not reached the file.
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import Any

from fp8console.probe.record_file import RecordFile
from fp8console.protocol import records

#: Records kept while the disk does not take them: at 130 bytes each, 26 MB. Older ones are lost then, and counted.
QUEUE = 200_000


class Recorder:
    """Appends step records to one file."""

    def __init__(self, path: Path, spool: Path | None = None, **about: Any) -> None:
        self.lost = 0
        self.last_step = 0
        self._queue: deque[bytes] = deque()
        self._file = RecordFile(path, records.STEP_FIELDS, **about)
        last = self._file.last()
        if last is not None:
            # A restarted rank goes on counting where the earlier one ended.
            self.last_step = int(records.unpack_step(last)["step"] or 0)
        self._added = 0
        self._spool = spool
        self._spool_fd: int | None = None
        if spool is not None:
            try:
                if not self._file.fresh:
                    self._rescue(spool)
                flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
                self._spool_fd = os.open(spool, flags, 0o600)
            except OSError:
                pass  # no shared memory here: a kill can cost the last tenth of a second

    @property
    def problem(self) -> str | None:
        """Why records can't be written at present, or None."""
        return self._file.problem

    def _rescue(self, spool: Path) -> None:
        """Write what a killed earlier process of this rank had in its spool alone."""
        try:
            with open(os.open(spool, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
                if os.fstat(file.fileno()).st_uid != os.getuid():
                    return
                kept = file.read()
        except FileNotFoundError:
            return
        width = records.STEP_STRUCT.size
        slots = [kept[start : start + width] for start in range(0, len(kept) - width + 1, width)]
        stepped = [(int(records.unpack_step(slot)["step"] or 0), slot) for slot in slots]
        for step, slot in sorted(item for item in stepped if item[0] > self.last_step):
            self._queue.append(slot)
            self.last_step = step
        self.flush()

    def close(self) -> None:
        """The process ends by itself: what is written needs no copy in memory."""
        if self._spool is not None and self._spool_fd is not None and not self._queue:
            self._spool_fd = None
            self._spool.unlink(missing_ok=True)

    def add(self, record: bytes) -> None:
        """Queue one record; never waits."""
        if len(self._queue) >= QUEUE:
            self._queue.popleft()
            self.lost += 1
        self._queue.append(record)
        if self._spool_fd is not None:
            try:
                os.pwrite(self._spool_fd, record, self._added % records.SPOOL_SLOTS * len(record))
            except OSError:
                self._spool_fd = None
            self._added += 1

    def flush(self) -> None:
        """Write what is queued. A full or broken disk sets ``problem`` and keeps the queue for the next try."""
        while self._queue:
            count = min(len(self._queue), 4096)
            for _ in range(self._file.append(b"".join(self._queue[i] for i in range(count)))):
                self._queue.popleft()
            if self._file.problem is not None:
                return
