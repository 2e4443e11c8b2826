"""The supervisor's decisions: cadence by arithmetic, restore points by what their words say."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fp8console.supervisor import policy


@pytest.mark.parametrize(
    "budget, cost, step, age, wanted",
    [
        (0.01, 0.1, 0.02, 1000, 500),  # 0.1 s may cost 1%: each 10 s, 500 steps of 20 ms
        (0.01, 0.1, 0.02, 10, 500),
        (0.01, 1e-6, 0.001, 10, 1000),  # young: a second apart at least
        (0.01, 1e-6, 0.001, 1000, 5000),  # later: five
        (0.01, 0.001, 10.0, 1000, 1),  # a step longer than the spacing: each
        (0.0, 0.1, 0.02, 1000, 0),
        (1.0, 1.0, 0.3, 10, 4),
    ],
)
def test_cadence(budget: float, cost: float, step: float, age: float, wanted: int) -> None:
    assert policy.cadence(budget, cost, step, age) == wanted


def test_the_cost_stays_within_the_budget() -> None:
    for cost in (1e-5, 0.003, 0.7, 60.0):
        for step in (1e-4, 0.02, 3.0):
            every = policy.cadence(0.01, cost, step, 1000)
            assert cost / (every * step) <= 0.01 + 1e-12


def test_a_step_time_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="over 0"):
        policy.cadence(0.01, 0.1, 0.0, 10)


@pytest.mark.parametrize(
    "now, wanted, changing",
    [
        (100, 100, False),
        (100, 129, False),
        (100, 131, True),
        (131, 100, True),
        (0, 5, True),
        (5, 0, True),
        (0, 0, False),
    ],
)
def test_worth_changing(now: int, wanted: int, changing: bool) -> None:
    assert policy.worth_changing(now, wanted) is changing


def point(step: int, loss: float | None, healthy: bool = True, verified: bool = True) -> dict[str, Any]:
    return {"step": step, "loss": loss, "healthy": healthy, "verified": verified}


@pytest.mark.parametrize("word", ["best", "last-good"])
def test_no_points_is_said(word: str) -> None:
    assert policy.resolve_point([], word) == "there is no restore point yet"


def test_best_is_the_lowest_loss_of_the_sound_ones() -> None:
    points = [point(10, 2.0), point(20, 1.5), point(30, 1.0, healthy=False), point(40, 0.5, verified=False)]
    assert policy.resolve_point(points, "best") == 20


def test_best_of_equal_losses_is_the_newest() -> None:
    assert policy.resolve_point([point(10, 1.0), point(20, 1.0), point(15, 1.0)], "best") == 20


def test_best_without_sound_ones_takes_what_there_is() -> None:
    assert policy.resolve_point([point(10, 3.0, healthy=False), point(20, 2.0, verified=False)], "best") == 20


@pytest.mark.parametrize("loss", [None, math.nan, math.inf, -math.inf, "nan", True])
def test_a_loss_that_is_no_number_is_never_best(loss: Any) -> None:
    assert policy.resolve_point([point(10, loss)], "best") == "no restore point has a finite loss"
    assert policy.resolve_point([point(10, loss), point(20, 7.0)], "best") == 20


def test_last_good_is_the_newest_sound_one() -> None:
    points = [point(10, None), point(20, math.nan), point(30, 1.0, healthy=False), point(40, 1.0, verified=False)]
    assert policy.resolve_point(points, "last-good") == 20
    assert "no verified restore point" in str(policy.resolve_point(points[2:], "last-good"))
