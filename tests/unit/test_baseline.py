"""The baseline's copy and its way back, with torch's real hooks, in this process."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_modules

from fp8console.numerics.scaler import Fp8GradScaler
from fp8console.probe import baseline as baselines
from fp8console.probe import hooks, state
from fp8console.probe.baseline import Baseline
from fp8console.probe.guard import Guard
from fp8console.probe.observer import Observer
from fp8console.probe.steering import Steering
from fp8console.protocol.settings import Settings


class Probe:
    """What a baseline needs of the probe; ``stopped`` when it asked for the training's end."""

    def __init__(self, **settings: Any) -> None:
        self.faults: list[str] = []
        self.events: list[dict[str, Any]] = []
        self.guard = Guard(lambda part, reason: self.faults.append(reason))
        self.observer = Observer(self.guard, self.boundary, lambda text, part: None)
        self.steering = Steering(self.observer)
        self.registered: dict[str, Any] = {}
        self.layers = None
        self.step = 0
        self.stopped: int | None = None
        self.patches = hooks.Patches()
        hooks.install(self.observer, self.patches)
        hooks.hook_scaler_class(self.observer, self.patches, Fp8GradScaler)
        self.baseline = Baseline(self, Settings(**{"tune_steps": 3, "tune_lr": 0.25, **settings}))
        self.baseline.arm()

    def boundary(self) -> None:
        self.step += 1
        if self.baseline.at_boundary(self.step):
            self.stopped = self.step

    def event(self, kind: str, text: str, step: int | None = None, **fields: Any) -> None:
        self.events.append({"kind": kind, "text": text, "step": step, **fields})

    def catch_up(self) -> None:
        pass

    def after_rollback(self) -> None:
        pass


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: list[Probe] = []
    # Only this test's modules: others in the process belong to other tests.
    monkeypatch.setattr(state, "find_modules", list)

    def make(**settings: Any) -> Probe:
        made.append(Probe(**settings))
        return made[-1]

    hooked = len(torch_modules._global_forward_pre_hooks)
    yield make
    for one in made:
        one.patches.undo()
        one.baseline.disarm()
        assert not one.faults
    assert hooked == len(torch_modules._global_forward_pre_hooks)


def train(net: nn.Module, optimizer: Any, scaler: Any = None, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(torch.ones(2, 3)).square().sum() + torch.rand(())
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


def model() -> tuple[nn.Module, Any]:
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    return net, torch.optim.Adam(net.parameters(), lr=0.5)


def test_hooks_go_with_the_first_forward_and_all_comes_back(probe: Any) -> None:
    watched = probe()
    net, optimizer = model()
    with torch.no_grad():
        net(torch.ones(2, 3))
    net.eval()
    net(torch.ones(2, 3))
    assert watched.events == []  # neither of them trains
    net.train()
    before, random = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    train(net, optimizer, steps=2)
    assert watched.events[0]["taken"] == "before the first forward" and watched.observer.lr.fixed == 0.25
    assert not torch_modules._global_forward_pre_hooks
    assert watched.stopped is None and not torch.equal(net[0].weight, before["0.weight"])  # type: ignore[index]
    train(net, optimizer)
    assert watched.stopped == 3 and watched.events[1]["put_back"] and watched.observer.lr.fixed is None
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random) and not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.5
    train(net, optimizer)  # a script that catches the exit trains on, and is not measured again
    assert len(watched.events) == 2


def test_a_training_without_modules_is_caught_at_its_first_update(probe: Any) -> None:
    watched = probe(tune_goes_on=True)
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for step in range(4):
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
        # Three steps of 0.25, then the script's own of 1 from where it began.
        assert weight.tolist() == [[0.75, 0.5, 1.0, 0.0][step]] * 3
    assert [event["what"] for event in watched.events] == ["begun", "ended"] and watched.stopped is None
    assert watched.events[0]["taken"] == "before the first update" and watched.events[1]["goes_on"]


@pytest.mark.parametrize("kind", ["stock", "used", "ours"])
def test_scalers_come_back_as_they_were(probe: Any, kind: str) -> None:
    watched = probe()
    net, optimizer = model()
    if kind == "ours":
        scaler: Any = Fp8GradScaler("cpu", init_scale=64.0)
    else:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    if kind == "used":
        scaler.scale(torch.ones(1))
        scaler._growth_tracker.fill_(1)
    before = copy.deepcopy(scaler.state_dict())
    train(net, optimizer, scaler, steps=2)
    if kind != "ours":
        assert scaler.get_scale() == 128.0
    train(net, optimizer, scaler)
    assert watched.stopped == 3 and watched.events[1]["put_back"]
    assert scaler.state_dict() == before
    train(net, optimizer, scaler)
    assert scaler.state_dict()["_growth_tracker"] in (0, 1)


def test_what_can_not_be_put_back_is_said(probe: Any) -> None:
    class Stubborn:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, values: dict[str, Any]) -> None:
            raise ValueError("no")

    watched = probe(tune_steps=1)
    watched.registered["mine"] = Stubborn()
    net, optimizer = model()
    before = copy.deepcopy(net.state_dict())
    train(net, optimizer)
    assert watched.stopped == 1 and not watched.events[1]["put_back"]
    assert "put back all but registered 'mine' (ValueError: no)" in watched.events[1]["text"]
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_no_memory_for_a_copy_is_a_reason_and_the_training_ends(probe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "available_memory", lambda: 10)
    watched = probe()
    train(*model())
    assert watched.stopped == 1 and watched.events[0]["what"] == "failed"
    assert "no memory for a copy of the state" in watched.events[0]["reason"] and watched.observer.lr.fixed is None


def test_without_an_optimizer_there_is_no_baseline(probe: Any) -> None:
    watched = probe()
    watched.boundary()
    assert watched.stopped == 1 and "no optimizer was seen" in watched.events[0]["reason"]


def test_names_of_models_and_devices() -> None:
    net = nn.Linear(2, 2)
    wrapped = nn.Module()
    wrapped.module = net
    assert baselines._class_name(wrapped) == "Linear" and baselines._class_name(nn.Sequential(net)) == "Sequential"
    assert baselines.device_name([SimpleNamespace(param_groups=[{"params": []}])]) is None
    assert baselines.device_name([torch.optim.SGD(net.parameters())]) == "cpu"
