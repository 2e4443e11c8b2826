from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from fp8console.console.widgets.envelope import Dots, Envelope, Window, bin_size, dots_of, window


class Columns:
    """Step records in memory."""

    def __init__(self, values: NDArray[np.float64], known: NDArray[np.bool_] | None = None) -> None:
        self.values = values
        self.is_known = np.ones(len(values), bool) if known is None else known

    def column(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[np.float64]:
        return self.values[start:stop]

    def known(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[np.bool_]:
        return self.is_known[start:stop]


def drawn(columns: Columns, count: int, dots: int, share: float = 1.0, hold: bool = False) -> Dots:
    envelope = Envelope("loss")
    shown = window(count, share)
    envelope.update(columns, count, shown, dots)
    return dots_of(envelope, shown, dots, hold)


@pytest.mark.parametrize("share", [1.0, 0.1, 0.01])
def test_growing_piece_by_piece_draws_the_same_as_all_at_once(share: float) -> None:
    random = np.random.default_rng(0)
    values = random.normal(size=30_000)
    values[random.integers(0, 30_000, 40)] = np.nan
    values[random.integers(0, 30_000, 40)] = np.inf
    columns, grown, count = Columns(values), Envelope("loss"), 0
    while count < 30_000:
        count = min(30_000, count + int(random.integers(1, 700)))
        shown = window(count, share)
        grown.update(columns, count, shown, 140)
        now, fresh = dots_of(grown, shown, 140), drawn(columns, count, 140, share)
        np.testing.assert_array_equal(now.low, fresh.low)
        np.testing.assert_array_equal(now.high, fresh.high)
        np.testing.assert_array_equal(now.bad, fresh.bad)


def test_no_spike_and_no_nan_is_lost_among_a_million_steps() -> None:
    values = np.full(1_000_000, 2.0)
    values[123_456], values[777_777], values[500_000] = 9.5, -4.0, np.nan
    dots = drawn(Columns(values), 1_000_000, 180)
    assert np.nanmax(dots.high) == 9.5
    assert np.nanmin(dots.low) == -4.0
    assert dots.bad.sum() == 1


def test_unknown_is_a_gap_but_no_alert() -> None:
    values = np.array([1.0, 2.0, np.nan, np.nan, 3.0])
    known = np.array([True, True, False, True, True])
    dots = drawn(Columns(values, known), 5, 64)
    assert dots.bad.sum() == 1
    assert np.isnan(dots.low).sum() > 2


def test_few_steps_are_joined_but_not_across_a_gap() -> None:
    dots = drawn(Columns(np.array([1.0, 2.0, np.nan, 4.0, 5.0])), 5, 320)
    place = [(2 * index + 1) * 320 // 64 for index in range(5)]
    assert np.isfinite(dots.low[place[0] : place[1] + 1]).all()
    assert np.isnan(dots.low[place[1] + 1 : place[3]]).all()
    assert np.isfinite(dots.low[place[3] : place[4] + 1]).all()


def test_hold_draws_steps_instead_of_slopes() -> None:
    dots = drawn(Columns(np.array([8.0, 4.0])), 2, 320, hold=True)
    assert set(dots.low[np.isfinite(dots.low)].tolist()) == {8.0, 4.0}


def test_a_live_axis_moves_seldom() -> None:
    stops = [window(count).stop for count in range(4_000, 4_100)]
    assert len(set(stops)) <= 2
    assert all(stop > count for stop, count in zip(stops, range(4_000, 4_100)))


def test_an_ended_axis_ends_at_the_last_record() -> None:
    assert window(4_210, ended=True) == Window(0, 4_210)
    assert window(0, ended=True).length == 1


@pytest.mark.parametrize("length", [1, 31, 32, 200, 4_096, 1_000_000, 10_000_000])
def test_two_to_four_bins_a_dot(length: int) -> None:
    size = bin_size(length, 180)
    assert size == 1 or 2 <= length / size / 180 <= 4
