"""Casts through FP8 against a reference that picks the nearest of the format's values in exact arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_formats import decode, every_format, values

from fp8console.numerics.casts import cast_through, fp8_cast, fp8_grad_cast
from fp8console.numerics.counts import CastCount
from fp8console.numerics.formats import FORMATS, Fp8Format, UnknownFormat

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def grid(name: str) -> list[float]:
    """The format's values from 0 up, by code, and what would follow its maximum were there one code more."""
    ladder = [value for value in values(name)[:128] if math.isfinite(value)]
    return [*ladder, 2 * ladder[-1] - ladder[-2]]


def reference(x: torch.Tensor, name: str, saturate: bool) -> torch.Tensor:
    """float64 rounded to nearest, ties to the even code; beyond the maximum as the format says.

    Exact: the points halfway between neighbours have a few bits each, so comparing with them rounds nothing.
    """
    ladder = torch.tensor(grid(name), dtype=torch.float64)
    halfway = (ladder[1:] + ladder[:-1]) / 2
    magnitude = x.abs()
    below = torch.searchsorted(halfway, magnitude, right=False)  # ties go down ...
    above = torch.searchsorted(halfway, magnitude, right=True)  # ... or up
    code = torch.where(below % 2 == 0, below, above)
    beyond = math.inf if name == "e5m2" else math.nan
    top = ladder[-2].item()
    rounded = torch.cat((ladder[:-1], torch.tensor([top if saturate else beyond], dtype=torch.float64)))[code]
    rounded = torch.copysign(rounded, x)
    if name.endswith("fnuz"):
        rounded = torch.where(rounded == 0, 0.0, rounded)
    return torch.where(x.isnan(), x, rounded)


def assert_cast(x: torch.Tensor, fmt: Fp8Format, saturate: bool) -> None:
    """``x`` through ``fmt`` is the reference's result, signs of zeros and infinities included."""
    cast = cast_through(x, fmt, saturate)
    assert cast.dtype == x.dtype and cast.shape == x.shape
    got, want = cast.double(), reference(x.double(), fmt.name, saturate)
    same = (got == want) & (got.signbit() == want.signbit()) | (got.isnan() & want.isnan())
    wrong = [
        f"{a!r} -> {b!r}, not {c!r}" for a, b, c in zip(x[~same].tolist(), got[~same].tolist(), want[~same].tolist())
    ]
    assert not wrong, wrong[:10]


def hard_values(fmt: Fp8Format) -> list[float]:
    """Every value of the format, every tie between two, their neighbours in float64, and what lies outside."""
    ladder = grid(fmt.name)
    ties = [(a + b) / 2 for a, b in zip(ladder, ladder[1:])]
    points = [*ladder, *ties, fmt.min_subnormal / 4, 1e-45, 5e-324, 1e30, 3e38]
    near = [math.nextafter(point, to) for point in points for to in (0.0, math.inf)]
    positive = [*points, *near, math.inf]
    return [*positive, *(-value for value in positive), math.nan]


