"""Counts of what casts lose, against a plain loop over the elements with the formats' values by enumeration."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_casts import DTYPES, grid, hard_values
from test_formats import every_format
from torch import nn

from fp8console.numerics.casts import fp8_grad_cast
from fp8console.numerics.counts import COUNT_FIELDS, CastCount, cast_counts
from fp8console.numerics.formats import FORMATS, Fp8Format, UnknownFormat


def counted(values: list[float], name: str) -> dict[str, float]:
    """What a count of ``values`` has to say."""
    ladder = grid(name)
    # Half-way cases go to the even code: 0 at the bottom, at the top whichever of the last two is even.
    lost_below = (ladder[0] + ladder[1]) / 2
    lost_above = (ladder[-2] + ladder[-1]) / 2
    top_is_even = (len(ladder) - 2) % 2 == 0
    result = dict.fromkeys(COUNT_FIELDS, 0.0)
    for value in values:
        result["elements"] += 1
        if not math.isfinite(value):
            result["nonfinite"] += 1
            continue
        size = abs(value)
        result["amax"] = max(result["amax"], min(size, (2 - 2**-23) * 2.0**127))
        result["nonzero"] += size != 0
        result["saturated"] += size > lost_above or (size == lost_above and not top_is_even)
        result["underflowed"] += 0 < size <= lost_below
    return result


def figures(count: CastCount) -> dict[str, float]:
    assert count.values is not None and count.values.dtype == torch.float32
    return dict(zip(COUNT_FIELDS, count.values.tolist()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", every_format())
def test_counts_are_those_of_a_loop(fmt: Fp8Format, dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, -0.0, *hard_values(fmt), math.nan, -math.inf], dtype=torch.float64).to(dtype)
    count = CastCount("", fmt)
    count.add(x)
    want = counted(x.tolist(), fmt.name)
    # float64's largest amax is rounded to float32; the others are exact.
    want["amax"] = torch.tensor(want["amax"]).item()
    assert figures(count) == want
    assert want["saturated"] and want["underflowed"] and want["nonfinite"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.floats(width=32)), max_size=4), st.sampled_from(FORMATS))
def test_counts_add_up(batches: list[list[float]], fmt: Fp8Format) -> None:
    count = CastCount("", fmt)
    for batch in batches:
        count.add(torch.tensor(batch, dtype=torch.float32))
    if not batches:
        assert count.values is None
    else:
        assert figures(count) == counted([value for batch in batches for value in batch], fmt.name)


def test_nothing_is_made_up_in_tensors_larger_than_float32_counts_exactly() -> None:
    elements = 2**24 + 3
    count = CastCount("", "e5m2")
    count.add(torch.ones(elements, dtype=torch.bfloat16))
    got = figures(count)
    assert got["elements"] == pytest.approx(elements, rel=1e-6) and got["nonzero"] == pytest.approx(elements, rel=1e-6)
    assert (got["nonfinite"], got["saturated"], got["underflowed"]) == (0, 0, 0)


def test_shape_and_layout_do_not_matter() -> None:
    x = torch.tensor([[1e6, 0.0, 1e-9], [math.nan, 2.0, -3.0]])
    for view in (x, x.t(), x[None], x.flatten()[::1], x[:, [2, 0, 1]]):
        count = CastCount("", "e5m2")
        count.add(view)
        assert figures(count) == {
            "amax": 1e6,
            "elements": 6,
            "nonzero": 4,
            "nonfinite": 1,
            "saturated": 1,
            "underflowed": 1,
        }


def test_what_is_counted_is_neither_changed_nor_tracked() -> None:
    x = torch.tensor([-1e6, math.nan, 1e-9], requires_grad=True)
    count = CastCount("", "e4m3")
    count.add(x)
    assert x.tolist()[0] == -1e6 and math.isnan(x.tolist()[1])
    assert count.values is not None and not count.values.requires_grad


def test_clear_starts_again_in_place() -> None:
    count = CastCount("", "e4m3")
    count.clear()
    assert count.values is None
    count.add(torch.ones(3))
    values = count.values
    count.clear()
    assert count.values is values and figures(count) == dict.fromkeys(COUNT_FIELDS, 0.0)


def test_an_empty_tensor_is_counted_as_nothing() -> None:
    count = CastCount("", "e4m3")
    count.add(torch.ones(0, 4))
    assert figures(count) == dict.fromkeys(COUNT_FIELDS, 0.0)


def test_counts_can_be_pickled_and_copied() -> None:
    count = CastCount("head", "e5m2fnuz")
    count.add(torch.ones(3))
    for other in (pickle.loads(pickle.dumps(count)), copy.deepcopy(count)):
        assert (other.name, other.fmt) == ("head", count.fmt) and figures(other) == figures(count)
        other.add(torch.ones(3))
        assert figures(count)["elements"] == 3 and figures(other)["elements"] == 6


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(UnknownFormat):
        CastCount("", "e6m1")


class Casting(nn.Module):
    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.grad_counts: CastCount | None = CastCount(name, "e5m2")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fp8_grad_cast(x * 1.0, "e5m2", counts=self.grad_counts)


def test_a_model_counts_what_enters_each_gradient_cast() -> None:
    first, last, plain = Casting(), Casting("named"), Casting()
    plain.grad_counts = None
    model = nn.Sequential(first, nn.ReLU(), last, plain)
    model.add_module("again", first)
    counts = cast_counts(model)
    assert [count.name for count in counts] == ["0", "named"]
    assert counts == [first.grad_counts, last.grad_counts]

    x = torch.tensor([-1.0, 2.0, 3.0], requires_grad=True)
    first_output = last(torch.relu(first(x)))
    (first_output * torch.tensor([5.0, 1e-9, 1e6])).sum().backward()
    assert figures(counts[1]) == counted([5.0, torch.tensor(1e-9).item(), 1e6], "e5m2")
    # The last cast made 0 and inf of them, and ReLU passes nothing where x was negative.
    assert figures(counts[0]) == counted([0.0, 0.0, math.inf], "e5m2")


def test_casts_with_a_scale_of_their_own_say_nothing_of_a_loss_scale() -> None:
    module = Casting()
    module.grad_counts = CastCount("", "e5m2", scaled=True)
    assert cast_counts(module) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_counting_does_not_wait_for_the_device() -> None:
    x, count = torch.randn(1000, device="cuda"), CastCount("", "e5m2")
    torch.cuda.set_sync_debug_mode("error")
    try:
        count.add(x)
        count.clear()
    finally:
        torch.cuda.set_sync_debug_mode("default")
