"""An operator's settings on Fp8GradScaler: whatever the command lets through is refused in one line or in force."""

from __future__ import annotations

import math
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8console.numerics.scaler import Fp8GradScaler
from fp8console.numerics.scaling_rules import ScalerSettings
from fp8console.probe import state
from fp8console.probe.steering import Steering
from fp8console.protocol.commands import REFILLS, CommandError, validate

#: All of a scaler's settings can be changed live, but for the scale that it began with.
OWN = [field.name for field in fields(ScalerSettings) if field.name != "init_scale"]


def untouched() -> dict[str, Any]:
    """What else an observer has that settings change."""
    return {"lr": SimpleNamespace(factor=1.0), "clipping": SimpleNamespace(norm=None)}


def steered(**settings: Any) -> tuple[Fp8GradScaler, Steering]:
    scaler = Fp8GradScaler("cpu", **{"init_scale": 1024.0, **settings})
    scaler.scale(torch.ones(()))
    observer: Any = SimpleNamespace(
        active_scaler=lambda: scaler,
        scalers=[scaler],
        lr=SimpleNamespace(factor=1.0),
        clipping=SimpleNamespace(norm=None),
    )
    return scaler, Steering(observer)


EDGES = [0.0, 2.0**-126, 2.0**-24, 1e-3, 0.5, 0.999, 1 - 2.0**-30, 1.0, 1 + 2.0**-23, 1.5, 2.0, 7, 64.0, 65.0, 1e4]
EDGES += [2.0**24, 2.0**31 - 1, 2.0**40, 2.0**126, 1e300, "off", *REFILLS]


@pytest.mark.parametrize("name", OWN)
def test_every_value_that_passes_the_command_is_refused_or_in_force(name: str) -> None:
    applied = 0
    for value in EDGES:
        try:
            command = validate({"name": "set", name: value})
        except CommandError:
            continue
        scaler, made = steered()
        before = scaler.state_dict()
        refused = made.refuses(command)
        assert scaler.state_dict() == before
        if refused is not None:
            assert name in refused and "\n" not in refused
            continue
        applied += 1
        assert made.apply(command)[name] == command[name]
        assert getattr(scaler.settings, name) == command[name]
        shown = made.scaler_settings()
        assert shown is not None and shown[name] == command[name]
    assert applied >= 2


def test_nothing_is_half_done() -> None:
    scaler, made = steered(cap=4096.0)
    before = scaler.state_dict()
    for words in ({"margin": 1.0, "growth_factor": 1e30}, {"margin": 1.0, "floor": 8192.0}, {"floor": "off"}):
        assert made.refuses(validate({"name": "set", **words})) is not None
    assert scaler.state_dict() == before
    command = validate({"name": "set", "margin": 1.0, "growth_factor": 4.0, "floor": 2048.0, "hysteresis": 2})
    assert made.refuses(command) is None
    assert made.apply(command) == {
        "margin": 1.0,
        "growth_factor": 4.0,
        "floor": 2048.0,
        "hysteresis": 2,
        "scale": 2048.0,
    }


@pytest.mark.parametrize("name, value", [("margin", 1.0), ("refill", "on_growth"), ("patience", 2), ("hysteresis", 2)])
def test_a_stock_scaler_says_that_it_has_none(name: str, value: Any) -> None:
    observer: Any = SimpleNamespace(
        active_scaler=lambda: torch.amp.GradScaler("cpu"),
        lr=SimpleNamespace(factor=1.0),
        clipping=SimpleNamespace(norm=None),
    )
    refused = Steering(observer).refuses(validate({"name": "set", name: value}))
    assert refused == f"{name} can't be set: GradScaler has none"


def test_an_earlier_state_comes_within_todays_settings() -> None:
    scaler, made = steered(hysteresis=5)
    made.apply(validate({"name": "set", "hysteresis": 2, "cap": 64.0}))
    scaler._scale.fill_(1024.0)  # type: ignore[union-attr]
    scaler._hysteresis_tracker.fill_(5)
    made.fit_to_settings()
    assert scaler.get_scale() == 64.0 and scaler.figures()["hysteresis_tracker"] == 2


def test_a_restore_point_holds_all_of_the_state_and_puts_it_back_in_place() -> None:
    scaler, _ = steered()
    values = [96.0, 5, 1, -9.5, 7, -2, 1, 3, 512.0, 11, 13]
    for tensor, value in zip(scaler._state(), values):
        tensor.fill_(value)
    held = list(scaler._state())
    tree: dict[str, Any] = {}
    tensors: list[torch.Tensor] = []

    def slot(tensor: torch.Tensor) -> state.Slot:
        tensors.append(tensor.clone())
        return state.Slot(len(tensors) - 1, str(tensor.device))

    tree = state._scaler_tree(scaler, slot)
    assert len(tree) == len(values)
    for tensor in held:
        tensor.fill_(1)
    for name, saved in tree.items():
        setattr(scaler, name, state._put_back(getattr(scaler, name), saved, tensors))
    assert [float(tensor) for tensor in scaler._state()] == values and math.isfinite(scaler.get_scale())
    assert all(now is then for now, then in zip(scaler._state(), held))
