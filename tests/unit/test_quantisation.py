"""The model of what rounding costs, against all codes of each format and values from the distribution it assumes."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8console.runs.quantisation import (
    FORMATS,
    fitting_exponent,
    flushed_share,
    least_error,
    relative_error,
    rescaled_share,
)

DTYPES = {name: getattr(torch, name if name == "float16" else f"float8_{name}") for name in FORMATS}


def codes(name: str) -> np.ndarray:
    """Every finite value of a format, ascending."""
    if name == "float16":
        every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    else:
        every = torch.arange(256, dtype=torch.uint8).view(DTYPES[name])
    values = every.to(torch.float64).numpy()
    return np.unique(values[np.isfinite(values)])


@pytest.mark.parametrize("name", FORMATS)
def test_limits_are_those_of_the_codes(name: str) -> None:
    fmt, values = FORMATS[name], codes(name)
    positive = values[values > 0]
    assert fmt.max == positive[-1] and fmt.min_subnormal == positive[0]
    # Subnormals lie evenly from 0; the first normal value is where the step is about to double for the first time.
    steps = np.diff(positive)
    first = int(np.flatnonzero(steps > steps[0])[0]) - 2**fmt.mantissa_bits
    assert fmt.min_normal == positive[first]
    assert fmt.min_normal / fmt.min_subnormal == 2**fmt.mantissa_bits


def test_saturating_is_what_torchs_own_cast_does() -> None:
    for name, fmt in FORMATS.items():
        cast = torch.tensor([fmt.max * 4]).to(DTYPES[name]).to(torch.float32).item()
        if torch.__version__ >= "2.13":
            assert (cast == fmt.max) is fmt.saturates


@pytest.mark.parametrize("name", ["e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"])
def test_error_and_flushing_agree_with_rounding_to_the_codes(name: str) -> None:
    fmt, values = FORMATS[name], codes(name)
    sample = np.random.default_rng(7).standard_normal(200_000)
    edges = (values[1:] + values[:-1]) / 2
    low, high = math.log2(fmt.min_subnormal), math.log2(fmt.max)
    for exponent in np.linspace(low - 3, high - 1, 14):
        x = sample * 2**exponent
        rounded = values[np.searchsorted(edges, np.clip(x, -fmt.max, fmt.max))]
        found = np.sqrt(np.mean((rounded - x) ** 2)) / 2**exponent
        flushed = np.mean((rounded == 0) & (x != 0))
        assert relative_error(np.array([2**exponent]), fmt)[0] == pytest.approx(found, rel=0.08)
        assert flushed_share(np.array([2**exponent]), fmt)[0] == pytest.approx(flushed, abs=0.006)


@given(st.floats(1e-40, 1e38), st.sampled_from([448.0, 240.0, 57344.0, 65504.0]))
def test_the_largest_power_of_two_that_fits(amax: float, largest: float) -> None:
    # In fractions, which round nothing; quotients that are powers of two are the hard ones.
    for given_amax in (amax, math.ldexp(largest, math.frexp(amax)[1])):
        power = Fraction(2) ** fitting_exponent(given_amax, largest)
        assert Fraction(given_amax) * power <= Fraction(largest) < 2 * Fraction(given_amax) * power


def test_a_known_amax_keeps_a_full_range_from_counting_as_saturated() -> None:
    # Uniform values that just fit: all are normal, so the mantissa alone costs.
    for fmt in FORMATS.values():
        rms = np.array([fmt.max / math.sqrt(3)])
        assert relative_error(rms, fmt, fmt.max)[0] == pytest.approx(least_error(fmt), rel=0.05)
        assert relative_error(rms, fmt)[0] > 2 * least_error(fmt)
        # With an amax of twice the maximum, those beyond lose what is over it, and no more than that.
        assert least_error(fmt) < relative_error(rms, fmt, 2 * fmt.max)[0] <= relative_error(rms, fmt)[0]


def test_least_error_is_the_mantissas_alone() -> None:
    # One step of a format with m mantissa bits is 2**-m of the binade's lower end; evenly spread over it the error is
    # step / sqrt(12), and values lie between 1 and 2 times the lower end: so between 2**-m / sqrt(12) / 2 and that.
    for fmt in FORMATS.values():
        step = 2.0**-fmt.mantissa_bits / math.sqrt(12)
        assert step / 2 < least_error(fmt) < step


def test_what_is_no_size_has_no_error() -> None:
    fmt = FORMATS["e5m2"]
    odd = np.array([np.nan, np.inf, 0.0, -1.0])
    assert np.isnan(relative_error(odd, fmt)).all() and np.isnan(flushed_share(odd, fmt)).all()
    assert relative_error(np.array([1e-30, 1e30]), fmt) == pytest.approx([1.0, 1.0], abs=0.01)


def test_a_measured_share_goes_with_the_bound() -> None:
    measured = np.array([0.2, 0.2, 0.0, 1.0, np.nan])
    factor = np.array([2.0, 0.5, 2.0, 2.0, 2.0])
    modelled = np.full(5, 0.03)
    assert rescaled_share(measured, factor, modelled).tolist() == [0.1, 0.4, 0.03, 0.03, 0.03]
    assert rescaled_share(np.array([0.4]), np.array([0.01]), modelled[:1]).tolist() == [1.0]
