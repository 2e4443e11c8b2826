"""Capture and restore of everything a training's state hangs on: exact, in place, whatever kind it is."""

from __future__ import annotations

import collections
import copy
import gc
import math
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

from fp8console.probe import state
from fp8console.probe.digest import digest

numpy = pytest.importorskip("numpy")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))


def roots(
    modules: tuple[Any, ...] = (),
    optimizers: tuple[Any, ...] = (),
    scalers: tuple[Any, ...] = (),
    schedulers: tuple[Any, ...] = (),
    **registered: Any,
) -> state.Roots:
    refs = [[weakref.ref(item) for item in items] for items in (modules, optimizers, scalers, schedulers)]
    return state.Roots(*refs, registered)


def taken(where: state.Roots) -> tuple[dict[str, Any], list[torch.Tensor]]:
    tree, tensors = state.capture(where)
    return tree, [tensor.clone() for tensor in tensors]


def put_back(where: state.Roots, saved: tuple[dict[str, Any], list[torch.Tensor]]) -> None:
    """Restore, and check by digest that it is the state that was captured."""
    assert state.misfit(where, *saved) is None
    state.restore(where, *saved)
    tree, tensors = state.capture(where)
    assert digest(tensors, state.plain_part(tree, like=saved[0])) == digest(saved[1], state.plain_part(saved[0]))


def train(net: nn.Module, optimizer: Any, steps: int = 3, scaler: Any = None, scheduler: Any = None) -> list[float]:
    """Losses of some steps; a closure serves every optimizer."""
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 4)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(x).square().mean()
            (loss if scaler is None else scaler.scale(loss)).backward()
            return loss

        if scaler is None:
            loss = optimizer.step(closure)
        else:
            loss = closure()
            scaler.step(optimizer)
            scaler.update()
        if scheduler is not None:
            scheduler.step()
        losses.append(float(loss))
    return losses


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adam capturable": lambda p: torch.optim.Adam(p, lr=0.01, capturable=False, amsgrad=True, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adam tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "groups": lambda p: torch.optim.AdamW(
        [{"params": list(p)[:2], "lr": 0.1, "names": ["a"]}, {"params": list(p)[2:]}]
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("warm", [0, 2])
def test_the_same_steps_come_again(name: str, warm: int) -> None:
    """From before the first step (no optimizer state yet) and from the middle."""
    net = model()
    optimizer = OPTIMIZERS[name](list(net.parameters()))
    train(net, optimizer, warm)
    where = roots((net,), (optimizer,))
    saved = taken(where)
    first = train(net, optimizer, 4)
    put_back(where, saved)
    assert len(optimizer.state) == (0 if warm == 0 and name not in ("adagrad",) else len(optimizer.state))
    assert train(net, optimizer, 4) == first
    train(net, optimizer, 1)
    put_back(where, saved)  # the captured state was not handed out
    assert train(net, optimizer, 4) == first


def test_tensors_keep_their_identity() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer)
    where = roots((net,), (optimizer,))
    saved = taken(where)
    held = [*net.parameters(), *net.buffers()]
    held += [value for values in optimizer.state.values() for value in values.values()]
    pointers = [tensor.data_ptr() for tensor in held]
    groups = optimizer.param_groups[0]
    train(net, optimizer)
    put_back(where, saved)
    now = [*net.parameters(), *net.buffers()]
    now += [value for values in optimizer.state.values() for value in values.values()]
    assert all(one is other for one, other in zip(held, now)) and pointers == [tensor.data_ptr() for tensor in now]
    assert optimizer.param_groups[0] is groups


def test_a_live_graph_is_never_silenced() -> None:
    net = nn.Linear(3, 3)
    where = roots((net,))
    saved = taken(where)
    out = net(torch.randn(2, 3)).relu() @ net.weight
    state.restore(where, *saved)
    with pytest.raises(RuntimeError, match="inplace"):
        out.sum().backward()


def test_tied_weights_are_one_tensor() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(5, 5, bias=False)
            self.other = nn.Linear(5, 5, bias=False)
            self.other.weight = self.one.weight

    net = Tied()
    where = roots((net,))
    tree, tensors = taken(where)
    assert len([tensor for tensor in tensors if tensor.shape == (5, 5)]) == 1
    with torch.no_grad():
        net.one.weight.zero_()
    put_back(where, (tree, tensors))
    assert net.other.weight is net.one.weight and net.one.weight.abs().sum() > 0


def test_an_average_of_the_weights_goes_back_too() -> None:
    net = model()
    average = AveragedModel(net)
    copied = copy.deepcopy(net)
    found = [ref() for ref in state.find_modules()]
    assert net not in found[:0] and any(item is average for item in found) and any(item is copied for item in found)
    assert not any(item is net[0] for item in found)
    where = roots((net, average, copied))
    saved = taken(where)
    with torch.no_grad():
        for tensor in [*average.parameters(), *copied.buffers(), average.n_averaged]:
            tensor.add_(1)
    put_back(where, saved)
    assert int(average.n_averaged) == 0


