"""Gradient norms against float64 references, from numbers whose squares leave float32 to sparse and complex ones."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8console.probe import norms
from fp8console.probe.norms import gradients, hypot, l2

READ = [(True, False), (True, True), (False, True)]


def value(grads: list[torch.Tensor], at_once: bool, careful: bool) -> float:
    return hypot(float(part) for part in l2(grads, at_once, careful))


def reference(grads: list[torch.Tensor]) -> float:
    total = 0.0
    for grad in grads:
        dense = grad.detach().to_dense() if grad.is_sparse else grad.detach()
        wide = dense.to(torch.complex128 if dense.is_complex() else torch.float64)
        total += float((wide.abs() ** 2).sum())
    return math.sqrt(total)


@pytest.mark.parametrize("at_once, careful", READ)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("count", [1, 3, 20])
def test_ordinary_gradients(dtype: torch.dtype, count: int, at_once: bool, careful: bool) -> None:
    torch.manual_seed(count)
    grads = [
        torch.randn(17, 5).to(dtype) if dtype.is_floating_point else torch.randn(17, 5, dtype=dtype)
        for _ in range(count)
    ]
    assert value(grads, at_once, careful) == pytest.approx(reference(grads), rel=2e-6)


@pytest.mark.parametrize("at_once, careful", READ)
@pytest.mark.parametrize("size", [1e25, 3e38, 1e-30, 1e-44])
def test_squares_that_leave_float32(size: float, at_once: bool, careful: bool) -> None:
    grads = [torch.full((100,), size), torch.full((3, 3), -size)]
    assert value(grads, at_once, careful) == pytest.approx(float(grads[0][0].double().abs()) * math.sqrt(109), rel=1e-6)


def test_late_and_not_careful_is_what_float32_gives() -> None:
    """On a device the first such step reads inf or 0; the probe then takes care for the steps that follow."""
    assert value([torch.full((4,), 1e25)], False, False) in (math.inf, pytest.approx(2e25))


@pytest.mark.parametrize(
    "dtype, size", [(torch.float16, 6e4), (torch.bfloat16, 1e30), (torch.float16, 6e-8), (torch.bfloat16, 1e-38)]
)
def test_low_precision_is_summed_wide(dtype: torch.dtype, size: float) -> None:
    grads = [torch.full((10_000,), size, dtype=dtype)]
    assert value(grads, True, False) == pytest.approx(reference(grads), rel=1e-5)


@pytest.mark.parametrize("at_once, careful", [*READ, (False, False)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_not_finite_shows(dtype: torch.dtype, bad: float, at_once: bool, careful: bool) -> None:
    grads = [torch.ones(5, dtype=dtype), torch.ones(5, dtype=dtype)]
    grads[1][2] = bad
    found = value(grads, at_once, careful)
    assert math.isnan(found) if math.isnan(bad) else found == math.inf


@pytest.mark.parametrize("at_once, careful", READ)
def test_nan_wins_over_inf(at_once: bool, careful: bool) -> None:
    grads = [torch.tensor([math.inf, 1.0]), torch.tensor([math.nan, 1.0], dtype=torch.float64)]
    assert math.isnan(value(grads, at_once, careful))
    assert math.isnan(value(grads[::-1], at_once, careful))
    assert math.isnan(value([torch.tensor([math.inf, math.nan])], at_once, careful))


def test_a_sparse_gradient_counts_each_row_once_summed() -> None:
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[2, 2, 0]]), torch.tensor([[1.0, 2.0], [2.0, 2.0], [0.0, 1.0]]), (4, 2)
    )
    assert value([sparse], True, False) == pytest.approx(math.sqrt(9 + 16 + 1))
    assert value([sparse, torch.full((2,), 2.0)], True, False) == pytest.approx(math.sqrt(34))
    assert not sparse.is_coalesced()  # the training's gradient is as it was
    empty = torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 2), (4, 2))
    assert value([empty], True, False) == 0.0


def test_mixed_kinds_are_one_norm() -> None:
    grads = [torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.float64), torch.tensor([12.0], dtype=torch.bfloat16)]
    grads.append(torch.tensor([84j], dtype=torch.complex64))
    assert value(grads, True, False) == pytest.approx(85.0)


@pytest.mark.parametrize(
    "grads", [[torch.zeros(0)], [torch.zeros(3)], [torch.tensor(0.0)], [torch.zeros(0), torch.zeros(2)]]
)
def test_nothing_is_zero(grads: list[torch.Tensor]) -> None:
    assert value(grads, True, False) == 0.0


def test_views_and_transposed_gradients() -> None:
    grads = [torch.randn(6, 4).t(), torch.randn(10)[::2], torch.randn(1, 3).expand(5, 3)]
    assert value(grads, True, False) == pytest.approx(reference(grads), rel=1e-6)


def test_gradients_that_are_part_of_a_graph_stay_out_of_ours() -> None:
    x = torch.ones(3, requires_grad=True)
    (grad,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    parts = l2([grad], False)
    assert isinstance(parts[0], torch.Tensor) and not parts[0].requires_grad
    grad.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [6.0, 6.0, 6.0]


def test_a_sharded_gradient_has_no_norm_here() -> None:
    class Sharded(torch.Tensor):
        _local_tensor = None

    assert l2([torch.ones(2).as_subclass(Sharded)], True) == []


def test_the_gradients_of_an_optimizer() -> None:
    used, frozen, left = (torch.ones(2, requires_grad=True) for _ in range(3))
    used.grad, left.grad = torch.ones(2), torch.ones(2)
    groups: Any = [{"params": [used, frozen]}, {"params": [left]}]
    optimizer = SimpleNamespace(param_groups=groups)
    assert [grad is used.grad or grad is left.grad for grad in gradients(optimizer)] == [True, True]
    assert gradients(optimizer, frozenset([id(left)])) == [used.grad]


@pytest.mark.parametrize(
    "values, wanted",
    [
        ([], 0.0),
        ([3.0, 4.0], 5.0),
        ([1e200, 1e200], math.sqrt(2) * 1e200),
        ([math.inf, 1.0], math.inf),
        ([1e-200], 1e-200),
    ],
)
def test_hypot(values: list[float], wanted: float) -> None:
    assert hypot(values) == pytest.approx(wanted, rel=1e-15) if math.isfinite(wanted) else hypot(values) == wanted


@pytest.mark.parametrize("scale", [None, 512.0])
def test_clip_in_place_brings_the_norm_to_the_limit(scale: float | None) -> None:
    torch.manual_seed(1)
    grads = [torch.randn(40, 3) * (scale or 1.0), torch.randn(7) * (scale or 1.0)]
    before = [grad.double() for grad in grads]
    wanted = math.sqrt(sum(float(grad.square().sum()) for grad in before))
    clipped = norms.clip(grads, 0.5, None if scale is None else torch.tensor(scale))
    assert clipped is not None and clipped[0].item() == pytest.approx(wanted, rel=1e-6)
    limit = 0.5 * (scale or 1.0)
    after = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))
    assert after == pytest.approx(limit, rel=1e-5)
    for was, now in zip(before, grads):
        assert torch.allclose(now.double(), was * (limit / (wanted + 1e-6)), rtol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_clip_leaves_gradients_alone_when_their_norm_is_not_finite(bad: float) -> None:
    grads = [torch.tensor([3.0, bad]), torch.tensor([4.0])]
    norms.clip(grads, 0.5, None)
    assert grads[0][0] == 3.0 and grads[1][0] == 4.0
    assert torch.equal(grads[0][1].isnan(), torch.tensor(math.isnan(bad)))


def test_clip_leaves_small_gradients_alone_and_declines_sparse_ones() -> None:
    small = [torch.tensor([0.3, 0.4])]
    norms.clip(small, 1.0, None)
    assert small[0].tolist() == pytest.approx([0.3, 0.4], rel=1e-7)
    sparse = torch.sparse_coo_tensor([[0]], [5.0], (3,))
    assert norms.clip([sparse], 1.0, None) is None and sparse.coalesce().values().item() == 5.0
