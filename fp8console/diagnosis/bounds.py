"""What bounds the step, when the numbers say so: data wait, throttling, imbalance, memory. Nothing is guessed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fp8console.diagnosis import cards
from fp8console.diagnosis.cards import Gpu, History, Sample
from fp8console.diagnosis.conditions import THROTTLING, throttling
from fp8console.diagnosis.wording import CAUSES, percent

#: Share of the step that the loader holds the training up, from which on the step is bound by its data: what XProf
#: takes for that (its smart suggestion, "InfeedBoundThresholdInPercent", is 10).
DATA_WAIT = 0.10
#: Balance under which work is uneven, while the busiest card is at least so busy (percent): steps that all cards take
#: together last as long as the longest, so a fifth of a card is lost. Below half busy something else holds all of them.
BALANCE, BUSIEST = 0.80, 50.0
#: Percent of the time that the memory controller works, from which on memory bounds the step: kernels that do nothing
#: but stream reach about four fifths of an MI300X's peak bandwidth.
MEMORY_BUSY = 80.0
#: Sources whose memory_busy is the controller's activity. NVML's is the share of time with any access at all.
MEMORY_SOURCES = ("amdsmi", "sysfs", "amd-smi", "rocm-smi")


@dataclass(frozen=True)
class Bound:
    """One thing that bounds the step: what ("data wait", "throttling", "imbalance", "memory"), in words, and why."""

    what: str
    text: str
    evidence: dict[str, Any]


def bounds(samples: Sequence[Sample], data_wait_share: float | None) -> list[Bound]:
    """All that bounds the step by these samples (oldest first) and the share of step time spent waiting for data.

    Empty where nothing is known to: which is not the same as that nothing does.
    """
    window = cards.recent(samples)
    histories = list(cards.histories(window).items())
    of = {card: history for card, history in histories if history}
    busy = cards.busy_means(of)
    source = window[-1].get("source") if window else None
    found = [_data_wait(busy, data_wait_share), _throttled(of), _uneven(busy, of), _memory(of, source)]
    return [bound for bound in found if bound is not None]


def _data_wait(busy: dict[str, float], share: float | None) -> Bound | None:
    if share is None or not share >= DATA_WAIT:
        return None
    # A wait that the device's queue covers costs nothing: then the cards have less idle time than the wait is long.
    idle = [1 - value / 100 for value in busy.values()]
    if idle and max(idle) < share / 2:
        return None
    evidence = {"data_wait_share": share, "idle_share": max(idle) if idle else None}
    return Bound("data wait", f"data wait, {percent(share)} of the step", evidence)


def _throttled(of: dict[str, History]) -> Bound | None:
    found: list[tuple[float, str, Gpu]] = []
    for history in of.values():
        for cause in THROTTLING:
            judged = throttling(cause, history)
            if judged.bad and judged.value is not None:
                found.append((judged.value, cause, history[-1][1]))
    if not found:
        return None
    # By how much of its limit: a twentieth by heat weighs as much as a third by power.
    share, cause, gpu = max(found, key=lambda one: one[0] / THROTTLING[one[1]].bad)
    text = f"throttling: {cards.names([gpu])}, {CAUSES[cause]} {percent(share)} of the time"
    return Bound("throttling", text, {"gpu": gpu.get("index"), "cause": cause, "share": share})


def _uneven(means: dict[str, float], of: dict[str, History]) -> Bound | None:
    evenness = cards.balance_of(means)
    if evenness is None or evenness >= BALANCE or max(means.values()) < BUSIEST:
        return None
    by_key = {card: history[-1][1] for card, history in of.items()}
    low, high = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
    least, most = cards.names([by_key[low]]), cards.names([by_key[high]])
    text = f"imbalance: {least} is busy {means[low]:.0f}%, {most} {means[high]:.0f}%"
    evidence = {"balance": evenness, "least": by_key[low].get("index"), "most": by_key[high].get("index")}
    return Bound("imbalance", text, {**evidence, "least_busy": means[low], "most_busy": means[high]})


def _memory(of: dict[str, History], source: Any) -> Bound | None:
    busy: list[tuple[float, Gpu]] = []
    for history in of.values():
        gpu = history[-1][1]
        told = (gpu.get("source") or source) in MEMORY_SOURCES
        value = cards.mean_of(history, "memory_busy") if told else None
        if value is not None and value >= MEMORY_BUSY:
            busy.append((value, gpu))
    if not busy:
        return None
    value, gpu = max(busy, key=lambda one: one[0])
    text = f"memory: {cards.names([gpu])}'s memory controller is busy {value:.0f}%"
    return Bound("memory", text, {"gpu": gpu.get("index"), "memory_busy": value})