def test_the_search_skips_what_has_no_values_and_what_it_can_not_ask() -> None:
    class Odd(nn.Module):
        def parameters(self, recurse: bool = True) -> Any:
            raise RuntimeError("not attached to a trainer")

    kept = [Odd(), nn.ReLU(), nn.Linear(2, 2, device="meta"), nn.LazyLinear(3)]
    found = [ref() for ref in state.find_modules()]
    assert not any(item is kept[0] or item is kept[1] for item in found)
    where = roots((kept[2], kept[3]))
    tree, _ = taken(where)
    assert tree["modules"] == [{}, {}]


def test_frozen_modules_go_back_and_stay_frozen() -> None:
    net = model().requires_grad_(False)
    where = roots((net,))
    saved = taken(where)
    with torch.no_grad():
        net[0].weight.fill_(7)
    put_back(where, saved)
    assert not net[0].weight.requires_grad and net[0].weight.grad_fn is None


def test_parameters_that_no_module_holds_go_back() -> None:
    loose = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD([loose], lr=0.1, momentum=0.9)
    where = roots((), (optimizer,))
    saved = taken(where)
    for _ in range(3):
        optimizer.zero_grad()
        (loose - 1).square().sum().backward()
        optimizer.step()
    put_back(where, saved)
    assert loose.tolist() == [0.0, 0.0, 0.0] and not optimizer.state


def test_state_under_names_goes_back() -> None:
    """Some optimizers keep what all parameters share in ``state`` under a name."""

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.state["k"] = self.state.get("k", torch.zeros(1)) + 1  # type: ignore[index]
            return super().step(closure)

    net = model()
    optimizer = Counting(net.parameters(), lr=0.1)
    where = roots((net,), (optimizer,))
    fresh = taken(where)
    train(net, optimizer, 2)
    saved = taken(where)
    train(net, optimizer, 3)
    put_back(where, saved)
    assert float(optimizer.state["k"]) == 2.0  # type: ignore[index]
    put_back(where, fresh)
    assert "k" not in optimizer.state


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38, 1e-45, -0.0])
def test_numbers_that_are_not_ordinary_go_back_bit_by_bit(value: float) -> None:
    net = nn.Linear(2, 2)
    with torch.no_grad():
        net.weight[0, 0] = value
    before = net.weight.detach().clone().view(torch.int32)
    where = roots((net,))
    saved = taken(where)
    with torch.no_grad():
        net.weight.fill_(1.0)
    put_back(where, saved)
    assert torch.equal(net.weight.detach().view(torch.int32), before)


def test_one_that_died_keeps_its_place() -> None:
    nets = [nn.Linear(2, 2), nn.Linear(3, 3)]
    where = roots(tuple(nets))
    saved = taken(where)
    with torch.no_grad():
        nets[1].weight.zero_()
    del nets[0]
    gc.collect()
    state.restore(where, *saved)
    assert nets[0].weight.abs().sum() > 0
    assert state.capture(where)[0]["modules"][0] is None


def test_roots_and_trees_keep_nothing_alive() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    where = roots((net,), (optimizer,), (), (scheduler,))
    kept = taken(where)
    alive = [weakref.ref(item) for item in (net, optimizer, net[0].weight)]
    del net, optimizer, scheduler
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3
    assert kept


# -- shapes and views ---------------------------------------------------------------------------------------------
def test_expanded_buffers_and_those_made_in_inference_mode_go_back() -> None:
    net = nn.Linear(2, 2)
    net.register_buffer("mask", torch.tensor([1.0, 2.0]).expand(3, 2))
    with torch.inference_mode():
        net.register_buffer("angles", torch.arange(4.0))
    where = roots((net,))
    saved = taken(where)
    with torch.no_grad(), torch.inference_mode():
        net.angles.zero_()
        net.mask[:1].fill_(9)
    put_back(where, saved)
    assert net.mask.tolist() == [[1.0, 2.0]] * 3 and net.angles.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_cache_that_has_grown_is_replaced() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    net[0].register_buffer("cache", torch.arange(4.0), persistent=False)
    where = roots((net,))
    saved = taken(where)
    net[0].cache = torch.arange(9.0)
    put_back(where, saved)
    assert net[0].cache.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_what_does_not_fit_is_told_before_anything_changes() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    where = roots((net,), (optimizer,))
    saved = taken(where)
    net[3] = nn.Linear(8, 5)
    reason = state.misfit(where, *saved)
    assert reason is not None and "3.weight" in reason and "(5, 8)" in reason and "(2, 8)" in reason
    net[3] = nn.Identity()
    assert "has no 3." in str(state.misfit(where, *saved))
    other = roots((), (torch.optim.AdamW(nn.Linear(9, 9).parameters()), optimizer)[:1])
    assert state.misfit(other, *saved) is None  # dead already
    optimizer.param_groups[0]["params"] = list(nn.Linear(9, 9).parameters())
    assert "AdamW holds other parameters" in str(state.misfit(roots((), (optimizer,)), *saved))


