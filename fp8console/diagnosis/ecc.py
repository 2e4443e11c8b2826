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
    """Follows one counter of one card. What it stood at when first seen is of before this run.

    Sources may count different blocks of a card: each is followed by itself, and the one with most new errors counts.
    """

    def __init__(self, correctable: bool) -> None:
        self._correctable = correctable
        self._by_source: dict[Any, _Count] = {}

    def judge(self, time: float, count: float | None, source: Any = None) -> Judgement:
        """Takes in a reading, None where unknown; whether there are errors to tell of."""
        if count is None:
            return UNKNOWN
        whole = int(count)
        self._by_source.setdefault(source, _Count()).take(time, whole)
        keep = CORRECTABLE_SECONDS if self._correctable else UNCORRECTABLE_QUIET
        lately = max(one.since(time - keep) for one in self._by_source.values())
        new = max(one.new for one in self._by_source.values())
        evidence: dict[str, Any] = {"new": lately, "over_seconds": keep, "new_in_run": new, "count": whole}
        if self._correctable:
            bad = True if lately >= CORRECTABLE_BAD else False if lately <= CORRECTABLE_WELL else None
        else:
            bad = lately > 0
        return Judgement(bad, float(lately), evidence)

    def set_back(self, time: float) -> None:
        """The host's clock was set back to ``time``."""
        for one in self._by_source.values():
            one.rises = collections.deque((min(moment, time), rise) for moment, rise in one.rises)


class _Count:
    """What one source told of it: how many errors in all since first seen, and when they came."""

    def __init__(self) -> None:
        self._last: int | None = None
        self.new = 0
        self.rises: collections.deque[tuple[float, int]] = collections.deque()

    def take(self, time: float, count: int) -> None:
        # A counter that fell was set back by a reset of the driver: the next rise counts from there.
        rise = max(0, count - self._last) if self._last is not None else 0
        self._last = count
        self.new += rise
        if rise:
            self.rises.append((time, rise))

    def since(self, time: float) -> int:
        """Errors after ``time``; those of before are forgotten."""
        while self.rises and self.rises[0][0] <= time:
            self.rises.popleft()
        return sum(rise for _, rise in self.rises)
