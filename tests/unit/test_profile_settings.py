"""A profile applied to real scalers in this process: before the first loss is scaled, or not at all."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from fp8console.numerics.scaler import Fp8GradScaler
from fp8console.probe import hooks
from fp8console.probe.guard import Guard
from fp8console.probe.observer import Observer
from fp8console.probe.profile import ProfileSettings
from fp8console.probe.steering import Steering
from fp8console.protocol.profile import setting_rule

SCALER = {
    "preset": "headroom",
    "margin": 4,
    "init_scale": 4096.0,
    "growth_factor": 4.0,
    "backoff_factor": 0.25,
    "growth_interval": 7,
    "floor": 16.0,
    "cap": 8192.0,
}


class Training:
    """The probe's parts that a profile touches, hooked into torch for one test."""

    def __init__(self, **profile: Any) -> None:
        whole = {"file": "p.toml", "device": None, "format": None, "scaler": {}, "clip_norm": None, "clip_groups": {}}
        whole.update(profile)
        assert setting_rule(whole) is None
        self.faults: list[str] = []
        self.notices: list[str] = []
        self.events: list[dict[str, Any]] = []
        self.guard = Guard(lambda part, reason: self.faults.append(reason))
        self.observer = Observer(self.guard, lambda: None, lambda text, part: None)
        self.steering = Steering(self.observer)
        self.settings = ProfileSettings(self, whole)
        self.observer.on_scale = self.settings.before_scale
        self.patches = hooks.Patches()
        hooks.install(self.observer, self.patches)
        hooks.hook_scaler_class(self.observer, self.patches, Fp8GradScaler)

    def notice(self, text: str, part: str) -> None:
        self.notices.append(text)

    def event(self, kind: str, text: str, step: int | None = None, **fields: Any) -> None:
        self.events.append({"kind": kind, "text": text, **fields})

    def said(self) -> dict[str, Any]:
        self.settings.at_boundary(1)
        self.settings.at_boundary(2)
        assert len(self.events) == 1
        return self.events[0]


@pytest.fixture
def training(request: pytest.FixtureRequest) -> Any:
    made: list[Training] = []

    def make(**profile: Any) -> Training:
        made.append(Training(**profile))
        return made[-1]

    yield make
    for one in made:
        one.patches.undo()
        assert not one.faults


def test_a_stock_scalers_first_loss_has_the_profiles_scale(training: Any) -> None:
    started = training(scaler=SCALER, clip_norm=2.5)
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaled = scaler.scale(torch.ones(()))
    assert float(scaled.detach()) == 4096.0 and scaler.get_scale() == 4096.0
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (4.0, 0.25, 7)
    assert (started.steering.floor, started.steering.cap) == (16.0, 8192.0)
    assert started.observer.clipping.norm == started.steering.clip_norm == 2.5
    said = started.said()
    assert {name: said["applied"][name] for name in SCALER if name not in ("preset", "margin")} == {
        name: value for name, value in SCALER.items() if name not in ("preset", "margin")
    }
    assert said["not_applied"] == ["preset headroom: GradScaler has none"]
    # At its first use only: what the operator or the script sets later stays.
    scaler.update(32.0)
    assert float(scaler.scale(torch.ones(())).detach()) == 32.0
    del optimizer


def test_the_profiles_clipping_never_loosens_the_scripts(training: Any) -> None:
    started = training(clip_norm=2.0)
    net = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)

    def clipped(limit: Any) -> float:
        net.weight.grad = torch.full_like(net.weight, 10.0)
        nn.utils.clip_grad_norm_(net.parameters(), limit)
        return float(net.weight.grad.norm())

    started.settings.before_backward()
    net.weight.grad = torch.full_like(net.weight, 10.0)
    optimizer.step()  # a script without clipping
    assert float(net.weight.grad.norm()) == pytest.approx(2.0, rel=1e-5)
    for limit, wanted in ((1.0, 1.0), (5.0, 2.0), (torch.tensor(0.5), 0.5), (torch.tensor(9.0), 2.0), (math.inf, 2.0)):
        assert clipped(limit) == pytest.approx(wanted, rel=1e-5)
    started.steering.apply({"name": "set", "clip_norm": 3.0})  # the operator's word goes before the script's
    assert clipped(1.0) == pytest.approx(3.0, rel=1e-5)


