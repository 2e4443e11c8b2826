"""Hardware samples over the last seconds: the run's cards, means of what they told, how evenly they work.

A sample is one line of hardware.jsonl. Unknown is None and enters no mean; values that were old when the sample was
taken count as unknown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from fp8console.protocol.numbers import number

Sample = dict[str, Any]
Gpu = dict[str, Any]
#: One card's part of some samples, with their times; the newest last.
History = list[tuple[float, Gpu]]

#: Seconds over which values are averaged: several steps of most trainings, so that one step's rhythm is not seen.
WINDOW = 10.0
#: A mean needs this many known values, over at least this many seconds.
LEAST_VALUES, LEAST_SECONDS = 3, 5.0
#: Seconds after which a card's values no longer tell what it does.
STALE = 5.0
#: Percent below which the busiest card hardly works, and a balance says nothing.
IDLE = 10.0

#: Causes of throttling that a sample tells apart.
CAUSES = ("power", "thermal", "hbm")


def key(gpu: Gpu) -> str:
    """What a card is known by from sample to sample, whichever source tells of it."""
    return str(gpu.get("bdf") or gpu.get("uuid") or f"#{gpu.get('index')}")


def gpus_of(sample: Sample | None) -> list[Gpu]:
    """The cards of a sample; none for None."""
    found = (sample or {}).get("gpus")
    return [gpu for gpu in found if isinstance(gpu, dict)] if isinstance(found, list) else []


def run_cards(gpus: Iterable[Gpu]) -> list[Gpu]:
    """The cards that the run works on: those that are known to be used, else those that torch sees, else all that are
    not known to be unused."""
    everyone = list(gpus)
    used = [gpu for gpu in everyone if gpu.get("used") is True]
    # A partitioned card is several of torch's devices.
    visible = [gpu for gpu in everyone if number(gpu.get("torch_index")) is not None or _several(gpu)]
    return used or [gpu for gpu in visible or everyone if gpu.get("used") is not False]


def _several(gpu: Gpu) -> bool:
    indices = gpu.get("torch_indices")
    return isinstance(indices, list) and len(indices) > 1


def recent(samples: Iterable[Sample], seconds: float = WINDOW) -> list[Sample]:
    """The samples of the last ``seconds`` before the newest one, oldest first; the newest must come last."""
    kept: list[Sample] = []
    newest: float | None = None
    for sample in reversed(list(samples)):
        moment = number(sample.get("time"))
        if moment is None or not math.isfinite(moment):
            continue
        newest = moment if newest is None else newest
        if moment <= newest - seconds or moment > newest:  # older, or of before the clock was set back
            break
        kept.append(sample)
    return kept[::-1]


def is_stale(gpu: Gpu) -> bool:
    """Whether a card's values were old when the sample was taken."""
    age = number(gpu.get("age"))
    return age is not None and age > STALE


def known(gpu: Gpu, *path: str) -> float | None:
    """A finite value of a card, by the names that lead to it; None when it is unknown or was old already."""
    value: Any = gpu
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    parsed = number(value)
    if parsed is None or not math.isfinite(parsed) or is_stale(gpu):
        return None
    return parsed


def histories(samples: Sequence[Sample]) -> dict[str, History]:
    """What each of the run's cards of the newest sample told in these samples, by key, oldest first."""
    if not samples:
        return {}
    found: dict[str, History] = {key(gpu): [] for gpu in run_cards(gpus_of(samples[-1]))}
    for sample in samples:
        moment = number(sample.get("time"))
        for gpu in gpus_of(sample) if moment is not None else ():
            if moment is not None and (history := found.get(key(gpu))) is not None:
                history.append((moment, gpu))
    return found


def mean(found: Sequence[tuple[float, float]]) -> float | None:
    """The mean of values with their times; None where they are too few or too close together to stand for a stretch."""
    if len(found) < LEAST_VALUES or found[-1][0] - found[0][0] < LEAST_SECONDS:
        return None
    return sum(value for _, value in found) / len(found)


def mean_of(history: History, *path: str) -> float | None:
    """The mean of one value of one card over its history, or None."""
    found = [(moment, known(gpu, *path)) for moment, gpu in history]
    return mean([(moment, value) for moment, value in found if value is not None])


def busy_means(of: dict[str, History]) -> dict[str, float]:
    """Mean busy percent by card, of those of which it is known."""
    means = {card: mean_of(history, "busy") for card, history in of.items()}
    return {card: value for card, value in means.items() if value is not None}


def balance(samples: Iterable[Sample]) -> float | None:
    """How evenly the run's cards work: the lowest mean busy over the highest, over the last ``WINDOW`` seconds.

    1 is even. None with fewer than two cards whose busy is known, and while none of them works. A card that waits in a
    collective operation may count as busy, for the library's kernel turns while it waits: an uneven figure is a fact,
    an even one is no proof.
    """
    return balance_of(busy_means(histories(recent(samples))))


def balance_of(means: dict[str, float]) -> float | None:
    """The balance by the cards' mean busy percent; see ``balance``."""
    if len(means) < 2 or max(means.values()) < IDLE:
        return None
    return min(means.values()) / max(means.values())


def xcd_balance(xcd_busy: Any) -> float | None:
    """The same over one card's XCDs, of one sample: the lowest busy over the highest."""
    if not isinstance(xcd_busy, list):
        return None
    found = [value for value in map(number, xcd_busy) if value is not None and math.isfinite(value)]
    if len(found) < 2 or max(found) < IDLE:
        return None
    return min(found) / max(found)


def names(cards: Iterable[Gpu]) -> str:
    """Cards in words, by number: "GPU 2", "GPUs 0-3, 6"."""
    indices = sorted({int(index) for gpu in cards if (index := number(gpu.get("index"))) is not None})
    if not indices:
        return "a GPU"
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}{'-' if len(run) > 2 else ', '}{run[-1]}" for run in runs]
    return ("GPU " if len(indices) == 1 else "GPUs ") + ", ".join(words)
