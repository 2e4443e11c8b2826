"""A file of lines that several processes may append to, also on a disk that is full for a while."""

from __future__ import annotations

import os
from pathlib import Path


class LineFile:
    """Appends whole lines. What a full disk cut off is ended with the next line, so that it spoils no other."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None
        self._torn = False

    def open(self) -> None:
        """Make the file if it is not there. Raises OSError."""
        if self._fd is None:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def append(self, line: bytes) -> None:
        """One line, given without its end, in one write: a kill tears at most the last one. Raises OSError."""
        self.open()
        assert self._fd is not None
        data = b"\n" * self._torn + line + b"\n"
        self._torn = os.write(self._fd, data) < len(data)

    def close(self) -> None:
        """Close it; the next line opens it again."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
