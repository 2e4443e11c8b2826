"""Packed statistics against float64 references, element by element, and against the formats' own 256 codes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fp8console.numerics.formats import E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, FORMATS, Fp8Format
from fp8console.numerics.statistics import (
    FIELDS,
    SAMPLE,
    Statistics,
    measurable,
    saturation_edge,
    statistics,
    underflow_edge,
)

BOTH_WAYS = pytest.mark.parametrize("at_once", [True, False], ids=["host", "device"])
NAN, INF = math.nan, math.inf


def rows(tensors: list[Tensor], fmt: Fp8Format, at_once: bool = True) -> list[dict[str, float]]:
    """Through ``Statistics`` itself, which takes CPU tensors either way."""
    made = Statistics(at_once)
    assert [made.add(index, tensor, fmt) for index, tensor in enumerate(tensors)] == [True] * len(tensors)
    ((keys, packed),) = made.pack()
    assert keys == list(range(len(tensors))) and packed.shape == (len(tensors), len(FIELDS))
    return [dict(zip(FIELDS, row)) for row in packed.tolist()]


def codes(fmt: Fp8Format) -> list[float]:
    """The finite magnitudes of a format, from its 256 codes."""
    values = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).double()
    return sorted({abs(value) for value in values.tolist() if math.isfinite(value)})


def rounded(x: float, grid: list[float], above: float) -> float:
    """The nearest of ``grid`` and the next value ``above`` it; of two as near the one with an even place."""
    extended = [*grid, above]
    if abs(x) >= above:
        return above
    best = min(range(len(extended)), key=lambda i: (abs(extended[i] - abs(x)), i % 2))
    return extended[best]


def reference(x: Tensor, fmt: Fp8Format) -> dict[str, float]:
    """All fields in plain Python and float64."""
    values = x.to(torch.float64).reshape(-1).tolist()
    finite = [value for value in values if math.isfinite(value)]
    nonzero = [value for value in finite if value != 0]
    grid = codes(fmt)
    above = grid[-1] + (grid[-1] - grid[-2])
    beyond = sum(rounded(value, grid, above) > fmt.max for value in finite)
    gone = sum(rounded(value, grid, above) == 0 for value in nonzero)
    return {
        "l2": math.sqrt(sum(value * value for value in values)) if len(finite) == len(values) else NAN,
        "amax": max(map(abs, finite), default=NAN),
        "mean": math.fsum(finite) / len(finite) if finite else NAN,
        "nonfinite": len(values) - len(finite),
        "elements": len(values),
        "saturated": beyond / len(values),
        "underflowed": gone / len(nonzero) if nonzero else NAN,
        "nonzero": len(nonzero) / len(values),
    }


def same(found: float, wanted: float, relative: float = 1e-5, absolute: float = 0.0) -> bool:
    if math.isnan(wanted) or math.isinf(wanted):
        return math.isnan(found) if math.isnan(wanted) else found == wanted
    return math.isclose(found, wanted, rel_tol=relative, abs_tol=absolute)


def agree(found: dict[str, float], x: Tensor, fmt: Fp8Format) -> None:
    wanted = reference(x, fmt)
    scale = wanted["amax"] if math.isfinite(wanted["amax"]) else 0.0
    for name in FIELDS:
        if name == "l2" and wanted["nonfinite"]:
            assert not math.isfinite(found["l2"])
            continue
        absolute = 1e-6 * scale if name == "mean" else 1e-7 if name in ("saturated", "underflowed", "nonzero") else 0.0
        assert same(found[name], wanted[name], absolute=absolute), (name, found[name], wanted[name])


# -- the edges, over all codes ------------------------------------------------------------------------------------
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_the_edges_are_the_casts_own(fmt: Fp8Format) -> None:
    """What is at an edge and its neighbours in float32, cast by torch and by the nearest of the codes."""
    grid = codes(fmt)
    above = grid[-1] + (grid[-1] - grid[-2])
    low, high = (torch.tensor(edge(fmt), dtype=torch.float32) for edge in (underflow_edge, saturation_edge))
    next_low = torch.nextafter(low, torch.tensor(INF))
    below_high = torch.nextafter(high, torch.tensor(0.0))
    assert low.to(fmt.dtype).float() == 0 and next_low.to(fmt.dtype).float() == fmt.min_subnormal
    assert rounded(low.item(), grid, above) == 0 and rounded(next_low.item(), grid, above) == fmt.min_subnormal
    assert rounded(below_high.item(), grid, above) == fmt.max and rounded(high.item(), grid, above) > fmt.max
    assert below_high.to(fmt.dtype).float() == fmt.max
    if fmt is not E4M3FN:  # which saturates when torch casts it
        assert not high.to(fmt.dtype).float().isfinite()


@BOTH_WAYS
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_around_every_code(fmt: Fp8Format, at_once: bool) -> None:
    grid = torch.tensor(codes(fmt), dtype=torch.float32)
    middles = (grid[1:] + grid[:-1]) / 2
    beyond = grid[-1] * torch.tensor([1.0, 1.02, 1.05, 1.07, 1.1, 2.0, 1e6])
    x = torch.cat((grid, middles, -middles * (1 + 2**-20), beyond))
    agree(rows([x], fmt, at_once)[0], x, fmt)


# -- any values ---------------------------------------------------------------------------------------------------
_VALUES = st.floats(width=32) | st.sampled_from([0.0, -0.0, NAN, INF, -INF, 448.0, 464.0, 480.0, 2.0**-17, 1e-30, 3e38])


@BOTH_WAYS
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_values_in_any_precision(at_once: bool, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    fmt = data.draw(st.sampled_from(FORMATS))
    x = torch.tensor(data.draw(st.lists(_VALUES, min_size=1, max_size=40)), dtype=torch.float64).to(dtype)
    found = rows([x], fmt, at_once)[0]
    wanted = reference(x, fmt)
    if not at_once and not 1e-18 < wanted["l2"] < 1e18:
        found["l2"] = wanted["l2"]  # a device squares in float32, and says so
    if not at_once and wanted["amax"] > 1e36:
        assert math.isnan(found["mean"]) or same(found["mean"], wanted["mean"], absolute=1e-6 * wanted["amax"])
        found["mean"] = wanted["mean"]  # and may have no sum
    agree(found, x, fmt)


@BOTH_WAYS
def test_beyond_float32(at_once: bool) -> None:
    x = torch.tensor([1e300, -1e-300, 0.0, 1.0], dtype=torch.float64)
    found = rows([x], E5M2, at_once)[0]
    assert found["amax"] == 1e300 and found["nonfinite"] == 0
    assert found["saturated"] == 0.25 and found["nonzero"] == 0.75
    assert found["underflowed"] == pytest.approx(1 / 3)


def test_finite_values_whose_squares_are_not(at_once: bool = True) -> None:
    big, small = rows([torch.tensor([3e30, 4e30]), torch.tensor([3e-30, 4e-30])], E5M2)
    assert big["l2"] == pytest.approx(5e30, rel=1e-6) and small["l2"] == pytest.approx(5e-30, rel=1e-6)


@BOTH_WAYS
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_tensors_that_are_float8_themselves(fmt: Fp8Format, at_once: bool) -> None:
    x = torch.tensor([0.5, -2.0, 3.5, 0.0], dtype=torch.float32).to(fmt.dtype)
    found = rows([x], fmt, at_once)[0]
    assert (found["amax"], found["mean"], found["saturated"], found["nonzero"]) == (3.5, 0.5, 0.0, 0.75)
    assert found["l2"] == pytest.approx(math.sqrt(0.25 + 4 + 12.25))


# -- shapes, layouts, sizes ---------------------------------------------------------------------------------------
@BOTH_WAYS
def test_any_layout_is_the_same_tensor(at_once: bool) -> None:
    torch.manual_seed(1)
    base = torch.randn(6, 4, 5, 3) * 300
    base[0, 0, 0, 0] = NAN
    layouts = [
        base,
        base.contiguous(memory_format=torch.channels_last),
        base.permute(3, 1, 0, 2),
        base[:, ::2],
        base[1:, :, 2:],
        base.flip(0),
        base[2, 1, 3, 2],  # 0-d
        base[:1].expand(6, 4, 5, 3),
        base[1, 1, 1].expand(7, 3),
        base[1, 1, 1, 1].expand(4, 4),
    ]
    for found, x in zip(rows(layouts, E4M3FN, at_once), layouts):
        agree(found, x.contiguous(), E4M3FN)


@BOTH_WAYS
def test_more_than_one_piece(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8console.numerics import statistics as module

    monkeypatch.setattr(module._Host, "piece", 1000)
    monkeypatch.setattr(module._Device, "piece", 1000)
    torch.manual_seed(2)
    x = torch.randn(2503) * 100
    x[1200], x[2400] = INF, 1e4
    agree(rows([x], E5M2, at_once)[0], x, E5M2)


@BOTH_WAYS
def test_more_tensors_than_a_block(at_once: bool) -> None:
    tensors = [torch.full((1 + index % 7,), 2.0**-index, dtype=torch.float64) for index in range(300)]
    found = rows(tensors, E5M2, at_once)
    for index, row in enumerate(found):
        assert row["amax"] == 2.0**-index and row["elements"] == 1 + index % 7
        assert row["underflowed"] == (1.0 if index >= 17 else 0.0), index


@BOTH_WAYS
def test_each_tensor_has_a_format_of_its_own(at_once: bool) -> None:
    made = Statistics(at_once)
    x = torch.tensor([300.0, 2.0**-12])
    for fmt in (E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ):
        made.add(fmt.name, x, fmt)
    ((keys, packed),) = made.pack()
    figures = {key: (row[5], row[6]) for key, row in zip(keys, packed.tolist())}
    assert figures == {"e4m3fn": (0, 0.5), "e4m3fnuz": (0.5, 0.5), "e5m2": (0, 0), "e5m2fnuz": (0, 0)}


@BOTH_WAYS
@pytest.mark.parametrize("shape", [(1000, 1024), (768, 777), (3, 500_000), (1 << 20,)])
def test_the_sample_is_spread_over_rows_and_columns(shape: tuple[int, ...], at_once: bool) -> None:
    """A share that lies in some columns, or some rows, only: a step that divides the width would see all or none."""
    x = torch.ones(shape)
    x[..., ::2] = 1e-9  # half of the columns
    if len(shape) > 1:
        x[: shape[0] // 3] = 1e-9
    wanted = float((x == 1e-9).double().mean())
    found = rows([x], E4M3FN, at_once)[0]
    # Four standard errors of a random sample of this size.
    assert abs(found["underflowed"] - wanted) < 4 * math.sqrt(wanted * (1 - wanted) / (SAMPLE / 2))


@BOTH_WAYS
def test_one_saturated_value_among_millions_is_not_passed_over(at_once: bool) -> None:
    x = torch.zeros(1 << 20)
    x[12345] = 1000.0
    found = rows([x], E4M3FN, at_once)[0]
    assert found["saturated"] == pytest.approx(2.0**-20) and found["amax"] == 1000.0


# -- what can't be measured ---------------------------------------------------------------------------------------
class Wrapper(Tensor):
    """A tensor whose values are elsewhere."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("asked for values")


