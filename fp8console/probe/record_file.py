"""A file of fixed-width records that is appended to. Never leaves a torn record in the middle of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fp8console.protocol import records


class RecordFile:
    """Opens or makes the file; what a killed process left torn at its end is written over.

    ``fresh`` says that there was none. ``problem`` is why the last append failed, None when it didn't. Raises OSError
    when it can't be opened, ValueError when it has another layout.
    """

    def __init__(self, path: Path, fields: tuple[records.Field, ...], **about: Any) -> None:
        self.problem: str | None = None
        self._fields = fields
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.width = 0
        self._size = self._whole_size(os.fstat(self._fd).st_size)
        self.fresh = self._size == 0
        if self.fresh:
            head = records.header(fields, **about)
            self.width = int(records.parse_header(head)["record_bytes"])
            os.pwrite(self._fd, head, 0)
            self._size = records.HEADER_BYTES

    def _whole_size(self, size: int) -> int:
        """The file's size without a torn record; 0 for a new file."""
        if size < records.HEADER_BYTES:
            os.ftruncate(self._fd, 0)
            return 0
        head = records.parse_header(os.pread(self._fd, records.HEADER_BYTES, 0))
        ours = records.parse_header(records.header(self._fields))
        if head["record_bytes"] != ours["record_bytes"] or [f[0] for f in head["fields"]] != [
            field.name for field in self._fields
        ]:
            raise ValueError("the record file was written by another version of fp8console")
        self.width = int(ours["record_bytes"])
        return size - (size - records.HEADER_BYTES) % self.width

    def last(self) -> bytes | None:
        """The last record, None when there is none."""
        if self._size < records.HEADER_BYTES + self.width:
            return None
        return os.pread(self._fd, self.width, self._size - self.width)

    def append(self, data: bytes) -> int:
        """Write whole records; returns how many were written. Fewer than given: ``problem`` says why."""
        try:
            written = os.pwrite(self._fd, data, self._size)
        except OSError as error:
            self.problem = str(error.strerror)
            return 0
        whole = written // self.width
        self._size += whole * self.width
        self.problem = None
        if written != len(data):
            self.problem = "short write"
            try:
                os.ftruncate(self._fd, self._size)
            except OSError as error:
                self.problem = str(error.strerror)
        return whole
