"""What Fp8GradScaler measures, against float64, with all kinds of optimizer; without a sync or a model kept alive."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from typing import Any

import pytest
import torch
from test_scaler import batch, counting_model, loss_of, plain_model, sgd, train
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fp8console.numerics import scaling_rules
from fp8console.numerics.convert import convert
from fp8console.numerics.fp8_linear import Fp8Recipe
from fp8console.numerics.scaler import Fp8GradScaler

E5M2_MAX = 57344.0


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """What each update saw, as numbers."""
    steps: list[dict[str, float]] = []
    advance = scaling_rules.advance

    def spy(state: Any, what: Any, settings: Any) -> Any:
        steps.append({name: float(value) for name, value in what._asdict().items()})
        return advance(state, what, settings)

    monkeypatch.setattr(scaling_rules, "advance", spy)
    return steps


def output_gradients(net: nn.Module, micro_batches: int, scale: float) -> list[Tensor]:
    """Scaled gradients of the outputs of the linear layers, in float64, by asking autograd for each."""
    outputs: list[Tensor] = []
    layers = [layer for layer in net.modules() if isinstance(layer, nn.Linear)]
    handles = [layer.register_forward_hook(lambda module, inputs, output: outputs.append(output)) for layer in layers]
    loss = sum(loss_of(net, index) * scale for index in range(micro_batches))
    for handle in handles:
        handle.remove()
    assert isinstance(loss, Tensor)
    return [grad.double() for grad in torch.autograd.grad(loss, outputs)]


@pytest.mark.parametrize("scale", [1.0, 2.0**10, 2.0**20, 2.0**26])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("counting", [False, True])
def test_measured_is_what_float64_says(
    counting: bool, micro_batches: int, scale: float, seen: list[dict[str, float]]
) -> None:
    """Largest magnitude over all layers, the worst layer's shares, over all micro-batches, loss scale included."""
    net = counting_model() if counting else plain_model()
    wanted = output_gradients(plain_model(), micro_batches, scale)
    scaler = Fp8GradScaler("cpu", init_scale=scale)
    scaler.watch(net)
    optimizer = sgd(net)
    for step in range(2):  # the second starts its counts anew
        scaler._scale = None if scaler._scale is None else scaler._scale.fill_(scale)
        before = copy.deepcopy(net.state_dict())
        for index in range(micro_batches):
            scaler.scale(loss_of(net, index)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        net.load_state_dict(before)
        sizes = torch.cat([grad.abs().reshape(-1) for grad in wanted])
        if counting and (sizes > E5M2_MAX).any():
            # Layers below one whose gradient became inf see NaN: only the topmost is known.
            assert seen[step]["found_inf"] == 1 and seen[step]["saturated"] > 0 and seen[step]["amax"] > 1
            continue
        assert seen[step]["amax"] == pytest.approx(sizes.max().item() / E5M2_MAX, rel=0.15 if counting else 1e-5)
        saturated, underflowed = 0.0, 0.0
        for layer in range(2):
            own = torch.cat([grad.abs().reshape(-1) for grad in wanted[layer::2]])
            nonzero = max(1, (own > 0).sum().item())
            # 61440, half-way to the next, is the first that overflows; 2^-17, half of the least, the last made 0.
            saturated = max(saturated, (own >= 61440).sum().item() / nonzero)
            underflowed = max(underflowed, ((own <= 2.0**-17) & (own > 0)).sum().item() / nonzero)
        tolerance = 0.02 if counting else 1e-6  # a cast above changes what comes to the layer below
        assert seen[step]["saturated"] == pytest.approx(saturated, abs=tolerance)
        assert seen[step]["underflowed"] == pytest.approx(underflowed, abs=tolerance)


def test_a_small_layer_that_is_flushed_whole_asks_for_growth(seen: list[dict[str, float]]) -> None:
    """100,000 sound values beside ten that are all below half of E5M2's least: a hundredth of a percent of them."""
    net = plain_model()
    scaler = Fp8GradScaler("cpu", init_scale=1.0)
    scaler.watch(net)
    optimizer = sgd(net)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(net, 0)).backward()
        large, small = scaler._counts
        for count, values in ((large, torch.full((100_000,), 1e-2)), (small, torch.full((10,), 2.0**-18))):
            count.clear()
            count.add(values * scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
    assert seen[0]["underflowed"] == 1.0
    # 57344 / 0.01 is 2^22.5: with a margin of 3 bits 2^19 is the most that fits.
    assert scaler.get_scale() == 2.0**19


def test_headroom_is_that_of_what_was_measured(seen: list[dict[str, float]]) -> None:
    net = plain_model()
    scaler = Fp8GradScaler("cpu", init_scale=64.0)
    assert scaler.figures()["headroom"] is None
    scaler.watch(net)
    train(scaler, net, sgd(net), 1)
    figures = scaler.figures()
    amax = max(grad.abs().max().item() for grad in output_gradients(plain_model(), 1, 1.0))
    assert figures["typical"] == pytest.approx(math.log2(amax / E5M2_MAX), abs=1e-4)
    assert figures["headroom"] == pytest.approx(-math.log2(amax * figures["scale"] / E5M2_MAX), abs=1e-4)


def test_it_comes_down_from_saturation_that_no_inf_tells() -> None:
    """E4M3 saturates: torch's scaler sees no inf and stays where 2 of 3 values or more are at the maximum."""
    scales = []
    for scaler in (Fp8GradScaler("cpu", init_scale=2.0**24, fmt="e4m3fn"), torch.amp.GradScaler("cpu", 2.0**24)):
        net = counting_model("e4m3fn", saturate=True)
        if isinstance(scaler, Fp8GradScaler):
            scaler.watch(net)
        scales.append(train(scaler, net, sgd(net), 30))
    assert scales[1] == [2.0**24] * 30
    assert scales[0][-1] <= 2.0**16
    headroom = 448 / max(grad.abs().max().item() for grad in output_gradients(counting_model(), 1, scales[0][-1]))
    assert headroom > 2.0


# -- what is watched -----------------------------------------------------------------------------------------------
def test_watching_anew_replaces_and_unwatch_ends_it(seen: list[dict[str, float]]) -> None:
    nets = [plain_model(0), counting_model(seed=1), plain_model(2)]
    scaler = Fp8GradScaler("cpu")
    scaler.watch(nets[0], nets[1])
    amax = []
    for watched in (None, (nets[2],), ()):
        if watched is not None:
            scaler.watch(*watched) if watched else scaler.unwatch()
        for net in nets:
            train(scaler, net, sgd(net), 1)
        amax.append([step["amax"] > 0 for step in seen[-3:]])
    assert amax == [[True, True, False], [False, False, True], [False, False, False]]
    for net in nets:
        assert not any(layer._forward_hooks for layer in net.modules())


def test_a_model_without_layers_is_refused_and_the_watch_goes_on(seen: list[dict[str, float]]) -> None:
    net = plain_model()
    scaler = Fp8GradScaler("cpu")
    scaler.watch(net)
    with pytest.raises(ValueError, match="Tanh has no layer to measure"):
        scaler.watch(plain_model(1), nn.Tanh())
    train(scaler, net, sgd(net), 1)
    assert seen[-1]["amax"] > 0


def test_counts_of_a_scale_that_was_replaced_do_not_reach_the_next_step(seen: list[dict[str, float]]) -> None:
    net = plain_model()
    scaler = Fp8GradScaler("cpu", "pytorch", margin=3.0, init_scale=2.0**30)
    scaler.watch(net)
    optimizer = sgd(net)
    scaler.scale(loss_of(net)).backward()
    scaler.update(1.0)
    optimizer.zero_grad()
    scaler.scale(loss_of(net)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert 0 < seen[-1]["amax"] < 2.0**-10


def test_a_watched_model_is_copied_and_pickled_as_any_other(seen: list[dict[str, float]]) -> None:
    net = plain_model()
    scaler = Fp8GradScaler("cpu")
    scaler.watch(net)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        train(torch.amp.GradScaler("cpu", init_scale=2.0**30), other, sgd(other), 1)  # not into our counts
    train(scaler, net, sgd(net), 1)
    assert 0 < seen[-1]["amax"] < 2.0**-10


def test_a_dropped_model_is_not_kept() -> None:
    scaler = Fp8GradScaler("cpu")
    for make in (plain_model, counting_model):
        net = make()
        scaler.watch(net)
        train(scaler, net, sgd(net), 2)
        gone = [weakref.ref(net), *map(weakref.ref, net.parameters())]
        del net
        gc.collect()
        assert [ref() for ref in gone] == [None] * len(gone)


def test_memory_does_not_grow_with_steps() -> None:
    scaler, net = Fp8GradScaler("cpu", growth_interval=3), plain_model()
    scaler.watch(net)
    optimizer = sgd(net)

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(item), Tensor) for item in gc.get_objects())

    train(scaler, net, optimizer, 5, bad=(2,))
    before = tensors()
    train(scaler, net, optimizer, 60, bad=(7, 8, 9, 10, 11, 30))
    assert tensors() <= before
    assert all(not tensor.requires_grad for tensor in scaler._state())


