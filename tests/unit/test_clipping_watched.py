"""What the probe records of clipping that is not torch's own call, and the operator's adaptive clipping in place."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_observer import Watch, model, watch  # noqa: F401 (a fixture)

from fp8console.cli.ctl import _setting
from fp8console.numerics.clipping import GradClipper
from fp8console.probe.adaptive import AutoClip
from fp8console.probe.episodes import Episodes
from fp8console.probe.steering import Steering
from fp8console.protocol.commands import CommandError, describe, validate
from fp8console.protocol.records import FLAGS


def push(net: Any, norm: float, scaler: Any = None) -> None:
    """A backward pass that leaves gradients of this norm (unscaled)."""
    net.zero_grad()
    direction = torch.tensor([1.0, 2.0, 2.0, 0.0]) / 3
    loss = (net.weight[0] * direction).sum() * norm + 0 * net.bias.sum()
    (loss if scaler is None else scaler.scale(loss)).backward()


def norm_of(net: Any) -> float:
    return math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in net.parameters()))


def test_a_clipper_is_recorded_like_torchs_clipping(watch: Watch) -> None:  # noqa: F811
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    clipper = GradClipper(net, z=None, max_norm=2.0)
    for norm in (1.0, 8.0):
        push(net, norm)
        clipper.clip_()
        clipper.step(optimizer)
    assert [step["grad_norm"] for step in watch.steps] == pytest.approx([1.0, 8.0], rel=1e-6)
    assert [step["clip_coef"] for step in watch.steps] == pytest.approx([1.0, 0.25], rel=1e-6)
    assert [step["clip_limit"] for step in watch.steps] == [2.0, 2.0]
    assert [flags & FLAGS["clipped"] for flags in watch.flags] == [0, FLAGS["clipped"]]


def test_a_clippers_groups_are_told_by_the_most_clipped(watch: Watch) -> None:  # noqa: F811
    net = torch.nn.ModuleDict({"a": model(), "b": model()})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    clipper = GradClipper(net, z=None, groups="stack", max_norm={"a": 3.0})
    push(net["a"], 12.0)
    push(net["b"], 5.0)
    clipper.clip_()
    optimizer.step()
    found = watch.steps[0]
    assert (found["grad_norm"], found["clip_coef"], found["clip_limit"]) == pytest.approx((13.0, 0.25, 3.0), rel=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_clipper_refuses_is_an_attempt_that_was_skipped(watch: Watch, fused: bool) -> None:  # noqa: F811
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=fused)
    clipper = GradClipper(net)
    for norm in (1.0, math.inf, 1.0):
        push(net, norm)
        clipper.clip_()
        clipper.step(optimizer)
    assert [flags & FLAGS["skipped"] for flags in watch.flags] == [0, FLAGS["skipped"], 0]
    assert [step["micro_batches"] for step in watch.steps] == [1, 1, 1]
    assert watch.steps[1]["clip_coef"] is None and not math.isfinite(watch.steps[1]["grad_norm"])


def test_a_clipper_that_is_told_the_scale(watch: Watch) -> None:  # noqa: F811
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    clipper = GradClipper(net, z=None, max_norm=2.0)
    push(net, 8.0, scaler)
    clipper.clip_(scaler._scale)
    scaler.step(optimizer)
    scaler.update()
    found = watch.steps[0]
    assert (found["grad_norm"], found["clip_coef"], found["clip_limit"]) == pytest.approx((8.0, 0.25, 2.0), rel=1e-6)
    assert watch.flags == [FLAGS["clipped"]] and watch.notices == []


def test_a_clipper_that_is_not_told_the_scale_clips_scaled_gradients(watch: Watch) -> None:  # noqa: F811
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    clipper = GradClipper(net, z=None, max_norm=512.0)
    push(net, 8.0, scaler)
    clipper.clip_()
    scaler.step(optimizer)
    scaler.update()
    found = watch.steps[0]
    assert (found["grad_norm"], found["clip_coef"], found["clip_limit"]) == pytest.approx((8.0, 0.25, 2.0), rel=1e-6)
    assert watch.flags == [FLAGS["clipped"] | FLAGS["scaled_clip"]] and "unscale_" in watch.notices[0]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_adaptive_clipping_at_the_step(watch: Watch, fused: bool, scaled: bool, late: bool) -> None:  # noqa: F811
    """With a scaler and fused, the gradients that the optimizer is given still carry the scale."""
    watch.observer.at_once = not late
    watch.observer.clipping.norm = AutoClip()
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
    moved = []
    for step in range(40):
        push(net, 100.0 if step in (10, 35) else 1 + 0.1 * (-1) ** step, scaler)
        before = net.weight.detach().double()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        moved.append(float((net.weight.detach().double() - before).norm()))
    assert moved[10] == pytest.approx(100.0, rel=1e-4), "still warming up"
    assert watch.steps[10]["clip_limit"] == math.inf and watch.steps[10]["clip_coef"] == 1.0
    # Of 25 norms 13 are 1.1, 11 are 0.9 and one is 100: its mean and deviation.
    first = [1.1 if step % 2 == 0 else 0.9 for step in range(25)]
    first[10] = 100.0
    mean = sum(first) / 25
    variance = sum((norm - mean) ** 2 for norm in first) / 25
    for step in range(25, 35):
        norm = 1.1 if step % 2 == 0 else 0.9
        mean = 0.97 * mean + 0.03 * norm
        variance = 0.97 * variance + 0.03 * (norm - mean) ** 2
    deviation = math.sqrt(variance)
    limit = mean + 2.5**2 / ((100 - mean) / deviation) * deviation
    assert moved[35] == pytest.approx(limit, rel=1e-3) and limit < 30
    assert watch.steps[35]["clip_limit"] == pytest.approx(limit, rel=1e-4)
    assert watch.steps[35]["grad_norm"] == pytest.approx(100.0, rel=1e-5)
    assert moved[36] == pytest.approx(1.1, rel=1e-3)
    assert not any(flags & FLAGS["scaled_clip"] for flags in watch.flags)


@pytest.mark.parametrize("size", [1e-9, 1e-6, 1e4])
@pytest.mark.parametrize("scripts", [False, True])
def test_adaptive_clipping_leaves_ordinary_norms_of_any_size_alone(
    watch: Watch,  # noqa: F811
    size: float,
    scripts: bool,
) -> None:
    """The operator's, or a GradClipper of the script: the record says what happened to the gradients."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    clipper = GradClipper(net) if scripts else None
    if not scripts:
        watch.observer.clipping.norm = AutoClip()
    for step in range(40):
        push(net, size * (50 if step == 39 else 1 + 0.1 * (-1) ** step))
        before = net.weight.grad.clone()
        if clipper is not None:
            clipper.clip_()
        optimizer.step()
        if step < 39:
            assert torch.equal(net.weight.grad, before)
    assert [step["clip_coef"] for step in watch.steps[:39]] == [1.0] * 39
    assert watch.flags[:39] == [0] * 39 and watch.flags[39] == FLAGS["clipped"]
    last = watch.steps[39]
    assert norm_of(net) == pytest.approx(last["clip_limit"], rel=1e-4, abs=0)
    assert last["clip_coef"] == pytest.approx(norm_of(net) / (50 * size), rel=1e-4, abs=0)


