"""From readings to one record: means, scales that are 0 or inf, clipping, flags."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fp8console.probe.readback import take
from fp8console.probe.window import Clip, HostValues, Norm, StepWindow, record_values
from fp8console.protocol import records
from fp8console.protocol.records import FLAGS


def record(late: bool = False, flags: int = 0, **fields: Any) -> tuple[dict[str, Any], int]:
    window = StepWindow(**fields)
    readings = window.to_readings()
    numbers = [float(reading) for reading in readings]
    values, bits = record_values(window, HostValues(7, 1.0, 0.5, None, None, None, None, flags), numbers)
    packed = records.pack_step(values, bits)
    assert records.unpack_step(packed)["step"] == 7
    return values, bits


def same(found: Any, wanted: Any) -> bool:
    if wanted is None or found is None:
        return found is wanted
    return math.isnan(found) if math.isnan(wanted) else bool(found == pytest.approx(wanted, rel=1e-12))


def test_an_empty_window_is_unknown_and_not_zero() -> None:
    values, bits = record()
    unknown = ("loss", "grad_norm", "clip_coef", "lr", "scale", "growth_tracker", "device_memory", "epoch")
    assert all(values[name] is None for name in unknown) and bits == 0


@pytest.mark.parametrize(
    "losses, wanted",
    [
        ([(2.0, None)], 2.0),
        ([(2.0, None), (4.0, None)], 3.0),
        ([(2048.0, 1024.0), (4096.0, 1024.0)], 3.0),
        ([(math.nan, None), (1.0, None)], math.nan),
        ([(math.inf, None), (1.0, None)], math.inf),
        ([(math.inf, None), (-math.inf, None)], math.nan),
        ([(1.0, 0.0)], math.nan),
        ([(0.0, 0.0)], math.nan),
        ([(math.inf, 65536.0)], math.inf),
        ([(-3.0, 2.0)], -1.5),
    ],
)
def test_loss(losses: list[tuple[float, float | None]], wanted: float) -> None:
    values, bits = record(losses=losses)
    assert same(values["loss"], wanted)
    assert bool(bits & FLAGS["loss_nonfinite"]) is not math.isfinite(wanted)


@pytest.mark.parametrize(
    "norms, wanted",
    [
        ([Norm([3.0, 4.0])], 5.0),
        ([Norm([3.0]), Norm([4.0])], 5.0),
        ([Norm([3072.0, 4096.0], 1024.0)], 5.0),
        ([Norm([3.0]), Norm([4096.0], 1024.0)], 5.0),
        ([Norm([math.inf], 65536.0)], math.inf),
        ([Norm([math.nan, math.inf])], math.nan),
        ([Norm([math.inf]), Norm([math.nan])], math.nan),
        ([Norm([5.0], 0.0)], math.nan),
        ([Norm([0.0], 0.0)], math.nan),
        ([Norm([1e200, 1e200])], math.sqrt(2) * 1e200),
        ([Norm([])], 0.0),
    ],
)
def test_gradient_norm(norms: list[Norm], wanted: float) -> None:
    values, bits = record(norms=norms)
    assert same(values["grad_norm"], wanted)
    assert bool(bits & FLAGS["grad_nonfinite"]) is not math.isfinite(wanted)


def test_a_scale_that_is_infinite_leaves_nothing_to_recover() -> None:
    assert math.isnan(record(norms=[Norm([5.0], math.inf)])[0]["grad_norm"])
    assert math.isnan(record(losses=[(5.0, math.inf)])[0]["loss"])


def test_a_part_that_could_not_be_had_makes_the_norm_unknown() -> None:
    assert record(norms=[Norm([3.0])], norm_unknown=True)[0]["grad_norm"] is None


@pytest.mark.parametrize(
    "clips, wanted",
    [
        ([(2.0, 1.0)], 1.0 / (2.0 + 1e-6)),
        ([(0.5, 1.0)], 1.0),
        ([(2.0, 1.0), (4.0, 1.0)], 1.0 / (4.0 + 1e-6)),
        ([(0.0, 1.0)], 1.0),
        ([(0.0, 0.0)], 0.0),
        ([(2.0, math.inf)], 1.0),
        ([(math.nan, 1.0)], None),
        ([(math.inf, 1.0)], None),
        ([(math.inf, 1.0), (2.0, 1.0)], None),
    ],
)
def test_clip_coefficient(clips: list[tuple[float, float]], wanted: float | None) -> None:
    values, bits = record(clips=[Clip(norm, limit, None, frozenset()) for norm, limit in clips])
    assert same(values["clip_coef"], wanted)
    assert bool(bits & FLAGS["clipped"]) is (wanted is not None and wanted < 1)


def test_clipping_of_scaled_gradients_is_flagged_and_torchs_own_factor() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([3000.0])
    norm = torch.nn.utils.clip_grad_norm_([parameter], 6.0)
    values, bits = record(clips=[Clip(float(norm), 6.0, 1024.0, frozenset())])
    assert values["clip_coef"] == pytest.approx(float(parameter.grad) / 3000.0, rel=1e-6)
    assert bits & FLAGS["scaled_clip"] and bits & FLAGS["clipped"]


@pytest.mark.parametrize("found, skipped", [([], False), ([0.0, 0.0], False), ([0.0, 1.0], True), ([2.0], True)])
def test_skipped_is_what_the_scaler_found(found: list[float], skipped: bool) -> None:
    assert bool(record(found_inf=found)[1] & FLAGS["skipped"]) is skipped


def test_everything_at_once_keeps_its_order() -> None:
    values, bits = record(
        flags=FLAGS["restored"],
        losses=[(2.0, None), (8.0, 2.0)],
        micro_batches=2,
        norms=[Norm([3.0, 4.0]), Norm([24.0], 2.0)],
        clips=[Clip(13.0, 6.5, None, frozenset()), Clip(1.0, 2.0, 3.0, frozenset())],
        found_inf=[0.0, 1.0],
        scale=512.0,
        growth_tracker=9.0,
        lr=0.25,
        data_wait=0.125,
    )
    assert (values["loss"], values["grad_norm"], values["scale"]) == (3.0, 13.0, 512.0)
    assert (values["growth_tracker"], values["lr"], values["micro_batches"]) == (9.0, 0.25, 2)
    assert values["clip_coef"] == pytest.approx(0.5, rel=1e-6) and values["data_wait"] == 0.125
    assert bits == FLAGS["restored"] | FLAGS["skipped"] | FLAGS["clipped"] | FLAGS["scaled_clip"]


def test_tensors_take_the_same_places_as_numbers() -> None:
    def fields(late: bool) -> dict[str, Any]:
        def one(value: float) -> Any:
            return take(torch.tensor(value), not late)

        return {
            "losses": [(one(6.0), one(2.0))],
            "norms": [Norm([one(3.0), one(4.0)], one(2.0))],
            "clips": [Clip(one(5.0), one(1.0), one(2.0), frozenset())],
            "found_inf": [one(0.0)],
            "scale": one(2.0),
            "lr": one(0.5),
        }

    assert record(**fields(True)) == record(**fields(False))
