"""The hooks on real torch objects in this process: what a training may do to them and still be measured."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from fp8console.probe import hooks
from fp8console.probe.guard import Guard
from fp8console.probe.observer import Observer
from fp8console.probe.window import HostValues, record_values


class Watch:
    """An installed observer and the records of the steps that it saw."""

    def __init__(self) -> None:
        self.faults: list[tuple[str, str]] = []
        self.notices: list[str] = []
        self.steps: list[dict[str, Any]] = []
        self.flags: list[int] = []
        self.observer = Observer(
            Guard(lambda part, reason: self.faults.append((part, reason))),
            self.boundary,
            lambda text, part: self.notices.append(text),
        )
        self.patches = hooks.Patches()
        hooks.install(self.observer, self.patches)

        def subclass(scaler_class: type) -> None:
            for base in reversed(scaler_class.__mro__):
                if (
                    issubclass(base, torch.amp.GradScaler)
                    and base is not torch.amp.GradScaler
                    and base not in self.seen
                ):
                    self.seen.add(base)
                    hooks.hook_scaler_class(self.observer, self.patches, base)

        self.seen: set[type] = set()
        self.observer.on_scaler_class = subclass

    def boundary(self) -> None:
        window = self.observer.window
        numbers = [float(reading) for reading in window.to_readings()]
        host = HostValues(len(self.steps) + 1, 0.0, None, None, None, None, None, 0)
        values, flags = record_values(window, host, numbers)
        self.steps.append(values)
        self.flags.append(flags)


@pytest.fixture
def watch() -> Iterator[Watch]:
    made = Watch()
    yield made
    made.patches.undo()
    assert made.faults == []


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def loss_of(net: nn.Module) -> torch.Tensor:
    return net(torch.ones(2, 4)).square().mean()


def step(net: nn.Module, optimizer: Any, scaler: Any = None) -> float:
    optimizer.zero_grad()
    loss = loss_of(net)
    (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    return loss.item()


def test_undo_puts_torch_back() -> None:
    before = torch.autograd.backward, torch.amp.GradScaler.__dict__["step"], nn.Module.__dict__["zero_grad"]
    made = Watch()
    assert torch.autograd.backward is not before[0]
    made.patches.undo()
    after = torch.autograd.backward, torch.amp.GradScaler.__dict__["step"], nn.Module.__dict__["zero_grad"]
    assert after == before


@pytest.mark.parametrize("lr", [1, 0.5, torch.tensor(0.25)])
def test_any_kind_of_learning_rate(watch: Watch, lr: Any) -> None:
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=lr)
    watch.observer.lr.factor = 0.5
    step(net, optimizer)
    assert watch.steps[0]["lr"] == float(lr) * 0.5
    assert optimizer.param_groups[0]["lr"] is lr


def test_the_factor_is_in_force_and_the_scripts_own_rate_comes_back(watch: Watch) -> None:
    nets = [model(), model()]
    optimizers = [torch.optim.SGD(net.parameters(), lr=lr) for net, lr in zip(nets, (0.1, 0.05))]
    step(nets[1], optimizers[1])
    watch.observer.lr.factor = 0.5
    step(nets[0], optimizers[0])
    assert torch.equal(nets[0].weight, nets[1].weight)
    scheduler = lr_scheduler.ExponentialLR(optimizers[0], 0.5)
    for _ in range(3):
        step(nets[0], optimizers[0])
        scheduler.step()
    assert optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)


def test_groups_without_a_learning_rate(watch: Watch) -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.sub_(parameter.grad)

    net = model()
    watch.observer.lr.factor = 0.5
    step(net, Own(net.parameters()))
    assert watch.steps[0]["lr"] is None and watch.steps[0]["grad_norm"] > 0


class Fails(torch.optim.SGD):
    fail = False

    def step(self, closure: Any = None) -> Any:
        if self.fail:
            raise RuntimeError("the script's own")
        return super().step(closure)


def test_a_step_that_raises_leaves_the_rate_to_the_script(watch: Watch) -> None:
    net = model()
    optimizer = Fails(net.parameters(), lr=0.1)
    watch.observer.lr.factor = 0.5
    optimizer.fail = True
    with pytest.raises(RuntimeError, match="own"):
        step(net, optimizer)
    optimizer.fail = False
    step(net, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert watch.steps[-1]["lr"] == pytest.approx(0.05)


def test_a_step_that_raises_does_not_spoil_the_next_micro_batches(watch: Watch) -> None:
    net = model()
    optimizer = Fails(net.parameters(), lr=0.0)
    optimizer.fail = True
    with pytest.raises(RuntimeError, match="own"):
        step(net, optimizer)
    optimizer.fail = False
    step(net, optimizer)
    optimizer.zero_grad()
    for _ in range(3):
        loss_of(net).backward()
    optimizer.step()
    assert watch.steps[-1]["micro_batches"] == 3


def test_an_update_that_raises_does_not_end_the_measuring(watch: Watch) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    with pytest.raises(AssertionError):
        scaler.update()  # nothing was stepped
    step(net, optimizer, scaler)
    assert len(watch.steps) == 1


def test_one_scaler_with_two_optimizers_is_one_step(watch: Watch) -> None:
    nets = [model(), model()]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(3):
        loss = loss_of(nets[0]) + loss_of(nets[1])
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(loss).backward()
        wanted = math.sqrt(sum(float(p.grad.double().norm()) ** 2 for net in nets for p in net.parameters())) / 8.0
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        assert watch.steps[-1]["grad_norm"] == pytest.approx(wanted, rel=1e-6)
        assert watch.steps[-1]["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert len(watch.steps) == 3


def test_a_scaler_with_an_update_of_its_own(watch: Watch) -> None:
    class Own(torch.amp.GradScaler):
        def update(self, new_scale: Any = None) -> None:
            """As some do: no call of super()."""
            self._per_optimizer_states.clear()

    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = Own("cpu", init_scale=4.0)
    for _ in range(3):
        step(net, optimizer, scaler)
    assert [values["scale"] for values in watch.steps] == [4.0] * 3


def test_a_scaler_that_calls_super_is_counted_once(watch: Watch) -> None:
    class Own(torch.amp.GradScaler):
        def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            return super().step(optimizer, *args, **kwargs)

        def update(self, new_scale: Any = None) -> None:
            super().update(new_scale)

    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = Own("cpu", init_scale=4.0, growth_interval=2)
    for _ in range(4):
        step(net, optimizer, scaler)
    assert [values["scale"] for values in watch.steps] == [4.0, 4.0, 8.0, 8.0]


def test_a_scaler_from_before_the_hooks_is_found_in_use() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    made = Watch()
    try:
        step(net, optimizer, scaler)
        assert made.steps[0]["scale"] == 16.0 and made.observer.active_scaler() is scaler
    finally:
        made.patches.undo()


def test_a_copied_scaler_is_part_of_restore_points(watch: Watch) -> None:
    scaler = copy.deepcopy(torch.amp.GradScaler("cpu", init_scale=16.0))
    net = model()
    step(net, torch.optim.SGD(net.parameters(), lr=0.1), scaler)
    assert scaler in watch.observer.scalers


@pytest.mark.parametrize("kind", ["plateau", "sequential", "chained"])
def test_every_scheduler_is_part_of_restore_points(watch: Watch, kind: str) -> None:
    optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
    parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    made: Any = {
        "plateau": lambda: lr_scheduler.ReduceLROnPlateau(optimizer),
        "sequential": lambda: lr_scheduler.SequentialLR(optimizer, parts, [3]),
        "chained": lambda: lr_scheduler.ChainedScheduler(parts),
    }[kind]()
    assert made in watch.observer.schedulers


def test_a_loss_that_is_no_scalar_does_not_end_the_training(watch: Watch) -> None:
    watch.observer.window.micro_batches = 1
    watch.observer.explicit_step(torch.ones(3))


def test_a_backward_that_raises_is_the_scripts_and_the_next_is_counted(watch: Watch) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loss = loss_of(net)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    optimizer.step()
    step(net, optimizer)
    assert len(watch.steps) == 2 and watch.steps[1]["micro_batches"] == 1


def test_several_backwards_are_one_step_with_their_mean(watch: Watch) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for factor in (1.0, 2.0, 6.0):
        loss = loss_of(net) * factor
        losses.append(loss.item())
        loss.backward()
    optimizer.step()
    assert watch.steps[0]["micro_batches"] == 3
    assert watch.steps[0]["loss"] == pytest.approx(sum(losses) / 3, rel=1e-6)


def test_nothing_of_a_training_that_is_over_is_kept_alive(watch: Watch) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    watch.observer.lr.factor = 0.5
    watch.observer.clipping.norm = 1.0
    for _ in range(3):
        step(net, optimizer, scaler)
        scheduler.step()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    alive = [weakref.ref(item) for item in (net, optimizer, scaler, scheduler, net.weight)]
    del net, optimizer, scaler, scheduler
    gc.collect()
    assert [ref() for ref in alive] == [None] * 5


def test_the_operators_clipping_leaves_what_is_not_finite_alone(watch: Watch) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    watch.observer.clipping.norm = 0.5
    optimizer.zero_grad()
    loss_of(net).backward()
    optimizer.step()
    norm = math.sqrt(sum(float(p.grad.double().norm()) ** 2 for p in net.parameters()))
    assert norm <= 0.5 * (1 + 1e-5)
    net.weight.grad[0, 0] = math.inf
    before = net.bias.grad.clone()
    optimizer.step()
    assert torch.equal(net.bias.grad, before)


def test_clipping_may_be_given_a_generator(watch: Watch) -> None:
    net = model()
    loss_of(net).backward()
    norm = torch.nn.utils.clip_grad_norm_((p for p in net.parameters()), 1e9)
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    assert watch.steps[0]["grad_norm"] == pytest.approx(float(norm)) and watch.steps[0]["clip_coef"] == 1.0
