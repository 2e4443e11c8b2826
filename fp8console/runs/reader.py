"""Reading a run directory's files while they grow: step records, events, output, hardware samples.

Each reader is opened once and then asked to ``refresh``; what it has read already it does not read again. A missing
file is an empty one, because a reader may come before the writer. Nothing here writes or locks anything.
"""

from __future__ import annotations

import math
import mmap
import os
import re
from collections import deque
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fp8console.protocol import events, hardware, paths, records
from fp8console.protocol.numbers import number

_LAYOUT_NOW: dict[str, Any] = records.parse_header(records.header())


def _dtype(header: dict[str, Any]) -> np.dtype[Any]:
    """The numpy layout that a record file's header states. Raises ValueError when it makes no sense."""
    try:
        dtype = np.dtype([(str(name), records.NUMPY_CODES[code]) for name, code, *_ in header["fields"]])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"unreadable layout: {error}") from None
    if dtype.itemsize == 0 or dtype.itemsize != header.get("record_bytes"):
        stated = header.get("record_bytes")
        raise ValueError(f"its layout has {dtype.itemsize} bytes a record, its header says {stated}")
    return dtype


class StepRecords:
    """The step records of one rank, mapped into memory.

    ``problem`` is one line when the file can't be read as records (it then counts as empty). ``generation`` grows when
    the file was replaced or truncated, so that whoever keeps sums over it knows to start anew.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.problem: str | None = None
        self.generation = 0
        self._map: mmap.mmap | None = None
        self._seen: tuple[int, int, int] | None = None  # device, inode, size
        self._set_layout(_LAYOUT_NOW)
        self.refresh()

    def _set_layout(self, header: dict[str, Any]) -> None:
        dtype = _dtype(header)
        flags = header.get("flags")
        self._flags: dict[str, int] = flags if isinstance(flags, dict) else {}
        self._index = {name: index for index, name in enumerate(dtype.names or ())}
        self._data: NDArray[Any] = np.empty(0, dtype)
        self._header = header

    @property
    def names(self) -> tuple[str, ...]:
        """The columns of this file's layout."""
        return tuple(self._index)

    @property
    def flag_names(self) -> tuple[str, ...]:
        """The flags of this file's layout."""
        return tuple(self._flags)

    def refresh(self) -> int:
        """Looks at the file again; returns the number of whole records in it now."""
        try:
            stat = os.stat(self.path)
        except OSError:
            if self._seen is not None:
                self._restart(None)
            return 0
        seen = (stat.st_dev, stat.st_ino, stat.st_size)
        if seen == self._seen:
            return len(self._data)
        if self._seen is not None and (seen[:2] != self._seen[:2] or seen[2] < self._seen[2]):
            self._restart(None)
        try:
            self._remap()
        except (OSError, ValueError) as error:
            self._restart(f"{self.path}: {error}")
            self._seen = seen
        return len(self._data)

    def _restart(self, problem: str | None) -> None:
        self.generation += 1
        self.problem = problem
        self._seen = None
        self._map = None
        self._data = self._data[:0].copy()

    def _remap(self) -> None:
        with open(self.path, "rb") as file:
            stat = os.fstat(file.fileno())
            size = stat.st_size
            if size < records.HEADER_BYTES:
                self._seen = (stat.st_dev, stat.st_ino, size)
                return
            if self._map is None:
                header = records.parse_header(file.read(records.HEADER_BYTES))
                self._set_layout(header)
                self.problem = None
            count = (size - records.HEADER_BYTES) // self._data.dtype.itemsize
            self._map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
            self._data = np.frombuffer(self._map, self._data.dtype, count, records.HEADER_BYTES)
            self._seen = (stat.st_dev, stat.st_ino, size)

    def release_pages(self) -> None:
        """Gives the mapped pages back to the system (they are read again when touched), to keep this process small."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def __len__(self) -> int:
        return len(self._data)

    def _check(self, name: str) -> int:
        if name not in self._index:
            raise KeyError(f"{self.path.name}: no column {name!r}; it has {', '.join(self._index)}")
        return self._index[name]

    def column(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Values of one column for records ``start`` to ``stop``: a read-only view. Unknown ones are NaN, or 0.

        Raises KeyError for a column that this file does not have.
        """
        self._check(name)
        return self._data[name][start:stop]

    def known(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[np.bool_]:
        """Whether each of these values was measured. Raises KeyError for a column that this file does not have."""
        index = self._check(name)
        if "known" not in self._index:
            return np.ones(len(self._data[start:stop]), np.bool_)
        bits = self._data["known"][start:stop]
        return cast("NDArray[np.bool_]", (bits & np.uint32(1 << index)) != 0)

    def flag(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[np.bool_]:
        """One flag for each of these records. Raises KeyError for a flag that this file does not have."""
        if name not in self._flags:
            raise KeyError(f"{self.path.name}: no flag {name!r}; it has {', '.join(self._flags)}")
        self._check("flags")
        bits = self._data["flags"][start:stop]
        return cast("NDArray[np.bool_]", (bits & np.uint32(self._flags[name])) != 0)

    def last(self, name: str) -> float | int | None:
        """The value in the newest record; None when it is unknown or there is no record."""
        self._check(name)
        if not len(self._data) or not self.known(name, -1)[0]:
            return None
        return cast("float | int", self._data[name][-1].item())


class _Lines:
    """Whole lines of a growing text file, each given once; a torn tail is left for later."""

    def __init__(self, path: Path, from_end: int | None = None) -> None:
        self.path = path
        self.offset = 0
        self._inode: int | None = None
        self._from_end = from_end

    def read(self) -> tuple[list[bytes], bool]:
        """New lines, and whether the file was replaced or truncated, so that earlier lines no longer count."""
        try:
            with open(self.path, "rb") as file:
                stat = os.fstat(file.fileno())
                fresh = self._inode is not None and (stat.st_ino != self._inode or stat.st_size < self.offset)
                skip_first = False
                if fresh or self._inode is None:
                    self.offset = 0
                    if self._from_end is not None and stat.st_size > self._from_end:
                        self.offset = stat.st_size - self._from_end
                        skip_first = True
                self._inode = stat.st_ino
                if stat.st_size <= self.offset:
                    return [], fresh
                file.seek(self.offset)
                data = file.read(stat.st_size - self.offset)
        except OSError:
            return [], False
        end = data.rfind(b"\n") + 1
        self.offset += end
        lines = data[:end].split(b"\n")[:-1]
        return lines[1:] if skip_first else lines, fresh


#: Kinds of which every rank writes its own; one of them is enough for people.
RANK_KINDS = frozenset(
    {"snapshot", "checkpoint", "verified", "point_dropped", "paused", "resumed", "rolled_back"}
    | {"scaler", "settings", "skipped", "nonfinite", "clipping", "recovered", "baseline", "profile"}
)


def is_primary(event: dict[str, Any]) -> bool:
    """Whether the event is one to show: not another rank's copy of what rank 0 says too."""
    return event.get("rank", 0) == 0 or event["kind"] not in RANK_KINDS


class EventLog:
    """All events of a run, merged over the supervisor's file and each rank's.

    ``events`` is sorted by time; ``arrived`` holds the same events in the order in which this reader got them, append
    only within one ``generation``. Every event carries ``file``, its file's name; a rank's carry ``rank``.
    """

    # Besides the ranks' own files there is one in which a process says that no probe could be started in it.
    _FILE = re.compile(r"events\.(?:(\d+)|[a-z]+)\.jsonl")

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = Path(run_dir)
        self.events: list[dict[str, Any]] = []
        self.arrived: list[dict[str, Any]] = []
        self.generation = 0
        supervisor = paths.events_file(self.run_dir)
        self._sources: dict[str, tuple[_Lines, int | None]] = {supervisor.name: (_Lines(supervisor), None)}

    def refresh(self) -> list[dict[str, Any]]:
        """Reads on; returns the new events, sorted by time."""
        self._find_files()
        new: list[dict[str, Any]] = []
        for name, (source, rank) in self._sources.items():
            lines, fresh = source.read()
            if fresh:
                self.generation += 1
                self.arrived = [event for event in self.arrived if event["file"] != name]
                self.events = [event for event in self.events if event["file"] != name]
            for line in lines:
                event = events.parse_line(line)
                moment = number(event["time"]) if event is not None else None
                if event is None or moment is None or not math.isfinite(moment):
                    continue
                event.setdefault("step", None)
                event.setdefault("text", event.get("reason") or event["kind"])
                event.update(time=moment, file=name, **({} if rank is None else {"rank": rank}))
                new.append(event)
        if new:
            new.sort(key=itemgetter("time"))
            self.arrived.extend(new)
            in_order = not self.events or self.events[-1]["time"] <= new[0]["time"]
            self.events.extend(new)
            if not in_order:
                self.events.sort(key=itemgetter("time"))
        return new

    def _find_files(self) -> None:
        try:
            names = os.listdir(self.run_dir)
        except OSError:
            return
        for name in sorted(names):
            if name not in self._sources and (match := self._FILE.fullmatch(name)):
                rank = int(match[1]) if match[1] else None
                self._sources[name] = (_Lines(self.run_dir / name), rank)


_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)"  # OSC, DCS and the other strings, with their end
    r"|\x1b[ -/]*[0-~]?"  # two-character escapes
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)


