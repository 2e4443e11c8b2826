"""FP8 layers against float64 references that are written out by hand."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from test_casts import reference
from test_formats import values
from torch import Tensor, nn

from fp8console.numerics.counts import CastCount, cast_counts
from fp8console.numerics.formats import UnknownFormat
from fp8console.numerics.fp8_linear import FNUZ, GRADIENT_ONLY, OCP, Fp8Conv2d, Fp8Linear, Fp8Recipe

PAIRS = {"ocp": OCP, "fnuz": FNUZ, "gradient-only": GRADIENT_ONLY}


def rounded(x: Tensor, name: str | None, scaling: str | None, saturate: bool) -> Tensor:
    """``x`` after its cast, by enumeration."""
    if name is None:
        return x
    scale = 1.0
    if scaling == "dynamic":
        top = max(value for value in values(name) if math.isfinite(value))
        # float32, as documented; a quotient of float32 numbers is rounded right by way of float64.
        scale = torch.tensor(top / x.abs().max().float().item()).item()
    return reference(x * scale, name, saturate) / scale


def drawn(*shape: int, seed: int, size: float = 1.0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * size


@pytest.mark.parametrize("scaling", [None, "dynamic"])
@pytest.mark.parametrize("recipe", PAIRS.values(), ids=PAIRS.keys())
def test_a_linear_layer_and_its_gradients(recipe: Fp8Recipe, scaling: str | None) -> None:
    recipe = Fp8Recipe(recipe.forward_format, recipe.backward_format, scaling, scaling)
    layer = Fp8Linear(7, 5, dtype=torch.float64, recipe=recipe)
    x = drawn(2, 3, 7, seed=1, size=30).requires_grad_()
    gradient = drawn(2, 3, 5, seed=2, size=1e-4)
    output = layer(x)
    output.backward(gradient)

    cast_x = rounded(x.detach(), recipe.forward_format, scaling, True)
    cast_w = rounded(layer.weight.detach(), recipe.forward_format, scaling, True)
    cast_g = rounded(gradient, recipe.backward_format, scaling, False)
    assert layer.bias is not None
    close = {"rtol": 1e-12, "atol": 1e-15}
    torch.testing.assert_close(output, cast_x @ cast_w.T + layer.bias.detach(), **close)
    torch.testing.assert_close(x.grad, cast_g @ cast_w, **close)
    torch.testing.assert_close(layer.weight.grad, cast_g.reshape(6, 5).T @ cast_x.reshape(6, 7), **close)
    torch.testing.assert_close(layer.bias.grad, gradient.sum((0, 1)), **close)
    if recipe.forward_format is not None:
        assert not torch.allclose(output, nn.functional.linear(x, layer.weight, layer.bias), rtol=1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_a_convolution_and_its_gradients(bias: bool) -> None:
    layer = Fp8Conv2d(2, 4, 3, stride=2, padding=1, groups=2, padding_mode="reflect", bias=bias, dtype=torch.float64)
    x = drawn(3, 2, 6, 6, seed=1).requires_grad_()
    gradient = drawn(3, 4, 3, 3, seed=2)
    output = layer(x)
    output.backward(gradient)

    # The same convolution on values rounded beforehand, its output gradient rounded too.
    cast_x = rounded(x.detach(), "e4m3fn", None, True).requires_grad_()
    cast_w = rounded(layer.weight.detach(), "e4m3fn", None, True).requires_grad_()
    padded = nn.functional.pad(cast_x, (1, 1, 1, 1), mode="reflect")
    product = nn.functional.conv2d(padded, cast_w, stride=2, groups=2)
    product.backward(rounded(gradient, "e5m2", None, False))
    shift = layer.bias.detach().view(-1, 1, 1) if layer.bias is not None else 0
    torch.testing.assert_close(output, product + shift)
    torch.testing.assert_close(x.grad, cast_x.grad)
    torch.testing.assert_close(layer.weight.grad, cast_w.grad)
    if layer.bias is not None:
        torch.testing.assert_close(layer.bias.grad, gradient.sum((0, 2, 3)))


def test_delayed_scaling_uses_what_was_seen_before() -> None:
    recipe = Fp8Recipe(forward_scaling="delayed", backward_scaling="delayed", history=2)
    layer = Fp8Linear(2, 2, bias=False, dtype=torch.float64, recipe=recipe)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    x = torch.tensor([[0.0033, 7.0]], dtype=torch.float64)
    gradient = torch.tensor([[1e-7, 7.0]], dtype=torch.float64)

    def step() -> tuple[Tensor, Tensor]:
        x.grad = None
        output = layer(x.requires_grad_())
        output.backward(gradient)
        assert x.grad is not None
        return output.detach(), x.grad.clone()

    # Unscaled at first: E4M3's values near 0.0033 are multiples of 2^-9, and 1e-7 lies below E5M2's range.
    output, slope = step()
    assert output.tolist() == [[2 * 2.0**-9, 7.0]] and slope.tolist() == [[0.0, 7.0]]
    # 448 / 7 = 64: 0.2112 lies between 0.203125 and 0.21875, just beyond the middle, 0.2109375.
    # 57344 / 7 = 8192: 0.0008192 lies between 6 and 7 times 2^-13, nearer to 7.
    output, slope = step()
    assert output.tolist() == [[0.21875 / 64, 7.0]] and slope.tolist() == [[7 * 2.0**-13 / 8192, 7.0]]


def test_delayed_scaling_saturates_gradients_unless_told_otherwise() -> None:
    for saturate, result in ((None, 57344.0), (True, 57344.0), (False, math.inf)):
        recipe = Fp8Recipe(None, "e5m2", backward_scaling="delayed", backward_saturate=saturate)
        layer = Fp8Linear(1, 1, bias=False, recipe=recipe)
        nn.init.ones_(layer.weight)
        x = torch.ones(1, 1, requires_grad=True)
        layer(x).backward(torch.tensor([[1e6]]))
        assert x.grad is not None and x.grad.item() == result
    assert not OCP.saturates_gradients


def test_counts_of_each_tensor() -> None:
    layer = Fp8Linear(2, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1e-4, 2.0]]))
    layer(torch.tensor([[500.0, math.nan], [0.0, 3.0]])).sum().backward()
    got = [counts.values.tolist() for counts in (layer.input_counts, layer.weight_counts, layer.grad_counts)]
    assert got[0] == [500.0, 4, 2, 1, 1, 0]
    assert got[1] == [2.0, 2, 2, 0, 0, 1]
    assert got[2] == [1.0, 2, 2, 0, 0, 0]
    assert cast_counts(layer) == [layer.grad_counts]


def test_without_counts_and_with_a_scale_there_is_nothing_for_a_loss_scaler_to_read() -> None:
    silent = Fp8Linear(2, 2, recipe=Fp8Recipe(counts=False))
    assert silent.input_counts is silent.weight_counts is silent.grad_counts is None
    scaled = Fp8Linear(2, 2, recipe=Fp8Recipe(backward_scaling="dynamic"))
    assert isinstance(scaled.grad_counts, CastCount) and cast_counts(scaled) == []


def test_from_linear_shares_parameters_and_mode() -> None:
    plain = nn.Linear(4, 3, bias=False).eval()
    layer = Fp8Linear.from_linear(plain, Fp8Recipe(forward_scaling="delayed"))
    assert layer.weight is plain.weight and layer.bias is None and not layer.training
    assert not layer.input_scale.training and layer.input_scale.scale.device.type == "cpu"
    assert layer(torch.ones(2, 4)).shape == (2, 3)


def test_the_state_of_a_layer_survives_pickling_copying_and_state_dicts() -> None:
    recipe = Fp8Recipe(forward_scaling="delayed", backward_scaling="delayed", history=3)
    layer = Fp8Linear(4, 3, recipe=recipe)
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    layer(x).square().sum().backward()
    fresh = Fp8Linear(4, 3, recipe=recipe)
    fresh.load_state_dict(layer.state_dict())
    for other in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer), fresh):
        assert other.recipe == recipe
        assert other.grad_scale.amax_history[0] == layer.grad_scale.amax_history[0] > 0
    want = layer(x)
    for other in (pickle.loads(pickle.dumps(layer)), fresh):
        other.load_state_dict(layer.state_dict())
        layer.eval(), other.eval()
        assert torch.equal(layer(x), other(x))
    assert not torch.equal(want, Fp8Linear.from_linear(layer, recipe)(x))


def test_what_follows_may_work_in_place() -> None:
    for bias in (False, True):
        layer = Fp8Linear(3, 3, bias=bias)
        torch.relu_(layer(torch.ones(2, 3))).sum().backward()
        assert layer.weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_decides_the_dtype(dtype: torch.dtype) -> None:
    layer = Fp8Linear(3, 3)
    with torch.autocast("cpu", dtype):
        output = layer(torch.ones(2, 3))
    assert output.dtype == dtype
    output.float().sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32


def test_nothing_is_cast_on_the_way_back_when_nothing_is_learnt() -> None:
    layer = Fp8Linear(3, 3)
    with torch.no_grad():
        layer(torch.ones(2, 3))
    assert layer.grad_counts is not None and layer.grad_counts.values is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"forward_format": None, "backward_format": None}, "needs a forward_format or a backward_format"),
        ({"forward_scaling": "static"}, "forward_scaling is one of None, dynamic, delayed, not 'static'"),
        ({"backward_scaling": "static"}, "backward_scaling is one of None, dynamic, delayed, not 'static'"),
        ({"straight_through": "none"}, "straight_through is one of identity, clipped, not 'none'"),
        ({"history": 0}, "history must be 1 or more, not 0"),
        ({"margin": math.nan}, "margin is a finite number of bits, not nan"),
    ],
)
def test_a_bad_recipe_is_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Fp8Recipe(**settings)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(UnknownFormat):
        Fp8Recipe(backward_format="e6m1")


@pytest.mark.slow
def test_compiled_layers_equal_eager_ones() -> None:
    # aot_eager: traced by the compiler like any backend's, without needing a C++ compiler on the machine.
    recipe = Fp8Recipe(forward_scaling="dynamic", backward_scaling="delayed", history=2)
    layer = Fp8Linear(8, 4, recipe=recipe)
    twin = copy.deepcopy(layer)
    compiled = torch.compile(twin, backend="aot_eager")
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        for run in (layer, compiled):
            run(x).square().sum().backward()
    assert torch.equal(layer.weight.grad, twin.weight.grad)
    assert torch.equal(layer.grad_counts.values, twin.grad_counts.values)
    assert torch.equal(layer.grad_scale.amax_history, twin.grad_scale.amax_history)