# -- optimizers ----------------------------------------------------------------------------------------------------
def test_two_optimizers_and_either_ones_overflow(seen: list[dict[str, float]]) -> None:
    nets = plain_model(0), plain_model(1)
    optimizers = sgd(nets[0]), sgd(nets[1])
    scaler = Fp8GradScaler("cpu", "pytorch")
    for step in range(6):
        for net, optimizer in zip(nets, optimizers):
            optimizer.zero_grad()
            scaler.scale(loss_of(net, step)).backward()
        if step >= 4:
            nets[step - 4][0].weight.grad[0, 0] = math.nan  # type: ignore[union-attr, index]
        before = [copy.deepcopy(net.state_dict()) for net in nets]
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        moved = [not torch.equal(net[0].weight, old["0.weight"]) for net, old in zip(nets, before)]  # type: ignore
        assert moved == [step != 4, step != 5]
    assert [step["found_inf"] > 0 for step in seen] == [False] * 4 + [True] * 2
    assert scaler.get_scale() == 65536.0 / 4


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD], ids=["AdamW", "SGD"])
def test_a_fused_optimizer_skips_inside_and_we_know(make: Any, seen: list[dict[str, float]]) -> None:
    net, other = plain_model(), plain_model()
    optimizer = make(net.parameters(), lr=0.01, fused=True)
    scaler = Fp8GradScaler("cpu", "pytorch")
    scales = train(scaler, net, optimizer, 3)
    before = [parameter.clone() for parameter in net.parameters()]
    scaler.scale(loss_of(net)).backward()
    net[0].weight.grad[0, 0] = math.inf  # type: ignore[union-attr, index]
    scaler.step(optimizer)
    scaler.update()
    assert seen[-1]["found_inf"] > 0 and scaler.get_scale() == scales[-1] / 2
    assert all(map(torch.equal, before, net.parameters()))
    plain = make(other.parameters(), lr=0.01, fused=True)
    train(torch.amp.GradScaler("cpu"), other, plain, 3)
    assert all(map(torch.equal, before, other.parameters()))