@pytest.mark.parametrize("saturate", [False, True], ids=["as-defined", "saturating"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", every_format())
def test_rounds_to_the_nearest_value_of_the_format(fmt: Fp8Format, dtype: torch.dtype, saturate: bool) -> None:
    x = torch.tensor(hard_values(fmt), dtype=torch.float64).to(dtype)
    assert_cast(x, fmt, saturate)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fmt", every_format())
def test_all_sixteen_bit_inputs(fmt: Fp8Format, dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for saturate in (False, True):
        assert_cast(x, fmt, saturate)


@settings(max_examples=200, deadline=None)
@given(st.floats(), st.sampled_from(FORMATS), st.booleans())
def test_any_float64(x: float, fmt: Fp8Format, saturate: bool) -> None:
    assert_cast(torch.tensor([x], dtype=torch.float64), fmt, saturate)


@pytest.mark.parametrize(
    ("name", "last_kept", "first_lost"),
    # Halfway between the maximum and what would follow is a tie: it goes to the even one of the two.
    [
        ("e4m3fn", 464.0, math.nextafter(464, math.inf)),
        ("e5m2", math.nextafter(61440, 0), 61440.0),
        ("e4m3fnuz", math.nextafter(248, 0), 248.0),
        ("e5m2fnuz", math.nextafter(61440, 0), 61440.0),
    ],
)
def test_where_overflow_begins(name: str, last_kept: float, first_lost: float) -> None:
    kept, lost = cast_through(torch.tensor([last_kept, first_lost], dtype=torch.float64), name).tolist()
    top = max(value for value in values(name) if math.isfinite(value))
    assert kept == top
    assert not math.isfinite(lost)


def test_the_maximum_takes_the_place_of_infinity_only_when_saturating() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan])
    saturated = cast_through(x, "e5m2", saturate=True)
    assert saturated[:2].tolist() == [57344.0, -57344.0] and math.isnan(saturated[2])
    kept = cast_through(x, "e5m2")
    assert kept[:2].tolist() == [math.inf, -math.inf] and math.isnan(kept[2])
    assert cast_through(x, "e4m3fn").isnan().all()


@pytest.mark.parametrize("fmt", every_format())
def test_casting_twice_changes_nothing_more(fmt: Fp8Format) -> None:
    once = cast_through(torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 30, fmt)
    assert torch.equal(cast_through(once, fmt), once)
    assert set(once.tolist()) <= {decode(fmt.name, code) for code in range(256)}


@pytest.mark.parametrize("shape", [(), (0,), (3, 4), (2, 0, 5)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    assert cast_through(torch.ones(shape), "e5m2").shape == shape


def test_integers_and_unknown_formats_are_refused() -> None:
    with pytest.raises(TypeError, match="floating-point"):
        cast_through(torch.arange(3), "e5m2")
    with pytest.raises(UnknownFormat):
        fp8_grad_cast(torch.ones(3), "e6m1")


def through_backward(gradient: torch.Tensor, fmt: Fp8Format | str, saturate: bool) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.zeros_like(gradient).requires_grad_()
    y = fp8_grad_cast(x, fmt, saturate)
    y.backward(gradient)
    assert x.grad is not None
    return y, x.grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", every_format())
def test_forward_is_the_identity_and_backward_casts(fmt: Fp8Format, dtype: torch.dtype) -> None:
    gradient = torch.tensor(hard_values(fmt), dtype=torch.float64).to(dtype)
    for saturate in (False, True):
        y, got = through_backward(gradient, fmt, saturate)
        assert torch.equal(y, torch.zeros_like(y)) and got.dtype == dtype
        assert torch.equal(got.nan_to_num(nan=7e4), cast_through(gradient, fmt, saturate).nan_to_num(nan=7e4))


def test_forward_keeps_every_bit() -> None:
    x = torch.tensor([1.0000001, math.nan, math.inf, -0.0, 1e-40], requires_grad=True)
    y = fp8_grad_cast(x, "e4m3")
    assert torch.equal(y.detach().view(torch.int32), x.detach().view(torch.int32))


def test_a_scaler_sees_an_overflow_only_when_not_saturating() -> None:
    for saturate, skipped in ((False, True), (True, False)):
        weight = torch.ones(4, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        scaler.scale(fp8_grad_cast(weight * 1.0, "e4m3", saturate).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert (scaler.get_scale() < 2.0**16) is skipped
        assert torch.equal(weight.detach(), torch.ones(4)) is skipped


def test_under_autocast_the_gradient_is_cast_in_its_own_dtype() -> None:
    layer = torch.nn.Linear(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        output = fp8_grad_cast(layer(torch.ones(2, 8)), "e5m2")
    assert output.dtype == torch.bfloat16
    output.float().square().sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("saturate", [False, True], ids=["as-defined", "saturating"])
@pytest.mark.parametrize("name", ["e5m2", "e4m3fn"])
def test_compiled_backward_equals_eager(name: str, saturate: bool) -> None:
    # aot_eager: traced by the compiler like any backend's, without needing a C++ compiler on the machine.
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return fp8_grad_cast(x * 3, name, saturate)

    compiled = torch.compile(scaled, backend="aot_eager")
    gradient = torch.tensor([1.07, 465.0, -70000.0, math.inf, math.nan, 0.0, 3e-9])
    results = []
    for run in (scaled, compiled):
        x = torch.ones(7, requires_grad=True)
        run(x).backward(gradient)
        assert x.grad is not None
        results.append(x.grad.nan_to_num(nan=-1.0, posinf=-2.0, neginf=-3.0))
    assert torch.equal(results[0], results[1])


def test_a_gradient_that_was_cast_can_be_differentiated_straight_through() -> None:
    """A gradient penalty: d|dy/dx|^2/dw through the cast, which counts as the identity there."""
    w = torch.tensor([0.5, -1.25], requires_grad=True)
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = fp8_grad_cast(w * x, "e5m2").sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    slope.square().sum().backward()
    # dy/dx = w * cast(1) = w, so the penalty is w^2 and its derivative 2 w: 1 is a value of the format.
    assert w.grad is not None and w.grad.tolist() == [1.0, -2.5]


@pytest.mark.parametrize("fmt", every_format())
def test_every_code_is_kept_and_counts_as_in_range(fmt: Fp8Format) -> None:
    codes = torch.tensor([value for value in values(fmt.name) if math.isfinite(value)])
    count = CastCount("", fmt)
    for saturate in (False, True):
        assert torch.equal(cast_through(codes, fmt, saturate, counts=count), codes)
    assert count.values is not None
    assert count.values[3:].tolist() == [0, 0, 0]


@pytest.mark.parametrize("scale", [2.0**-9, 0.3, 1.0, 700.0])
@pytest.mark.parametrize("fmt", every_format())
def test_a_scale_moves_the_grid(fmt: Fp8Format, scale: float) -> None:
    x = torch.randn(500, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 100
    want = reference(x * scale, fmt.name, saturate=True) / scale
    assert torch.equal(cast_through(x, fmt, True, scale), want)
    assert torch.equal(cast_through(x, fmt, True, torch.tensor(scale, dtype=torch.float64)), want)
    count = CastCount("", fmt)
    cast_through(x, fmt, True, scale, count)
    assert count.values is not None
    # Counted as they enter the cast, so with the scale.
    assert count.values[0].item() == pytest.approx((x.abs().max() * scale).item(), rel=1e-6)
    assert count.values[4].item() == (x.abs() * scale > grid(fmt.name)[-2] + 0.5 * fmt.spacing_at_max).sum().item()


def test_a_scale_by_a_power_of_two_rounds_nothing_in_sixteen_bits() -> None:
    x = torch.randn(500, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    scale = torch.tensor(2.0**7)
    assert torch.equal(cast_through(x, "e4m3", True, scale) * 128, cast_through(x * 128, "e4m3", True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", every_format())
def test_a_forward_cast_is_straight_through(fmt: Fp8Format, dtype: torch.dtype) -> None:
    x = torch.tensor(hard_values(fmt), dtype=torch.float64).to(dtype).requires_grad_()
    gradient = torch.arange(len(x), dtype=torch.float64).to(dtype)
    y = fp8_cast(x, fmt)
    assert torch.equal(y.nan_to_num(nan=7e4), cast_through(x, fmt, True).nan_to_num(nan=7e4))
    y.backward(gradient)
    assert x.grad is not None and torch.equal(x.grad, gradient)


@pytest.mark.parametrize("scale", [None, 4.0])
@pytest.mark.parametrize("saturate", [False, True], ids=["as-defined", "saturating"])
@pytest.mark.parametrize("fmt", every_format())
def test_the_clipped_variant_passes_nothing_beyond_the_maximum(
    fmt: Fp8Format, saturate: bool, scale: float | None
) -> None:
    x = torch.tensor(hard_values(fmt), dtype=torch.float64).requires_grad_()
    fp8_cast(x, fmt, saturate, scale, straight_through="clipped").sum().backward()
    kept = reference(x.detach() * (scale or 1), fmt.name, saturate=False).isfinite()
    assert x.grad is not None and torch.equal(x.grad, kept.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fmt", every_format())
def test_the_clipped_variant_judges_the_value_that_is_cast(fmt: Fp8Format, dtype: torch.dtype) -> None:
    # The product of x and 8 bits is exact in float32 and in float64, but not in the 16 bits of x.
    scale = 155.0
    top = grid(fmt.name)[-2] + fmt.spacing_at_max / 2
    x = (torch.linspace(0.97, 1.03, 501, dtype=torch.float64) * top / scale).to(dtype).requires_grad_()
    y = fp8_cast(x, fmt, False, scale, straight_through="clipped")
    y.backward(torch.ones_like(y))
    kept = reference(x.detach().double() * scale, fmt.name, saturate=False).isfinite()
    assert 0 < kept.sum() < len(kept)
    assert x.grad is not None and x.grad.dtype == dtype and torch.equal(x.grad, kept.to(dtype))


def test_other_straight_through_variants_are_refused() -> None:
    with pytest.raises(ValueError, match="straight_through is one of identity, clipped, not 'clip'"):
        fp8_cast(torch.ones(2), "e4m3", straight_through="clip")


def test_a_forward_cast_can_be_differentiated_twice() -> None:
    x = torch.tensor([1.1, 500.0], requires_grad=True)
    y = (fp8_cast(x, "e4m3", straight_through="clipped") * x).sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    slope.sum().backward()
    # y = cast(x) x: dy/dx = cast(x) + s x, with s 1 and, beyond the maximum, 0; differentiated again: 2 s.
    assert slope.tolist() == pytest.approx([1.125 + 1.1, 448.0]) and x.grad is not None and x.grad.tolist() == [2, 0]


class _Halving:
    def scale_of(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tensor(0.5)


def test_a_gradient_cast_can_have_a_scale_and_counts() -> None:
    count = CastCount("", "e4m3")
    x = torch.zeros(3, requires_grad=True)
    fp8_grad_cast(x, "e4m3", False, count, _Halving()).backward(torch.tensor([810.0, 1.3, 1000.0]))
    assert x.grad is not None and x.grad[:2].tolist() == [832.0, 1.25] and math.isnan(x.grad[2])  # halved: 416, 0.625
    assert count.values is not None and count.values.tolist() == [500.0, 3, 3, 0, 1, 0]


def test_counting_changes_no_bit() -> None:
    gradient = torch.tensor(hard_values(FORMATS[0]), dtype=torch.float32)
    results = []
    for counts in (None, CastCount("", FORMATS[0])):
        x = torch.zeros_like(gradient).requires_grad_()
        fp8_grad_cast(x, FORMATS[0], counts=counts).backward(gradient)
        assert x.grad is not None
        results.append(x.grad.view(torch.int32))
    assert torch.equal(*results)
