"""Identity of a process: pid, start time, boot id. A pid alone may since belong to somebody else."""

from __future__ import annotations

import os
import signal
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ProcessIdentity:
    """A process as it can be told from any other: ``start`` in clock ticks since boot (field 22 of proc(5) stat)."""

    pid: int
    start: int | None
    boot: str | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Any) -> ProcessIdentity | None:
        if not isinstance(data, dict) or not isinstance(data.get("pid"), int):
            return None
        return ProcessIdentity(data["pid"], data.get("start"), data.get("boot"))


def boot_id() -> str | None:
    """The kernel's id of this boot, or None where there is none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return None


def identify(pid: int) -> ProcessIdentity:
    """The identity of a process that exists now; ``start`` is None where /proc does not tell."""
    return ProcessIdentity(pid, _start_ticks(pid), boot_id())


def is_alive(who: ProcessIdentity) -> bool:
    """Whether that very process still runs (a zombie does not)."""
    if who.boot is not None and who.boot != boot_id():
        return False
    start = _start_ticks(who.pid)
    if start is None:
        if who.start is not None:
            return False
        try:
            os.kill(who.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True
    return who.start is None or start == who.start


def send_signal(who: ProcessIdentity, number: signal.Signals, group: bool = False) -> bool:
    """Signal the process (or its group) if it still is the one identified; False when it is not."""
    if not is_alive(who):
        return False
    try:
        if group:
            os.killpg(who.pid, number)
        else:
            os.kill(who.pid, number)
    except ProcessLookupError:
        return False
    return True


def _start_ticks(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    # The command's name, in brackets, may hold spaces and brackets: count fields after the last one.
    fields = text[text.rfind(b")") + 2 :].split()
    if len(fields) < 20 or fields[0] == b"Z":
        return None
    return int(fields[19])
