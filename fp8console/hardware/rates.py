"""Rates out of counters: the share of time a GPU was throttled, and the data over its links.

The share is AMD's own: residency counter over accumulation counter, both differences between two samples (what
amdsmi calls a violation percentage). Taking it from the counters costs nothing; the library's call for it sleeps.
"""

from __future__ import annotations

from typing import Any

from fp8console.hardware.gpu import Counters

#: Shares up to this are 1: the two counters are not read at quite the same moment.
ROUNDING = 1.02


class Rates:
    """Remembers each GPU's counters from sample to sample."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, Counters]] = {}

    def of(self, key: str, counters: Counters | None, now: float) -> dict[str, Any]:
        """The rates since the last call for ``key``; ``now`` in seconds. Nothing known makes nothing, or None."""
        before = self._last.pop(key, None)
        if counters is None:
            return {}
        self._last[key] = (now, counters)
        found: dict[str, Any] = {}
        if counters.cycles is not None:
            found["throttle"] = _throttle(before[1], counters) if before is not None else None
        for name, count in _data(counters).items():
            if count is not None:
                old = _data(before[1])[name] if before is not None else None
                found[name] = _per_second(old, count, now - before[0]) if before is not None else None
        return found


def _data(counters: Counters) -> dict[str, int | None]:
    return {
        "pcie_bytes_s": counters.pcie,
        "xgmi_read_bytes_s": counters.xgmi_read,
        "xgmi_write_bytes_s": counters.xgmi_write,
    }


def _per_second(old: int | None, new: int, seconds: float) -> float | None:
    # A counter that went back was reset; what it held meanwhile is not known.
    return None if old is None or new < old or seconds <= 0 else (new - old) / seconds


def _throttle(old: Counters, new: Counters) -> dict[str, float | None] | None:
    cycles = _grown(old.cycles, new.cycles, new.wrap)
    if not cycles:
        return None
    thermal = [_share(a, b, cycles, new.wrap) for a, b in zip(old.thermal, new.thermal)]
    shares = {
        "power": _share(old.power, new.power, cycles, new.wrap),
        "thermal": max((share for share in thermal if share is not None), default=None),
        "hbm": _share(old.hbm, new.hbm, cycles, new.wrap),
    }
    return shares if any(share is not None for share in shares.values()) else None


def _share(old: int | None, new: int | None, cycles: int, wrap: int | None) -> float | None:
    grown = _grown(old, new, wrap)
    if grown is None or grown > cycles * ROUNDING:
        return None
    return round(min(1.0, grown / cycles), 4)


def _grown(old: int | None, new: int | None, wrap: int | None) -> int | None:
    if old is None or new is None:
        return None
    if new >= old:
        return new - old
    # One that wrapped has gone up a little in all; one that was reset seems to have gone round nearly once.
    grown = new - old + wrap if wrap is not None else None
    return grown if grown is not None and wrap is not None and grown < wrap // 2 else None