def test_sparse_gradients() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    head = nn.Linear(4, 1)
    scaler = Fp8GradScaler("cpu", "pytorch")
    scaler.watch(head)
    optimizers = [torch.optim.SparseAdam(embedding.parameters()), sgd(head)]
    for bad in (False, True):
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(head(embedding(torch.tensor([1, 1, 3]))).square().mean()).backward()
        if bad:
            embedding.weight.grad._values()[0, 0] = math.inf  # type: ignore[union-attr]
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (32768.0 if bad else 65536.0)


# -- no sync -------------------------------------------------------------------------------------------------------
class NoSync(TorchDispatchMode):
    """Fails at whatever would make the host wait for a device's value; with the fixture, at ``tolist`` too."""

    READS = ("aten._local_scalar_dense", "aten.item", "aten.is_nonzero", "aten.equal", "aten.nonzero", "aten.masked_se")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not str(func).startswith(self.READS), f"sync: {func}"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def no_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any) -> None:
        raise AssertionError("sync: a tensor as a list")

    for name in ("tolist", "numpy", "__array__"):  # past the dispatcher on a CPU
        monkeypatch.setattr(Tensor, name, refused)


@pytest.mark.usefixtures("no_lists")
@pytest.mark.parametrize("settings", [{}, {"preset": "article"}, {"preset": "pytorch"}, {"refill": "every_clean_step"}])
def test_no_value_is_read(settings: dict[str, Any]) -> None:
    for net in (plain_model(), counting_model()):
        scaler = Fp8GradScaler("cpu", **settings)
        scaler.watch(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        for step in range(6):
            with NoSync():
                loss = scaler.scale(loss_of(net, step))
            loss.backward()
            if step in (2, 3):
                net[0].weight.grad.fill_(math.nan)  # type: ignore[union-attr, operator]
            with NoSync():
                scaler.unscale_(optimizer)
            scaler.step(optimizer)  # reads found_inf: torch's own
            with NoSync():
                if step == 5:
                    scaler.update(torch.tensor(math.nan))
                    scaler.retune(margin=2.0, hysteresis=2, cap=2.0**20)
                    scaler.set_scale(2.0)
                else:
                    scaler.update()
            optimizer.zero_grad()


@pytest.mark.usefixtures("no_lists")
def test_the_check_for_syncs_sees_one() -> None:
    scaler = Fp8GradScaler("cpu")
    scaler.scale(torch.ones(()))
    for read in (scaler.get_scale, scaler.state_dict, scaler.figures):
        with pytest.raises(AssertionError, match="sync"), NoSync():
            read()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_script_with_another_default_dtype(dtype: torch.dtype) -> None:
    scales = []
    batches = [batch(step) for step in range(12)]
    for default in (torch.float32, dtype):
        net = plain_model()
        torch.set_default_dtype(default)
        try:
            scaler = Fp8GradScaler("cpu", growth_factor=1.3)
            scaler.watch(net)
            optimizer = sgd(net)
            scales.append([])
            for x, y in batches:
                optimizer.zero_grad()
                scaler.scale(nn.functional.mse_loss(net(x), y)).backward()
                scaler.step(optimizer)
                scaler.update()
                scales[-1].append(scaler.get_scale())
        finally:
            torch.set_default_dtype(torch.float32)
    assert scales[0] == pytest.approx(scales[1], rel=1e-6)


def test_compiled_models_are_measured(seen: list[dict[str, float]]) -> None:
    nets = [plain_model(), plain_model()]
    for net in nets:
        scaler = Fp8GradScaler("cpu")
        scaler.watch(net)
        run = torch.compile(net, backend="aot_eager") if net is nets[1] else net
        optimizer = sgd(net)
        scaler.scale(loss_of(run)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert seen[1]["amax"] == pytest.approx(seen[0]["amax"], rel=1e-5) and seen[0]["amax"] > 0


def test_a_model_that_scales_each_cast_itself_is_not_watched() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    convert(model, recipe=Fp8Recipe(backward_scaling="dynamic"))
    scaler = Fp8GradScaler("cpu")
    with pytest.raises(ValueError, match="scales each gradient by itself"):
        scaler.watch(model)
    assert scaler.figures()["measured"] == 0


def test_a_scaler_that_measures_nothing_backs_off_and_grows_like_torchs() -> None:
    ours, stock = (
        Fp8GradScaler("cpu", init_scale=1024.0, growth_interval=3),
        torch.amp.GradScaler("cpu", init_scale=1024.0),
    )
    stock.set_growth_interval(3)
    weight = nn.Parameter(torch.ones(1))
    for step in range(40):
        for scaler in (ours, stock):
            optimizer = torch.optim.SGD([weight], lr=0.0)
            scaler.scale(weight.sum()).backward()
            weight.grad = torch.full((1,), math.inf if step % 11 == 10 else 1.0)
            scaler.step(optimizer)
            scaler.update()
        assert ours.get_scale() == stock.get_scale()
