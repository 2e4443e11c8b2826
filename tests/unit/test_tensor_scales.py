"""Scales of single tensors against their formulas in plain Python."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_formats import values

from fp8console.numerics.casts import cast_through
from fp8console.numerics.formats import UnknownFormat
from fp8console.numerics.tensor_scales import DelayedScale, DynamicScale, scale_for, tensor_scale

NOT_KNOWN = (0.0, math.nan, math.inf)


def maximum(name: str) -> float:
    return max(value for value in values(name) if math.isfinite(value))


def expected(amax: float, name: str, current: float, margin: float = 0, power_of_two: bool = False) -> float:
    if amax == 0 or not math.isfinite(amax):
        return current
    scale = maximum(name) / amax / 2**margin
    if power_of_two:
        scale = 2.0 ** math.floor(math.log2(scale))
    return min(max(scale, 2.0**-126), 2.0**126)


@settings(max_examples=200, deadline=None)
@given(
    st.floats(min_value=0, width=32) | st.sampled_from(NOT_KNOWN),
    st.sampled_from(["e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"]),
    st.integers(-3, 8),
)
def test_a_scale_takes_amax_to_the_maximum(amax: float, name: str, margin: int) -> None:
    scale = scale_for(torch.tensor(amax), name, torch.tensor(3.0), margin).item()
    assert scale == pytest.approx(expected(amax, name, 3.0, margin), rel=1e-6)


@settings(max_examples=200, deadline=None)
@given(st.floats(min_value=2.0**-100, max_value=2.0**100, width=32), st.sampled_from(["e4m3fn", "e5m2"]))
def test_a_power_of_two_is_the_largest_that_fits(amax: float, name: str) -> None:
    scale = scale_for(torch.tensor(amax), name, torch.tensor(1.0), power_of_two=True).item()
    assert math.frexp(scale)[0] == 0.5
    # Products with powers of two are exact. A quotient in float32 may come out as the next power of two when amax is
    # within its rounding of it: one part in 2^24.
    assert amax * scale <= maximum(name) * (1 + 2.0**-23) and amax * scale * 2 > maximum(name)


def test_a_scale_and_its_reciprocal_are_always_normal_numbers() -> None:
    for amax in (1e-45, 1e-40, 3e38):
        for margin in (-100, 0, 100):
            scale = scale_for(torch.tensor(amax), "e5m2", torch.tensor(1.0), margin)
            assert 2.0**-126 <= scale.item() <= 2.0**126 and 2.0**-126 <= (1 / scale).item() <= 2.0**126


@pytest.mark.parametrize("amax", [1e-45, 1e-40, 2.0**-118, 2.0**-110, 3e38])
@pytest.mark.parametrize("margin", [-3, 0, 100])
def test_a_power_of_two_for_an_amax_near_the_end_of_float32_stops_at_the_bounds(amax: float, margin: int) -> None:
    given = torch.tensor(amax)
    scale = scale_for(given, "e4m3fn", torch.tensor(1.0), margin, power_of_two=True).item()
    # In float64 the quotient is finite, where float32's may be infinite or subnormal.
    assert scale == expected(given.item(), "e4m3fn", 1.0, margin, power_of_two=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_dynamic_scaling_reaches_the_maximum_and_never_passes_it(dtype: torch.dtype) -> None:
    x = (torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 1e-3).to(dtype)
    for name in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"):
        scale = DynamicScale(name).scale_of(x)
        assert scale.dtype == torch.float32 and scale.shape == ()
        cast = cast_through(x.double(), name, False, scale)
        assert cast.isfinite().all()
        assert (cast.abs().max() * scale).item() == pytest.approx(maximum(name), rel=1e-6)


@pytest.mark.parametrize("x", [[], [0.0, -0.0], [1.0, math.nan], [math.inf, 1.0]])
def test_dynamic_scaling_leaves_alone_what_has_no_magnitude(x: list[float]) -> None:
    assert DynamicScale("e4m3").scale_of(torch.tensor(x)).item() == 1


def test_delayed_scaling_follows_the_largest_of_its_history() -> None:
    amaxes = [4.0, 1.0, 2.0, 0.5, 0.0, math.nan, math.inf, 8.0, 0.25, 0.0, 0.0, 0.0, 0.0, 3.0]
    for length in (1, 2, 4):
        scaling = DelayedScale("e4m3fn", history=length, margin=1)
        seen: list[float] = []
        current = 1.0
        for amax in amaxes:
            # What counts are the casts before this one.
            current = expected(max(seen[-length:], default=0.0), "e4m3fn", current, margin=1)
            assert scaling.scale_of(torch.tensor([amax / 2, -amax])).item() == pytest.approx(current, rel=1e-6)
            seen.append(amax if math.isfinite(amax) else 0.0)


def test_delayed_scaling_stands_still_in_evaluation() -> None:
    scaling = DelayedScale("e4m3fn", history=2)
    scaling.scale_of(torch.tensor([7.0]))
    scaling.eval()
    for _ in range(3):
        assert scaling.scale_of(torch.tensor([1e5])).item() == 64
    assert scaling.amax_history.tolist() == [7, 0]


def test_a_scale_that_was_given_out_does_not_change_later() -> None:
    scaling = DelayedScale("e4m3fn", history=2)
    first = scaling.scale_of(torch.tensor([7.0]))
    scaling.scale_of(torch.tensor([7.0]))
    assert first.item() == 1


def test_the_history_is_state() -> None:
    scaling, other = DelayedScale("e5m2", history=3), DelayedScale("e5m2", history=3)
    for amax in (1.0, 2.0):
        scaling.scale_of(torch.tensor(amax))
    file = io.BytesIO()
    torch.save(scaling.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    for same in (other, copy.deepcopy(scaling)):
        assert same.scale.item() == 28672 and same.amax_history.tolist() == [2, 1, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_the_history_keeps_its_precision_when_a_model_is_converted(dtype: torch.dtype) -> None:
    scaling = DelayedScale("e4m3fn", history=2)
    scaling.scale_of(torch.tensor(123456.78))
    before = scaling.amax_history.clone()
    scaling.to(dtype)
    assert scaling.amax_history.dtype == torch.float32 and torch.equal(scaling.amax_history, before)
    assert scaling.to("meta").amax_history.device.type == "meta"
    assert scaling.to_empty(device="cpu").amax_history.device.type == "cpu"


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="scaling is one of None, dynamic, delayed, not 'static'"):
        tensor_scale("static", "e4m3")
    with pytest.raises(ValueError, match="history must be 1 or more, not 0"):
        tensor_scale("delayed", "e4m3", history=0)
    with pytest.raises(UnknownFormat):
        tensor_scale("dynamic", "e6m1")
    assert tensor_scale(None, "e4m3") is None