def test_adaptive_clipping_takes_no_norm_that_is_not_finite(watch: Watch) -> None:  # noqa: F811
    rule = watch.observer.clipping.norm = AutoClip()
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    for step in range(40):
        push(net, math.nan if step % 4 == 3 else 1.0)
        optimizer.step()
    followed = rule.follow(optimizer)
    assert followed._state is not None
    assert followed._state[:3].tolist() == pytest.approx([30, 1, 0], abs=1e-9)
    push(net, 1.0)
    net.weight.grad[0, 0] = math.inf
    before = net.weight.grad.clone()
    optimizer.step()
    assert torch.equal(net.weight.grad, before)


def test_two_optimizers_are_followed_apart(watch: Watch) -> None:  # noqa: F811
    watch.observer.clipping.norm = AutoClip()
    nets = model(), model()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.0) for net in nets]
    for step in range(30):
        for net, optimizer, level in zip(nets, optimizers, (1.0, 50.0)):
            push(net, level * (1 + 0.1 * (-1) ** step))
            optimizer.step()
    push(nets[0], 50.0)
    optimizers[0].step()
    assert norm_of(nets[0]) < 1.5
    push(nets[1], 55.0)
    optimizers[1].step()
    assert norm_of(nets[1]) == pytest.approx(55.0, rel=1e-6)


def test_the_scripts_limit_holds_until_the_norms_are_known(watch: Watch) -> None:  # noqa: F811
    rule = watch.observer.clipping.norm = AutoClip()
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    for step in range(30):
        push(net, 4.0)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        assert norm_of(net) == pytest.approx(1.0 if step < 25 else 4.0, rel=1e-5)
        assert watch.steps[-1]["clip_limit"] == pytest.approx(1.0 if step < 25 else 4.1, rel=1e-5)
        assert watch.steps[-1]["grad_norm"] == pytest.approx(4.0)
    state = rule.follow(optimizer)._state
    assert state is not None and float(state[1]) == pytest.approx(4.0), "the norms before the script clipped them"
    push(net, 4.0)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0, norm_type=math.inf)
    assert float(net.weight.grad.abs().max()) == pytest.approx(1.0), "another norm's limit is the script's affair"


