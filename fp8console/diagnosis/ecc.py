"""Memory errors of one card, from counters that only grow: what is new, what rises."""

from __future__ import annotations

import collections
from typing import Any

from fp8console.diagnosis.conditions import UNKNOWN, Judgement

#: Seconds without a new uncorrectable error after which an episode of them is over.
UNCORRECTABLE_QUIET = 600.0
#: Correctable errors are expected one by one (a particle's strike is one); so many within so many seconds on one card
#: come from a cell, a row or a link that fails. An episode is over when such a stretch has had no more than the second.
CORRECTABLE_SECONDS = 3600.0
CORRECTABLE_BAD, CORRECTABLE_WELL = 5, 1


class Counter:
    """Follows one counter of one card. What it stood at when first seen is of before this run."""

    def __init__(self, correctable: bool) -> None:
        self._correctable = correctable
        self._last: int | None = None
        self._new = 0  # in all, since first seen
        self._rises: collections.deque[tuple[float, int]] = collections.deque()

    def judge(self, time: float, count: float | None) -> Judgement:
        """Takes in a reading, None where unknown; whether there are errors to tell of."""
        if count is None:
            return UNKNOWN
        whole = int(count)
        # A counter that fell was set back by a reset of the driver: the next rise counts from there.
        rise = max(0, whole - self._last) if self._last is not None else 0
        self._last = whole
        self._new += rise
        if rise:
            self._rises.append((time, rise))
        keep = CORRECTABLE_SECONDS if self._correctable else UNCORRECTABLE_QUIET
        while self._rises and self._rises[0][0] <= time - keep:
            self._rises.popleft()
        lately = sum(rise for _, rise in self._rises)
        evidence: dict[str, Any] = {"new": lately, "over_seconds": keep, "new_in_run": self._new, "count": whole}
        if self._correctable:
            bad = True if lately >= CORRECTABLE_BAD else False if lately <= CORRECTABLE_WELL else None
        else:
            bad = lately > 0
        return Judgement(bad, float(lately), evidence)