def test_a_group_that_was_added_since_loses_its_momentum_only() -> None:
    net, head = model(), nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    where = roots((net,), (optimizer,))
    saved = taken(where)
    optimizer.add_param_group({"params": head.parameters(), "lr": 0.5})
    for parameter in [*net.parameters(), *head.parameters()]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    weight = head.weight.detach().clone()
    assert state.misfit(where, *saved) is None
    state.restore(where, *saved)
    assert torch.equal(head.weight, weight) and not optimizer.state


# -- schedulers ---------------------------------------------------------------------------------------------------
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [2, 3, 3, 5], 0.5),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=50),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2, cycle_momentum=False),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_same_learning_rates_come_again(name: str) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = SCHEDULERS[name](optimizer)

    def rates(steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            found.append(float(optimizer.param_groups[0]["lr"]))
        return found

    rates(2)
    where = roots((), (optimizer,), (), (scheduler,))
    saved = taken(where)
    first = rates(6)
    put_back(where, saved)
    assert rates(6) == first


def test_a_plateau_is_remembered() -> None:
    optimizer = torch.optim.SGD(model().parameters(), lr=1.0)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    scheduler.step(5.0)
    where = roots((), (optimizer,), (), (scheduler,))
    saved = taken(where)
    for loss in (6.0, 7.0, 8.0):
        scheduler.step(loss)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    put_back(where, saved)
    assert scheduler.best == 5.0 and scheduler.num_bad_epochs == 0 and optimizer.param_groups[0]["lr"] == 1.0


def test_a_schedulers_containers_keep_their_kind() -> None:
    """MultiStepLR's milestones are a Counter, whose elements() it calls."""
    optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
    scheduler = lr_scheduler.MultiStepLR(optimizer, [2, 4])
    where = roots((), (), (), (scheduler,))
    put_back(where, taken(where))
    assert type(scheduler.milestones) is collections.Counter
    scheduler.step(3)  # a script's own epoch number takes that way
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_plain_data_of_every_kind_comes_back_as_it_was() -> None:
    Pair = collections.namedtuple("Pair", "a b")

    class Holder:
        def __init__(self) -> None:
            self.data: Any = None

        def state_dict(self) -> Any:
            return {"data": self.data}

        def load_state_dict(self, loaded: Any) -> None:
            self.data = loaded["data"]

    values: list[Any] = [
        Pair(1, torch.ones(2)),
        torch.Size([2, 3]),
        (None, (1, "x"), [torch.zeros(1)]),
        collections.OrderedDict(b=1, a=2),
        collections.defaultdict(list, x=[1]),
        {1: {2: math.nan}},
        {"s", "t"},
        b"bytes",
        1 + 2j,
        numpy.arange(3),
    ]
    for value in values:
        holder = Holder()
        holder.data = copy.deepcopy(value)
        where = roots(held=holder)
        saved = taken(where)
        holder.data = None
        state.restore(where, *saved)
        assert type(holder.data) is type(value)
        assert repr(holder.data) == repr(value)


# -- scaler -------------------------------------------------------------------------------------------------------
def test_a_scaler_goes_back_in_place_and_keeps_the_operators_settings() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    where = roots((net,), (optimizer,), (scaler,))
    fresh = taken(where)
    assert fresh[0]["scalers"] == [{}]
    train(net, optimizer, 3, scaler)
    saved = taken(where)
    scale = scaler._scale
    train(net, optimizer, 5, scaler)
    scaler.set_growth_factor(3.0)
    put_back(where, saved)
    assert scaler._scale is scale and float(scale) == 2048.0 and int(scaler._growth_tracker) == 1
    assert scaler.get_growth_factor() == 3.0
    state.restore(where, *fresh)  # from before the scaler's first use: its scale stays
    assert float(scaler._scale) == 2048.0


# -- random state -------------------------------------------------------------------------------------------------
def draw() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(numpy.random.rand()),
        float(numpy.random.randn()),
        float(torch.rand(1)),
    ]


def test_all_random_numbers_come_again() -> None:
    where = roots()
    draw()  # leaves a second normal number in waiting, in python and in numpy
    saved = taken(where)
    first = [draw() for _ in range(3)]
    put_back(where, saved)
    assert [draw() for _ in range(3)] == first


def test_another_generator_in_numpy_goes_back_too() -> None:
    before = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.PCG64(1))
    try:
        where = roots()
        saved = taken(where)
        first = numpy.random.rand(3).tolist()
        put_back(where, saved)
        assert numpy.random.rand(3).tolist() == first
    finally:
        numpy.random.set_bit_generator(before)


# -- the script's own objects -------------------------------------------------------------------------------------
def test_one_that_refuses_does_not_keep_the_rest_from_going_back() -> None:
    class Refuses:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, loaded: Any) -> None:
            raise KeyError("epoch")

    net, other = model(), nn.Linear(2, 2)
    where = roots((net,), ema=Refuses(), other=other)
    saved = taken(where)
    with torch.no_grad():
        net[0].weight.zero_()
        other.weight.zero_()
    first = torch.rand(1)
    with pytest.raises(state.PartlyRestored, match=r"all but registered 'ema' \(KeyError: 'epoch'\)"):
        state.restore(where, *saved)
    assert net[0].weight.abs().sum() > 0 and other.weight.abs().sum() > 0 and torch.rand(1) == first