# -- commands and settings ----------------------------------------------------------------------------
def test_commands() -> None:
    assert validate({"name": "set", "clip_norm": "auto", "clip_z": "3"}) == {
        "name": "set",
        "clip_norm": "auto",
        "clip_z": 3.0,
    }
    assert validate({"name": "rollback", "to": "best", "clip_norm": "auto"})["clip_norm"] == "auto"
    assert describe(validate({"name": "set", "clip_norm": "auto"})) == "set clip_norm=auto"
    assert _setting("clip_norm", "auto") == "auto" and _setting("clip_norm", None) == "off"
    assert _setting("scale", "Infinity") == "inf"
    for wrong, says in (
        ({"clip_z": "0"}, "clip_z must be over 0"),
        ({"clip_z": "nan"}, "finite"),
        ({"clip_norm": "often"}, "must be a number, auto or off, not 'often'"),
        ({"clip_norm": "2", "clip_z": "2"}, "clip_z goes with clip_norm=auto"),
        ({"clip_norm": "off", "clip_z": "2"}, "clip_z goes with clip_norm=auto"),
    ):
        with pytest.raises(CommandError, match=says):
            validate({"name": "set", **wrong})


def test_settings(watch: Watch) -> None:  # noqa: F811
    steering = Steering(watch.observer)

    def apply(**given: Any) -> dict[str, Any]:
        command = validate({"name": "set", **given})
        assert steering.refuses(command) is None
        return steering.apply(command)

    assert apply(clip_norm="auto") == {"clip_norm": "auto", "clip_z": 2.5}
    first = watch.observer.clipping.norm
    assert isinstance(first, AutoClip) and first.z == 2.5
    assert apply(clip_z=3) == {"clip_norm": "auto", "clip_z": 3.0}
    assert watch.observer.clipping.norm is first and first.z == 3.0, "what is known of the norms stays"
    assert apply(clip_norm="auto") == {"clip_norm": "auto", "clip_z": 3.0}
    assert watch.observer.clipping.norm is not first, "asked for again it begins anew"
    assert apply(clip_norm=2) == {"clip_norm": 2.0} and watch.observer.clipping.norm == 2.0
    assert apply(clip_z=2.5) == {"clip_norm": "auto", "clip_z": 2.5}
    assert apply(clip_norm="off") == {"clip_norm": None} and watch.observer.clipping.norm is None
    steering.apply({"name": "rollback", "to": 3, "clip_norm": None, "lr_scale": None, "scale": None})
    assert steering.clip_norm is None


# -- clipping too often ----------------------------------------------------------------------------
def watched(clipped: list[bool], limit: float | None = 1.0) -> list[tuple[str, int | None, dict[str, Any]]]:
    found: list[tuple[str, int | None, dict[str, Any]]] = []
    episodes = Episodes(lambda kind, text, step=None, **fields: found.append((kind, step, {"text": text, **fields})))
    for step, one in enumerate(clipped, start=1):
        episodes.note(step, {"loss": 1.0, "clip_limit": limit}, FLAGS["clipped"] * one)
    return found


def test_a_tenth_is_not_too_often() -> None:
    assert watched([step % 10 == 0 for step in range(1000)]) == []


def test_more_than_a_tenth_is_said_once() -> None:
    found = watched([step % 5 == 0 for step in range(1000)], limit=0.5)
    # Steps 1, 6, 11 ...: the first of them with a hundred steps to look at is 101.
    assert [(kind, step) for kind, step, _ in found] == [("clipping", 101)]
    assert (found[0][2]["count"], found[0][2]["limit"]) == (20, 0.5)
    assert "clipped 20 of the last 100 steps to norm 0.5" in found[0][2]["text"]
    assert "norm" not in watched([True] * 100, limit=None)[0][2]["text"]


def test_the_first_steps_are_not_a_window() -> None:
    assert watched([True] * 30 + [False] * 300) == [], "large norms at the start are usual: gone when there are 100"
    assert watched([True] * 99) == []


def test_an_episode_is_over_when_clipping_is_rare_again() -> None:
    found = watched([False] * 200 + [True] * 20 + [False] * 200 + [True] * 11)
    # The eleventh clipped step is 211. Steps 216 to 220 are left at 315: five.
    assert [(kind, step) for kind, step, _ in found] == [("clipping", 211), ("recovered", 315), ("clipping", 431)]
    assert found[1][2]["of"] == "clipping" and (found[1][2]["since"], found[1][2]["count"]) == (211, 5)
