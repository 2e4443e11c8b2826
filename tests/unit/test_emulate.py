"""FP8 put into a model's layers from outside, and the evidence that two runs began alike."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from fp8console.numerics.casts import cast_through
from fp8console.numerics.formats import FORMATS, format_of
from fp8console.probe.comparison import Comparison, wanted
from fp8console.probe.emulate import Emulation, without_low_precision
from fp8console.probe.guard import Guard
from fp8console.probe.sameness import NOTED_STEPS, Sameness, seed_everything
from fp8console.protocol.settings import Settings

pytestmark = pytest.mark.usefixtures("only_own_modules")


class FakeProbe:
    """What these parts see of a probe."""

    def __init__(self) -> None:
        self.step = 0
        self.events: list[dict[str, Any]] = []
        self.faults: list[tuple[str, str]] = []
        self.guard = Guard(lambda part, reason: self.faults.append((part, reason)))
        self.observer = type("Observer", (), {"live": True})()

    def event(self, kind: str, text: str, step: int | None = None, **fields: Any) -> None:
        self.events.append({"kind": kind, "text": text, "step": step, **fields})

    def notice(self, text: str, part: str) -> None:
        self.event("notice", text, part=part)


@pytest.fixture
def probe() -> Iterator[FakeProbe]:
    """A probe whose global hooks are gone after the test."""
    kept = [dict(hooks) for hooks in (torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks)]
    yield FakeProbe()
    torch_module._global_forward_pre_hooks.clear()
    torch_module._global_forward_pre_hooks.update(kept[0])
    torch_module._global_forward_hooks.clear()
    torch_module._global_forward_hooks.update(kept[1])


def emulate(probe: FakeProbe, fmt: str = "e4m3fn", scaling: str = "none", spared: tuple[str, ...] = ()) -> Emulation:
    made = Emulation(probe, fmt, scaling, spared)
    made.arm()
    return made


def scaled(x: torch.Tensor, name: str, scaling: str) -> torch.Tensor:
    """``x`` through a format by the definition, saturating, its amax taken to the maximum first when scaled."""
    factor = format_of(name).max / float(x.abs().max()) if scaling == "dynamic" else 1.0
    return cast_through(x * factor, name, saturate=True) / factor


@pytest.mark.parametrize("scaling", ["none", "dynamic"])
@pytest.mark.parametrize("fmt", [fmt.name for fmt in FORMATS])
def test_layers_work_on_rounded_operands_and_their_gradients_are_rounded(
    probe: FakeProbe, fmt: str, scaling: str
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(16, 8)
    x = torch.randn(4, 16, requires_grad=True)
    weight_before = layer.weight
    emulate(probe, fmt, scaling)
    y = layer(x)
    cast_x, cast_w = scaled(x.detach(), fmt, scaling), scaled(layer.weight.detach(), fmt, scaling)
    torch.testing.assert_close(y, nn.functional.linear(cast_x, cast_w, layer.bias), rtol=1e-6, atol=1e-6)
    assert not torch.equal(y, nn.functional.linear(x, layer.weight, layer.bias))

    grad = torch.randn(4, 8)
    y.backward(grad)
    cast_grad = scaled(grad, "e5m2fnuz" if fmt.endswith("fnuz") else "e5m2", scaling)
    torch.testing.assert_close(x.grad, cast_grad @ cast_w, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(layer.weight.grad, cast_grad.t() @ cast_x, rtol=1e-5, atol=1e-6)
    assert layer.weight is weight_before and list(layer.state_dict()) == ["weight", "bias"]
    assert "weight" not in layer.__dict__ and not probe.faults


def test_gradients_without_a_scale_overflow_as_hardware_lets_a_scaler_see(probe: FakeProbe) -> None:
    layer = nn.Linear(2, 2)
    emulate(probe)
    layer(torch.ones(1, 2)).backward(torch.tensor([[1e6, 1.0]]))
    assert (
        layer.weight.grad is not None and layer.weight.grad[0].isinf().all() and layer.weight.grad[1].isfinite().all()
    )


@pytest.mark.parametrize("fmt", [fmt.name for fmt in FORMATS])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_was_not_finite_stays_so_under_a_scale(probe: FakeProbe, fmt: str, bad: float) -> None:
    layer = nn.Linear(2, 2)
    emulate(probe, fmt, "dynamic")
    assert not layer(torch.tensor([[bad, 1.0]])).isfinite().any()
    layer(torch.ones(1, 2)).backward(torch.tensor([[bad, 1.0]]))
    assert layer.weight.grad is not None
    assert not layer.weight.grad[0].isfinite().any() and layer.weight.grad[1].isfinite().all()


class OwnForward(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)  # no bias: its own


def test_subclasses_convolutions_and_spared_layers(probe: FakeProbe) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        OrderedDict(conv=nn.Conv2d(1, 4, 3), relu=nn.ReLU(inplace=True), flat=nn.Flatten(), own=OwnForward(64, 8))
    )
    model.add_module("head", nn.Linear(8, 2))
    x = torch.randn(2, 1, 6, 6)
    made = emulate(probe, spared=("hea*", "tail"))
    y = model(x)
    conv, own, head = model.conv, model.own, model.head
    wanted = nn.functional.conv2d(cast_through(x, "e4m3fn"), cast_through(conv.weight, "e4m3fn"), conv.bias).relu()
    wanted = cast_through(wanted.flatten(1), "e4m3fn") @ cast_through(own.weight, "e4m3fn").t()
    torch.testing.assert_close(y, wanted @ head.weight.t() + head.bias)
    y.sum().backward()
    made.at_boundary(1)
    made.at_boundary(2)
    (event,) = [event for event in probe.events if event["kind"] == "emulation"]
    assert event["layers"] == ["conv", "own"] and event["left"] == ["head"]
    # 4 * 9 weights of the convolution and 64 * 8 of the layer; 4 + 8 biases and the head's 18 are not among them.
    assert event["share"] == pytest.approx(548 / (548 + 12 + 18))
    assert event["text"].startswith("2 layers with 94.8% of the parameters: e4m3fn, gradients e5m2")
    assert event["text"].endswith("not in FP8: head")
    notices = [event["text"] for event in probe.events if event["kind"] == "notice"]
    assert notices == ["no layer has a name like 'tail', the pattern of layers to leave out"]


def test_a_library_s_own_linear_layer(probe: FakeProbe) -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D(4, 8)
    x = torch.randn(3, 8)
    emulate(probe)
    torch.testing.assert_close(
        conv1d(x), cast_through(x, "e4m3fn") @ cast_through(conv1d.weight, "e4m3fn") + conv1d.bias
    )


def test_a_forward_that_raises_leaves_the_layer_as_it_was(probe: FakeProbe) -> None:
    layer = nn.Linear(4, 4)
    emulate(probe)
    with pytest.raises(RuntimeError):
        layer(torch.ones(2, 5))
    assert "weight" not in layer.__dict__
    assert layer(torch.ones(2, 4)).isfinite().all()


def test_what_cannot_be_rounded_is_left_and_said(probe: FakeProbe) -> None:
    layer, normed = nn.Linear(4, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    x = torch.randn(3, 4)
    plain = layer(x), normed(x)
    emulate(probe)
    assert torch.equal(layer(input=x), plain[0]) and torch.equal(normed(x), plain[1])
    said = [event["text"] for event in probe.events if event["kind"] == "notice"]
    assert len(said) == 2 and "by keyword" in said[0] and "makes its weight anew" in said[1]


def test_a_failing_emulation_switches_itself_off(probe: FakeProbe, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(4, 4)
    x = torch.randn(3, 4)
    plain = layer(x)
    made = emulate(probe)
    monkeypatch.setattr(made, "_cast", lambda x: 1 / 0)
    assert torch.equal(layer(x), plain)
    assert probe.faults and probe.faults[0][0] == "emulation"
    assert torch.equal(layer(x), plain) and "weight" not in layer.__dict__


def test_full_precision_switches_autocast_off(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.amp.autocast_mode.autocast.__init__
    without_low_precision(lambda owner, name, make: monkeypatch.setattr(owner, name, make(original)))
    with torch.autocast("cpu", torch.bfloat16):
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.float32
        assert not torch.is_autocast_enabled("cpu")


# -- seeds and fingerprints -------------------------------------------------------------------------------------------
def test_seeds_reach_torch_random_and_numpy() -> None:
    drawn = []
    for _ in range(2):
        seed_everything(2**40 + 7)
        drawn.append((torch.rand(1).item(), random.random(), float(np.random.rand())))
    assert drawn[0] == drawn[1]
    seed_everything(8)
    assert torch.rand(1).item() != drawn[0][0] and random.random() != drawn[0][1]


def fingerprints(probe: FakeProbe, what: str) -> list[dict[str, Any]]:
    return [event for event in probe.events if event["kind"] == "fingerprint" and event["what"] == what]


def test_fingerprints_tell_other_weights_and_other_inputs(probe: FakeProbe) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    x = torch.randn(2, 4)
    digests = []
    for change in (None, "weights", "inputs", None):
        probe.events.clear()
        with torch.no_grad():
            model[0].weight[1, 2] += 1.0 if change == "weights" else 0.0
        made = Sameness(probe)
        made.arm()
        model(x + (1.0 if change == "inputs" else 0.0))
        made.at_boundary(NOTED_STEPS)
        (weights,), (inputs,) = fingerprints(probe, "weights"), fingerprints(probe, "inputs")
        assert inputs["about"] == ["float32[2, 4]"] and inputs["step"] == 1
        digests.append((weights["digest"], inputs["digest"]))
    assert digests[0][1] == digests[1][1] and digests[0][0] != digests[1][0]
    assert digests[1][0] == digests[2][0] and digests[1][1] != digests[2][1]
    assert digests[3] == digests[1]


def test_one_fingerprint_a_step_none_in_evaluation_and_none_later(probe: FakeProbe) -> None:
    model = nn.Linear(4, 4)
    made = Sameness(probe)
    made.arm()
    with torch.no_grad():
        model(torch.ones(1, 4))
    model.eval()
    model(torch.ones(1, 4))
    model.train()
    for step in range(1, NOTED_STEPS + 5):
        model(torch.ones(1, 4))
        model(torch.zeros(1, 4))  # a second micro-batch
        probe.step = step
        made.at_boundary(step)
    assert [event["step"] for event in fingerprints(probe, "inputs")] == list(range(1, NOTED_STEPS + 1))
    assert len(fingerprints(probe, "weights")) == 1 and not torch_module._global_forward_pre_hooks


# -- the settings that ask for all this -------------------------------------------------------------------------------
def test_a_run_that_is_not_compared_has_none_of_it() -> None:
    assert not wanted(Settings())
    assert wanted(Settings(seed=0)) and wanted(Settings(stop_after=1)) and wanted(Settings(emulate="e5m2"))


def test_a_comparison_ends_at_its_step_and_only_there(probe: FakeProbe) -> None:
    comparison = Comparison(probe, Settings(stop_after=3))
    comparison.begin()
    assert [comparison.at_boundary(step) for step in range(1, 6)] == [False, False, True, False, False]
    never = Comparison(probe, Settings(seed=1))
    never.begin()
    assert not any(never.at_boundary(step) for step in range(1, 20))