def test_a_used_scaler_is_changed_in_place_and_can_still_grow(training: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=100)
    scaler.scale(torch.ones(1))
    assert scaler._scale is not None and scaler._growth_tracker is not None
    scaler._growth_tracker.fill_(50)
    held = scaler._scale
    training(scaler=SCALER)
    scaler.scale(torch.ones(1))
    assert scaler._scale is held and float(held) == 4096.0 and int(scaler._growth_tracker) == 6


def test_our_scaler_takes_preset_margin_floor_and_cap(training: Any) -> None:
    started = training(scaler=SCALER)
    scaler = Fp8GradScaler("cpu", preset="article")
    assert float(scaler.scale(torch.ones(())).detach()) == 4096.0
    settings = scaler.settings
    assert (scaler.preset, settings.margin, settings.floor, settings.cap) == ("headroom", 4, 16.0, 8192.0)
    assert (settings.growth_factor, settings.growth_interval, settings.smoothing) == (4.0, 7, 0.0)
    said = started.said()
    assert said["applied"]["preset"] == "headroom" and said["applied"]["init_scale"] == 4096.0
    assert said["not_applied"] == []
    assert started.steering.floor is None  # the scaler keeps it itself


def test_no_scaler_and_a_disabled_one_are_said(training: Any) -> None:
    started = training(scaler=SCALER, clip_norm=1.0)
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    disabled.scale(torch.ones(1))
    started.settings.before_backward()
    said = started.said()
    assert said["applied"] == {"clip_norm": 1.0}
    assert said["not_applied"] == ["the scaler's settings: no enabled GradScaler has scaled a loss"]


@pytest.mark.parametrize("what, value", [("device", "gfx942"), ("format", "e4m3fn")])
def test_a_profile_for_something_else_is_refused_with_a_line(training: Any, what: str, value: str) -> None:
    from fp8console.numerics.counts import CastCount

    started = training(scaler=SCALER, clip_norm=1.0, **{what: value})
    net = nn.Linear(2, 1)
    net.grad_counts = CastCount("net", "e5m2")  # type: ignore[assignment]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    assert float(scaler.scale(torch.ones(())).detach()) == 65536.0
    now = "cpu" if what == "device" else "e5m2"
    assert started.notices == [f"profile p.toml not applied: it is for {what} {value}, this training has {now}"]
    assert started.observer.clipping.norm is None and scaler.get_growth_interval() == 2000
    started.settings.at_boundary(1)
    assert started.events == []
    del optimizer, net


def test_a_fixed_learning_rate_is_in_force_and_the_scripts_comes_back() -> None:
    guard = Guard(lambda part, reason: pytest.fail(reason))
    observer = Observer(guard, lambda: None, lambda text, part: None)
    patches = hooks.Patches()
    hooks.install(observer, patches)
    try:
        for given in (0.5, torch.tensor(0.5)):
            net = nn.Linear(1, 1, bias=False)
            optimizer = torch.optim.SGD(net.parameters(), lr=given)
            before = net.weight.item()
            observer.lr.fixed = 0.25
            net.weight.grad = torch.ones_like(net.weight)
            optimizer.step()
            assert net.weight.item() == pytest.approx(before - 0.25) and optimizer.param_groups[0]["lr"] is given
            observer.lr.fixed = None
            optimizer.step()
            assert math.isclose(net.weight.item(), before - 0.75, rel_tol=1e-6)
    finally:
        patches.undo()
