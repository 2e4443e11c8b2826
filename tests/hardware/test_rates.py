"""Rates out of counters: shares of time, bytes a second, and what is no rate."""

from __future__ import annotations

import pytest

from fp8console.hardware.gpu import Counters
from fp8console.hardware.rates import Rates

WRAP = 1 << 32


def two(before: Counters, after: Counters, seconds: float = 1.0) -> dict:
    rates = Rates()
    rates.of("gpu", before, 100.0)
    return rates.of("gpu", after, 100.0 + seconds)


def test_the_share_is_the_residency_over_the_cycles() -> None:
    before = Counters(cycles=1000, power=10, thermal=(5, 7, 9), hbm=0, wrap=WRAP)
    after = Counters(cycles=2000, power=260, thermal=(5, 107, 59), hbm=1000, wrap=WRAP)
    assert two(before, after) == {"throttle": {"power": 0.25, "thermal": 0.1, "hbm": 1.0}}


def test_the_first_sample_has_no_rate_and_a_gpu_without_counters_has_none_ever() -> None:
    rates = Rates()
    first = Counters(cycles=1, power=1, hbm=1, wrap=WRAP, xgmi_read=1, xgmi_write=1)
    assert rates.of("a", first, 1.0) == {"throttle": None, "xgmi_read_bytes_s": None, "xgmi_write_bytes_s": None}
    assert rates.of("b", None, 1.0) == {}
    assert rates.of("c", Counters(), 1.0) == {} == rates.of("c", Counters(), 2.0)


def test_counters_of_32_bits_that_start_again_from_0() -> None:
    before = Counters(cycles=WRAP - 100, power=WRAP - 10, thermal=(3,), hbm=4, wrap=WRAP)
    after = Counters(cycles=300, power=90, thermal=(3,), hbm=4, wrap=WRAP)
    assert two(before, after)["throttle"] == {"power": 0.25, "thermal": 0.0, "hbm": 0.0}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # A reset by the driver: it seems to have gone round nearly once.
        (Counters(cycles=5000, power=100, hbm=1, wrap=WRAP), Counters(cycles=10, power=0, hbm=0, wrap=WRAP)),
        # The firmware did not count on.
        (Counters(cycles=5000, power=100, hbm=1, wrap=WRAP), Counters(cycles=5000, power=100, hbm=1, wrap=WRAP)),
        # Counters that come and go.
        (Counters(cycles=5000, power=None, hbm=None, wrap=WRAP), Counters(cycles=6000, power=3, hbm=3, wrap=WRAP)),
    ],
)
def test_no_share_rather_than_a_wrong_one(before: Counters, after: Counters) -> None:
    assert two(before, after)["throttle"] is None


def test_one_kind_unknown_leaves_the_others() -> None:
    before = Counters(cycles=0, power=0, thermal=(None, 0), hbm=None, wrap=WRAP)
    after = Counters(cycles=100, power=500, thermal=(None, 50), hbm=None, wrap=WRAP)
    # More time throttled than time: that counter is broken.
    assert two(before, after)["throttle"] == {"power": None, "thermal": 0.5, "hbm": None}


def test_two_counters_read_not_quite_at_once_make_no_more_than_1() -> None:
    before, after = Counters(cycles=0, power=0, wrap=WRAP), Counters(cycles=1000, power=1010, wrap=WRAP)
    assert two(before, after)["throttle"] == {"power": 1.0, "thermal": None, "hbm": None}


def test_bytes_a_second_over_the_time_that_passed() -> None:
    before, after = Counters(xgmi_read=1000, xgmi_write=0, pcie=7), Counters(xgmi_read=5000, xgmi_write=0, pcie=9)
    assert two(before, after, 2.0) == {"xgmi_read_bytes_s": 2000.0, "xgmi_write_bytes_s": 0.0, "pcie_bytes_s": 1.0}


def test_a_data_counter_that_went_back_is_unknown_once() -> None:
    rates = Rates()
    found = [rates.of("gpu", Counters(xgmi_read=value), at)["xgmi_read_bytes_s"] for at, value in enumerate((9, 1, 21))]
    assert found == [None, None, 20.0]


def test_gpus_do_not_mix() -> None:
    rates = Rates()
    rates.of("a", Counters(xgmi_read=0), 0.0)
    rates.of("b", Counters(xgmi_read=1000), 0.0)
    assert rates.of("a", Counters(xgmi_read=10), 1.0) == {"xgmi_read_bytes_s": 10.0}
    assert rates.of("b", Counters(xgmi_read=1000), 1.0) == {"xgmi_read_bytes_s": 0.0}