def clean_line(text: str) -> str:
    """One line of output as a terminal would leave it: no control sequences, the last state of a progress bar."""
    states = text.rstrip("\r").split("\r")
    for state in reversed(states):
        cleaned = _CONTROL.sub("", state)
        if cleaned.strip():
            return cleaned.expandtabs(8)
    return ""


class OutputTail:
    """The end of a run's output file, at most ``limit_bytes`` of it."""

    def __init__(self, path: Path, limit_bytes: int = 256 * 1024) -> None:
        self.path = Path(path)
        self.limit_bytes = limit_bytes
        self._data = b""
        self._offset = 0
        self._inode: int | None = None
        self._cut = False

    def refresh(self) -> bool:
        """Reads on; whether there was anything new."""
        try:
            with open(self.path, "rb") as file:
                stat = os.fstat(file.fileno())
                changed = False
                if stat.st_ino != self._inode or stat.st_size < self._offset:
                    changed = self._inode is not None
                    self._data, self._offset, self._inode, self._cut = b"", 0, stat.st_ino, False
                if stat.st_size == self._offset:
                    return changed
                if stat.st_size - self._offset > self.limit_bytes:
                    self._data, self._offset, self._cut = b"", stat.st_size - self.limit_bytes, True
                file.seek(self._offset)
                new = file.read(stat.st_size - self._offset)
        except OSError:
            return False
        self._offset += len(new)
        data = self._data + new
        self._cut = self._cut or len(data) > self.limit_bytes
        self._data = data[-self.limit_bytes :]
        return True

    def lines(self, n: int) -> list[str]:
        """The last ``n`` lines, oldest first; an unfinished last line counts."""
        if n <= 0:
            return []
        pieces = self._data.rsplit(b"\n", n + 1)
        if pieces and not pieces[-1]:
            pieces.pop()
        # The first piece is all that stands before the lines asked for, unless there were fewer than that.
        if len(pieces) <= n and self._cut and len(pieces) > 1:
            pieces = pieces[1:]
        return [clean_line(piece.decode("utf-8", "replace")) for piece in pieces[-n:]]


class HardwareLog:
    """Hardware samples: the newest one, and as many before it as ``keep``. One sample a line, about one a second.

    ``taken`` counts all that were read. The whole run's are for runs/utilisation.py: a sample of eight cards is some
    2 kB of text and thirty times that in memory.
    """

    def __init__(self, run_dir: Path, keep: int = 60) -> None:
        self.path = Path(run_dir) / paths.HARDWARE
        self.history: deque[dict[str, Any]] = deque(maxlen=keep)
        self.taken = 0
        self._lines = _Lines(self.path, from_end=1 << 20)

    @property
    def latest(self) -> dict[str, Any] | None:
        """The newest sample, or None when there is none."""
        return self.history[-1] if self.history else None

    def refresh(self) -> bool:
        """Reads on; whether there was a new sample."""
        lines, fresh = self._lines.read()
        if fresh:
            self.history.clear()
        found = False
        for line in lines:
            sample = hardware.parse(line)
            if sample is not None:
                self.history.append(sample)
                self.taken += 1
                found = True
        return found
