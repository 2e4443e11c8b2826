"""What may be wrong with a card or a host, as judged from the last seconds of samples, with the evidence.

Each judgement is True (it is bad), False (it is well) or None (in between or unknown: what was said before stands).
That gap between the two limits is what keeps noise from making many alerts of one episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fp8console.diagnosis import cards
from fp8console.diagnosis.cards import History, Sample
from fp8console.protocol.numbers import number


@dataclass(frozen=True)
class Limits:
    """An episode begins at ``bad`` and above and ends below ``well``; shares of 1."""

    bad: float
    well: float


#: Share of the time that a card is held back, by cause, over cards.WINDOW. A card in a cooled machine is never held
#: back by heat, so a twentieth of the time is news. At the power limit the firmware trims the clocks as a matter of
#: course under matrix products: only where that is the state of things, not its ripple, does it say anything.
#: (AMD calls any share over 0 a violation: amdsmi_violation_status_t, per_ppt_pwr and per_socket_thrm.)
THROTTLING = {"power": Limits(0.30, 0.15), "thermal": Limits(0.05, 0.02), "hbm": Limits(0.05, 0.02)}
#: Share of a card's memory in use. torch's allocator keeps what it once had, so high is usual; beyond this little is
#: left for a larger batch, and a request that finds no room first gives all cached blocks back, which waits for the
#: device (torch's notes on memory management), or fails.
MEMORY = Limits(0.97, 0.94)
#: Share of the host's memory in use that leaves the kernel's out-of-memory killer near.
HOST_MEMORY = Limits(0.95, 0.92)
#: Bytes free where the run directory is. No share: a checkpoint needs the same room on a disk of any size.
DISK_BAD, DISK_WELL = 2e9, 3e9


@dataclass(frozen=True)
class Judgement:
    """Whether something is bad, how much, and what shows it."""

    bad: bool | None = None
    value: float | None = None
    evidence: dict[str, Any] = field(default_factory=dict)


UNKNOWN = Judgement()


def _judge(value: float, limits: Limits, evidence: dict[str, Any]) -> Judgement:
    bad = True if value >= limits.bad else False if value < limits.well else None
    return Judgement(bad, value, evidence)


def throttling(cause: str, history: History) -> Judgement:
    """Whether a card is held back by ``cause`` ("power", "thermal" or "hbm"): share of the time over its history."""
    share, gpu = cards.mean_of(history, "throttle", cause), history[-1][1]
    if share is None:
        return UNKNOWN
    shown = ("power_w", "power_cap_w", "temperature_c", "memory_temperature_c", "clock_mhz", "busy")
    evidence = {"share": round(share, 4), "over_seconds": cards.WINDOW}
    return _judge(share, THROTTLING[cause], {**evidence, **{name: cards.known(gpu, name) for name in shown}})


def memory(history: History) -> Judgement:
    """Whether a card's memory is nearly full: used share over its history."""
    used, gpu = cards.mean_of(history, "vram_used"), history[-1][1]
    total = cards.known(gpu, "vram_total")
    if used is None or not total:
        return UNKNOWN
    evidence = {"share": round(used / total, 4), "vram_used": cards.known(gpu, "vram_used"), "vram_total": total}
    return _judge(used / total, MEMORY, evidence)


def host_memory(window: Sequence[Sample]) -> Judgement:
    """Whether the host's memory is nearly full: used share over the window."""
    used, total = _host_mean(window, "memory_used"), _host(window[-1], "memory_total")
    if used is None or not total:
        return UNKNOWN
    evidence = {"share": round(used / total, 4), "memory_used": _host(window[-1], "memory_used")}
    return _judge(used / total, HOST_MEMORY, {**evidence, "memory_total": total})


def disk(window: Sequence[Sample]) -> Judgement:
    """Whether there is little room left where the run directory is: bytes free, over the window."""
    free = _host_mean(window, "run_dir_free")
    if free is None:
        return UNKNOWN
    bad = True if free < DISK_BAD else False if free >= DISK_WELL else None
    total = _host(window[-1], "run_dir_total")
    return Judgement(bad, free, {"run_dir_free": _host(window[-1], "run_dir_free"), "run_dir_total": total})


def _host(sample: Sample, name: str) -> float | None:
    host = sample.get("host")
    return number(host.get(name)) if isinstance(host, dict) else None


def _host_mean(window: Sequence[Sample], name: str) -> float | None:
    found = [(number(sample.get("time")), _host(sample, name)) for sample in window]
    return cards.mean([(moment, value) for moment, value in found if moment is not None and value is not None])
