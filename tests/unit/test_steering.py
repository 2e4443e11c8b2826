"""Settings on stock and odd scalers: what is refused changes nothing, what is applied is in force."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8console.probe.steering import Steering
from fp8console.protocol.commands import SCALE_MAX, SCALE_MIN, validate


def untouched() -> dict[str, Any]:
    """What else an observer has that settings change."""
    return {"lr": SimpleNamespace(factor=1.0), "clipping": SimpleNamespace(norm=None)}


def steering(scaler: Any = None) -> Steering:
    observer: Any = SimpleNamespace(
        active_scaler=lambda: scaler, lr=SimpleNamespace(factor=1.0), clipping=SimpleNamespace(norm=None)
    )
    return Steering(observer)


def used(scale: float = 1024.0, **options: Any) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, **options)
    scaler.scale(torch.ones(1))
    return scaler


def apply(made: Steering, **settings: Any) -> dict[str, Any]:
    command = validate({"name": "set", **settings})
    assert made.refuses(command) is None
    return made.apply(command)


@pytest.mark.parametrize(
    "before, asked, after",
    [
        (1024.0, 2048, 2048.0),
        (1024.0, "x2", 2048.0),
        (1024.0, "/2", 512.0),
        (1024.0, "*3", 3072.0),
        (SCALE_MAX, "x2", SCALE_MAX),
        (SCALE_MIN, "/2", SCALE_MIN),
        (math.inf, "/2", SCALE_MAX),
        (math.inf, "x2", SCALE_MAX),
        (math.nan, 8, 8.0),
        (0.0, "x2", SCALE_MIN),
        (1.0, 3, 3.0),
    ],
)
def test_scale(before: float, asked: Any, after: float) -> None:
    scaler = used(before)
    held = scaler._scale
    assert apply(steering(scaler), scale=asked) == {"scale": after}
    assert scaler._scale is held and float(held) == after and held.dtype is torch.float32


def test_a_scale_that_is_nan_becomes_a_number_by_any_factor() -> None:
    scaler = used()
    scaler._scale.fill_(math.nan)
    assert math.isfinite(apply(steering(scaler), scale="/2")["scale"])


def test_before_the_first_use_the_first_scale_is_set() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    made = steering(scaler)
    assert apply(made, scale="x4") == {"scale": 4096.0}
    scaler.scale(torch.ones(1))
    assert scaler.get_scale() == 4096.0


def test_stock_settings_are_the_scalers_own() -> None:
    scaler = used()
    now = apply(steering(scaler), growth_factor=1.5, backoff_factor=0.25, growth_interval=7)
    assert now == {"growth_factor": 1.5, "backoff_factor": 0.25, "growth_interval": 7}
    found = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
    assert found == (1.5, 0.25, 7)


def test_a_shorter_interval_still_grows() -> None:
    """torch grows when its count of clean steps equals the interval: one beyond it would never grow again."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1000)

    def step() -> None:
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    for _ in range(20):
        step()
    apply(steering(scaler), growth_interval=5)
    step()
    assert scaler.get_scale() == 4.0


def test_floor_and_cap_are_kept_and_switched_off() -> None:
    scaler = used(1024.0)
    made = steering(scaler)
    assert apply(made, floor=16, cap=256) == {"floor": 16.0, "cap": 256.0, "scale": 256.0}
    scaler._scale.fill_(2.0)
    made.keep_limits()
    assert scaler.get_scale() == 16.0
    scaler._scale.fill_(math.inf)
    made.keep_limits()
    assert scaler.get_scale() == 256.0
    apply(made, floor="off", cap="off")
    scaler._scale.fill_(2.0)
    made.keep_limits()
    assert scaler.get_scale() == 2.0 and (made.floor, made.cap) == (None, None)


def test_limits_without_a_scaler_yet_wait() -> None:
    made = steering(None)
    made.floor = 2.0
    made.keep_limits()
    steering(torch.amp.GradScaler("cpu")).keep_limits()


@pytest.mark.parametrize(
    "scaler, set_before, asked, reason",
    [
        (False, {}, {"scale": 2.0}, "no enabled GradScaler"),
        (False, {}, {"growth_interval": 2}, "growth_interval can't be set"),
        (False, {}, {"floor": 2.0}, "no enabled GradScaler"),
        (True, {}, {"hysteresis": 2}, "GradScaler has none"),
        (True, {"cap": 100.0}, {"scale": 128.0}, "over the cap 100"),
        (True, {"floor": 100.0}, {"scale": 64.0}, "under the floor 100"),
        (True, {"cap": 100.0}, {"floor": 128.0}, "floor 128 would be over cap 100"),
        (True, {"floor": 100.0}, {"cap": 64.0}, "floor 100 would be over cap 64"),
    ],
)
def test_refusals(scaler: bool, set_before: dict[str, float], asked: dict[str, Any], reason: str) -> None:
    made = steering(used() if scaler else None)
    for name, value in set_before.items():
        setattr(made, name, value)
    assert reason in str(made.refuses({"name": "set", **asked}))


def test_what_needs_no_scaler_is_set_without_one() -> None:
    made = steering(None)
    assert apply(made, lr_scale=0.5, clip_norm=1.0, cap="off") == {"cap": None, "lr_scale": 0.5, "clip_norm": 1.0}
    assert (made._observer.lr.factor, made._observer.clipping.norm) == (0.5, 1.0)
    assert apply(made, clip_norm="off") == {"clip_norm": None}
    assert made.scaler_settings() is None


def test_a_rollbacks_settings_leave_alone_what_they_do_not_name() -> None:
    made = steering(used())
    apply(made, clip_norm=1.0, lr_scale=0.5)
    made.apply({"name": "rollback", "lr_scale": None, "scale": 64.0, "clip_norm": None})
    assert (made.clip_norm, made.lr_scale) == (1.0, 0.5)


def test_a_scaler_with_hysteresis_is_given_it() -> None:
    class Patient(torch.amp.GradScaler):
        hysteresis = 1

    scaler = Patient("cpu")
    assert apply(steering(scaler), hysteresis=3) == {"hysteresis": 3}
    assert scaler.hysteresis == 3


def test_settings_are_read_without_the_device_when_the_scale_is_given() -> None:
    scaler = used()
    scaler._scale = SimpleNamespace(item=lambda: 1 / 0)  # type: ignore[assignment]
    assert steering(scaler).scaler_settings(8.0) == {
        "class_name": "GradScaler",
        "scale": 8.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "floor": None,
        "cap": None,
    }
