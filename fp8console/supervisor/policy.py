"""Decisions of the supervisor: how often snapshots are taken, and which restore point a word means. Plain functions."""

from __future__ import annotations

import math
from typing import Any

#: Seconds between snapshots at least: close together while a run is young, so that there is soon something to go back
#: to, and at most 17,000 snapshot events a day after that.
YOUNG_SECONDS = 120.0
LEAST_SPACING_YOUNG = 1.0
LEAST_SPACING = 5.0
#: A cadence is changed only when it is off by this factor: each change is a command to every rank.
TOLERANCE = 1.3


def cadence(budget: float, cost_seconds: float, step_seconds: float, age_seconds: float) -> int:
    """Steps between snapshots: their cost is at most ``budget`` of the step time, and they keep a least spacing.

    0 (none) when the budget is 0. Raises ValueError unless ``step_seconds`` is over 0.
    """
    if budget <= 0:
        return 0
    if step_seconds <= 0:
        raise ValueError("step_seconds must be over 0")
    spacing = LEAST_SPACING_YOUNG if age_seconds < YOUNG_SECONDS else LEAST_SPACING
    return max(1, math.ceil(max(cost_seconds / budget, spacing) / step_seconds))


def worth_changing(now: int, wanted: int) -> bool:
    """Whether the cadence is off by enough to send a command."""
    if now <= 0 or wanted <= 0:
        return now != wanted
    return max(now / wanted, wanted / now) > TOLERANCE


def resolve_point(points: list[dict[str, Any]], word: str) -> int | str:
    """The step that "best" or "last-good" means among the restore points, or a line on why there is none.

    A sound point was verified, and taken after 10 steps without a skip or a non-finite value. last-good: the newest
    sound one. best: the lowest loss (mean of the 20 steps before the point), among sound ones if there are any.
    """
    if not points:
        return "there is no restore point yet"
    sound = [point for point in points if point.get("healthy") and point.get("verified")]
    if word == "best":
        scored = [(point["loss"], -point["step"]) for point in sound or points if _finite(point.get("loss"))]
        return -min(scored)[1] if scored else "no restore point has a finite loss"
    if not sound:
        return "no verified restore point was taken after 10 sound steps"
    return int(max(point["step"] for point in sound))


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