class Named(Tensor):
    """A plain tensor under another name, as data libraries make them; nothing of ours may go through its own code."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"asked for {func}")


def test_what_has_no_values_here_is_unknown() -> None:
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    without = [
        torch.eye(3).to_sparse(),
        torch.empty(0),
        torch.empty(2, 0, 3),
        torch.ones(2, device="meta"),
        torch.ones(2, dtype=torch.int64),
        torch.ones(2, dtype=torch.bool),
        torch.ones(2, dtype=torch.complex64),
        torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        freed,
        Wrapper(torch.ones(2)),
        nn.parameter.UninitializedParameter(),
    ]
    made = Statistics()
    assert [made.add(0, x, E5M2) for x in without] == [False] * len(without)
    assert len(made) == 0 and made.pack() == []
    found = statistics([without[0], torch.ones(2), without[1]], E5M2)
    assert found.isnan().all(1).tolist() == [True, False, True]


def test_kinds_of_tensors_that_have_values() -> None:
    class Weight(nn.Parameter):
        pass

    with torch._C.DisableTorchFunctionSubclass():
        named = torch.ones(2).as_subclass(Named)
    for x in (nn.Parameter(torch.ones(2)), Weight(torch.ones(2)), named):
        assert rows([x], E5M2)[0]["amax"] == 1.0


def test_under_a_transform_there_is_nothing_to_read() -> None:
    seen = []

    def f(x: Tensor) -> Tensor:
        seen.append(measurable(x))
        return x.sum()

    torch.func.vmap(f)(torch.ones(3, 2))
    torch.func.grad(f)(torch.ones(2))
    assert seen == [False, False]


# -- harmless -----------------------------------------------------------------------------------------------------
@BOTH_WAYS
def test_surroundings_change_nothing(at_once: bool) -> None:
    """Under autocast, another default type, grad mode and with saved-tensor hooks: the same figures, no graph."""
    x = torch.randn(100, requires_grad=True)
    plain = rows([x], E5M2, at_once)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(pytest.fail, id):
            assert rows([x], E5M2, at_once) == plain
    finally:
        torch.set_default_dtype(torch.float32)
    state = torch.get_rng_state()
    version = x._version
    rows([x], E5M2, at_once)
    assert torch.equal(torch.get_rng_state(), state) and x._version == version and x.grad_fn is None


def test_no_tensor_is_kept() -> None:
    import gc
    import weakref

    made = Statistics(False)
    x = torch.ones(10_000)
    alive = weakref.ref(x)
    made.add("x", x, E5M2)
    del x
    gc.collect()
    assert alive() is None and len(made) == 1
