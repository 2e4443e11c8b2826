"""Clipping: thresholds by hand, the adaptive rule against a plain Python reference in float64, what is not finite."""

from __future__ import annotations

import copy
import math
import pickle
import random
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fp8console.numerics import clipping
from fp8console.numerics.clipping import (
    GradClipper,
    depth_margin,
    depth_z,
    layer_groups,
    taken_in,
    threshold_from_baseline,
    thresholds_from_baseline,
    z_limit,
)

NAN, INF = math.nan, math.inf


# -- thresholds from a baseline ----------------------------------------------------------------------------------------
def test_the_threshold_is_the_quantile_times_the_factor() -> None:
    assert threshold_from_baseline(range(1, 102)) == 96 * 1.5, "of 1 to 101 exactly 95 lie below 96"
    assert threshold_from_baseline([1.0, 3.0], quantile=0.5, factor=1.0) == 2.0
    assert threshold_from_baseline([5.0], quantile=0.95, factor=2.0) == 10.0
    assert threshold_from_baseline([4, 1, 3, 2], quantile=1.0, factor=1.0) == 4.0
    assert threshold_from_baseline([4, 1, 3, 2], quantile=0.0, factor=1.0) == 1.0
    assert threshold_from_baseline(torch.arange(1.0, 102.0)) == 144.0


def test_norms_that_are_not_finite_are_left_out() -> None:
    assert threshold_from_baseline([NAN, 1.0, INF, 3.0, -INF], quantile=0.5, factor=1.0) == 2.0
    assert threshold_from_baseline([NAN, INF]) is None
    assert threshold_from_baseline([]) is None
    assert threshold_from_baseline([0.0, 0.0]) is None, "a threshold of 0 would stop the training"


@pytest.mark.parametrize("given", [{"quantile": -0.1}, {"quantile": 1.1}, {"factor": 0}, {"factor": INF}])
def test_what_makes_no_threshold_is_refused(given: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        threshold_from_baseline([1.0], **given)


def test_deeper_stacks_get_a_smaller_margin() -> None:
    assert [depth_margin(layers) for layers in (1, 4, 16)] == [1.0, 0.5, 0.25]
    norms = {"head": [2.0], "shallow": [2.0], "deep": [2.0]}
    found = thresholds_from_baseline(norms, {"shallow": 4, "deep": 16})
    assert found == {"head": 3.0, "shallow": 2.5, "deep": 2.25}
    assert depth_z(2.5, 0.25) == 2.125 and depth_z(1.5, 0.25) == 1.5
    with pytest.raises(ValueError, match="at least one layer"):
        depth_margin(0)


# -- the adaptive rule ------------------------------------------------------------------------------------------
class Reference:
    """ZClip in plain Python floats, from its paper's formulas; what is ours is marked."""

    def __init__(self, z: float, decay: float, warmup: int) -> None:
        self.z, self.decay, self.warmup = z, decay, warmup
        self.norms: list[float] = []
        self.mean = self.variance = 0.0

    def limit(self, norm: float) -> float:
        if not math.isfinite(norm) or len(self.norms) < self.warmup or self.mean <= 0:
            return INF
        deviation = max(math.sqrt(self.variance), 0.01 * self.mean)  # the floor is ours
        score = (norm - self.mean) / deviation
        return self.mean + (self.z if score <= self.z else self.z**2 / score) * deviation

    def take(self, norm: float) -> None:
        if not math.isfinite(norm):
            return
        if len(self.norms) < self.warmup:
            self.norms.append(norm)
            self.mean = math.fsum(self.norms) / len(self.norms)
            self.variance = math.fsum((value - self.mean) ** 2 for value in self.norms) / len(self.norms)
        else:
            self.mean = self.decay * self.mean + (1 - self.decay) * norm
            self.variance = self.decay * self.variance + (1 - self.decay) * (norm - self.mean) ** 2


NORMS = st.lists(
    st.one_of(st.floats(0.01, 100), st.floats(0.01, 100), st.sampled_from([0.0, NAN, INF, 1e4])), max_size=40
)


@settings(max_examples=100, deadline=None)
@given(NORMS, st.floats(0.5, 5), st.floats(0.5, 0.99), st.integers(2, 10))
def test_the_rule_against_plain_python(norms: list[float], z: float, decay: float, warmup: int) -> None:
    reference, state = Reference(z, decay, warmup), torch.zeros(1, 5, dtype=torch.float64)
    for count, norm in enumerate(norms, start=1):
        given = torch.tensor([norm], dtype=torch.float64)
        limit = z_limit(given, state, z, warmup)
        wanted = reference.limit(norm)
        # A score right at the limit may fall on either side of it, and there both sides give the same.
        assert float(limit) == pytest.approx(wanted, rel=1e-9)
        state = taken_in(torch.minimum(given, limit), state, decay, warmup)
        reference.take(min(norm, wanted) if math.isfinite(norm) else norm)
        assert state[0, 1:3].tolist() == pytest.approx([reference.mean, reference.variance], rel=1e-9, abs=1e-12)
        assert state[0, 0] == sum(map(math.isfinite, norms[:count]))


def test_the_farther_out_the_closer_to_the_mean() -> None:
    state = torch.tensor([[25.0, 10.0, 4.0, 0.0, 0.0]], dtype=torch.float64)  # mean 10, deviation 2

    def limit(norm: float) -> float:
        return float(z_limit(torch.tensor([norm], dtype=torch.float64), state, 2.5))

    assert limit(3.0) == limit(15.0) == 15.0, "up to a score of 2.5 nothing is clipped"
    assert limit(20.0) == 10 + 2.5**2 / 5 * 2
    assert limit(1e12) == pytest.approx(10.0)
    assert limit(NAN) == limit(INF) == INF, "never clipped: it is skipped"
    assert float(z_limit(torch.tensor([20.0]), torch.tensor([[24.0, 10, 4, 0, 0]]), 2.5)) == INF, "still warming up"


def test_constant_norms_are_not_abnormal_for_their_last_digits() -> None:
    state = torch.tensor([[25.0, 10.0, 0.0, 0.0, 0.0]])
    assert float(z_limit(torch.tensor([10.2]), state, 2.5)) == pytest.approx(10.25)


def test_gradients_that_were_all_zero_may_become_something() -> None:
    state = torch.zeros(1, 5)
    for _ in range(30):
        state = taken_in(torch.zeros(1), state)
    assert float(z_limit(torch.ones(1), state, 2.5)) == INF


# -- groups ------------------------------------------------------------------------------------------
class Net(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)) for _ in range(layers))
        self.head = nn.Linear(3, 2, bias=False)
        self.bias = nn.Parameter(torch.zeros(2))


def test_groups() -> None:
    net = Net()
    whole = layer_groups(net)
    assert [(g.name, len(g.parameters), g.layers) for g in whole] == [("model", len(list(net.parameters())), 1)]
    found = {(g.name, len(g.parameters), g.layers) for g in layer_groups(net, "stack")}
    assert found == {("embed", 1, 1), ("blocks", 16, 4), ("head", 1, 1), ("bias", 1, 1)}
    found = {(g.name, len(g.parameters), g.layers) for g in layer_groups(net, "layer")}
    assert found == {("embed", 1, 1), ("head", 1, 1), ("bias", 1, 1)} | {(f"blocks.{i}", 4, 4) for i in range(4)}
    found = {(g.name, len(g.parameters), g.layers) for g in layer_groups(net, ["blocks.[01].*", "*.weight"])}
    assert found == {("blocks.[01].*", 8, 1), ("*.weight", 6, 1), ("rest", 5, 1)}
    sequential = layer_groups(nn.Sequential(OrderedDict([("0", nn.Linear(2, 2)), ("1", nn.Linear(2, 2))])), "stack")
    assert [(g.name, g.layers) for g in sequential] == [("model", 2)]
    for groups in ("model", "stack", "layer", ["*.weight"]):
        ids = [id(p) for group in layer_groups(net, groups) for p in group.parameters]
        assert sorted(ids) == sorted(map(id, net.parameters())), "each parameter in one group"
    with pytest.raises(ValueError, match="'model', 'stack', 'layer'"):
        layer_groups(net, "blocks")


def test_deeper_stacks_are_clipped_earlier() -> None:
    limits = [GradClipper(Net(layers), groups="stack", z=3.0).z for layers in (1, 4, 16)]
    assert [max(z) for z in limits if z] == [3.0] * 3, "what is no stack has the whole margin"
    assert [min(z) for z in limits if z] == [3.0, 2.5, 2.25]
    wished = GradClipper(Net(16), groups="stack", z=3.0, margins={"blocks": 0.5})
    assert dict(zip([group.name for group in wished.groups], wished.z or []))["blocks"] == 2.5
    assert GradClipper(Net(16), z=3.0).z == [3.0], "as published where the model is one group"


# -- the clipper ------------------------------------------------------------------------------------------
def fill(model: nn.Module, norms: dict[str, float], groups: Any = "model", dtype: Any = None) -> None:
    """Random gradients with the given L2 norm for each group."""
    for group in layer_groups(model, groups):
        values = [torch.randn(p.shape, dtype=torch.float64) for p in group.parameters]
        total = math.sqrt(sum(float((v * v).sum()) for v in values))
        for parameter, value in zip(group.parameters, values):
            parameter.grad = (value * (norms[group.name] / total)).to(dtype or parameter.dtype)


def norm_of(parameters: Any) -> float:
    return math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in parameters))


def test_a_fixed_limit_clips_as_torch_does() -> None:
    ours, theirs = Net(), Net()
    theirs.load_state_dict(ours.state_dict())
    torch.manual_seed(1)
    fill(ours, {"model": 7.0})
    for a, b in zip(ours.parameters(), theirs.parameters()):
        b.grad = a.grad.clone()
    clipper = GradClipper(ours, z=None, max_norm=2.0)
    total = clipper.clip_()
    assert float(total) == pytest.approx(float(nn.utils.clip_grad_norm_(theirs.parameters(), 2.0)), rel=1e-6)
    assert float(total) == pytest.approx(7.0, rel=1e-6)
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=0)
    fill(ours, {"model": 1.9})
    before = [p.grad.clone() for p in ours.parameters()]
    clipper.clip_()
    assert all(torch.equal(p.grad, old) for p, old in zip(ours.parameters(), before))


@pytest.mark.parametrize("groups", ["model", "stack", "layer"])
def test_each_group_follows_its_own_norms(groups: str) -> None:
    """A whole course of norms per group, each with its own level, noise and spikes, against the reference."""
    torch.manual_seed(3)
    noise = random.Random(3)
    net = Net()
    clipper = GradClipper(net, groups=groups, decay=0.9, warmup=5)
    names = [group.name for group in clipper.groups]
    references = {name: Reference(z, 0.9, 5) for name, z in zip(names, clipper.z or [])}
    clipped = dict.fromkeys(names, 0)
    for step in range(60):
        norms = {name: (1 + i) * math.exp(noise.gauss(0, 0.1)) for i, name in enumerate(names)}
        if step % 13 == 12:
            norms[names[step % len(names)]] *= 20
        fill(net, norms, groups)
        clipper.clip_()
        for group in clipper.groups:
            reference, norm = references[group.name], norms[group.name]
            limit = reference.limit(norm)
            clipped[group.name] += norm > limit
            assert norm_of(group.parameters) == pytest.approx(min(norm, limit), rel=1e-4)
            reference.take(min(norm, limit))
    assert sum(clipped.values()) >= 4
    frequency = clipper.clip_frequency()
    assert {name: round(60 * (share or 0)) for name, share in frequency.items()} == clipped


@pytest.mark.parametrize("size", [1e-9, 1e-6, 1e-3, 1.0, 1e6])
def test_without_a_spike_nothing_is_touched(size: float) -> None:
    net = Net()
    clipper = GradClipper(net)
    for step in range(50):
        fill(net, {"model": size * (1 + 0.1 * math.sin(step))})
        before = [p.grad.clone() for p in net.parameters()]
        clipper.clip_()
        assert all(torch.equal(p.grad, old) for p, old in zip(net.parameters(), before))


@pytest.mark.parametrize("size", [1e-9, 1e-3, 1e6])
def test_a_spike_is_brought_to_its_limit_whatever_the_size_of_the_norms(size: float) -> None:
    net, reference = Net(), Reference(2.5, 0.97, 25)
    clipper = GradClipper(net)
    for step in range(30):
        norm = size * (1 + 0.1 * math.sin(step)) * (50 if step == 29 else 1)
        limit = reference.limit(norm)
        fill(net, {"model": norm})
        clipper.clip_()
        assert norm_of(net.parameters()) == pytest.approx(min(norm, limit), rel=1e-4, abs=0)
        reference.take(min(norm, limit))
    assert clipper.clip_frequency() == {"model": pytest.approx(1 / 30)}


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("options", [{"z": None, "max_norm": 0.1}, {"warmup": 2}, {"groups": "layer", "warmup": 2}])
def test_a_norm_that_is_not_finite_touches_nothing_and_is_not_taken_in(value: float, options: dict[str, Any]) -> None:
    net = Net()
    clipper = GradClipper(net, **options)
    groups = options.get("groups", "model")
    for _ in range(3):
        fill(net, {g.name: 1.0 for g in clipper.groups}, groups)
        clipper.clip_()
    state = clipper.state_dict()["state"]
    fill(net, {g.name: 100.0 for g in clipper.groups}, groups)
    net.head.weight.grad[0, 0] = value  # type: ignore[index]
    before = [p.grad.clone() for p in net.parameters()]
    total = clipper.clip_()
    assert not math.isfinite(float(total)) and bool(clipper.should_skip)
    assert all(torch.equal(p.grad, old) or p is net.head.weight for p, old in zip(net.parameters(), before))
    assert torch.equal(clipper.state_dict()["state"], state)
    fill(net, {g.name: 0.01 for g in clipper.groups}, groups)
    clipper.clip_()
    assert not bool(clipper.should_skip)


@pytest.mark.parametrize("fused", [False, True])
def test_step_leaves_out_what_is_not_finite_whole(fused: bool) -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5, fused=fused)
    clipper = GradClipper(net, max_norm=1.0)
    fill(net, {"model": 1.0})
    clipper.clip_()
    clipper.step(optimizer)
    weights = [p.detach().clone() for p in net.parameters()]
    net.head.weight.grad[0, 0] = INF  # type: ignore[index]
    clipper.clip_()
    clipper.step(optimizer)
    assert all(torch.equal(p, old) for p, old in zip(net.parameters(), weights)), "weight decay and momentum too"
    assert clipper.skipped is (not fused) and not hasattr(optimizer, "found_inf")
    fill(net, {"model": 1.0})
    clipper.clip_()
    clipper.step(optimizer)
    assert all(not torch.equal(p, old) for p, old in zip(net.parameters(), weights)) and not clipper.skipped


def test_a_scaler_refuses_by_itself() -> None:
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    clipper = GradClipper(net, max_norm=0.5)
    for factor in (1.0, INF, 1.0):
        optimizer.zero_grad()
        scaler.scale(net(torch.ones(2, 3)).sum() * factor).backward()
        scaler.unscale_(optimizer)
        clipper.clip_()
        weights = net.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(net.weight, weights) is (factor == INF)
    assert scaler.get_scale() == 512.0


def test_gradients_that_carry_the_scale() -> None:
    net = Net()
    clipper = GradClipper(net, z=None, max_norm=2.0)
    fill(net, {"model": 8.0 * 1024})
    assert float(clipper.clip_(torch.tensor(1024.0))) == pytest.approx(8.0, rel=1e-6)
    assert norm_of(net.parameters()) == pytest.approx(2.0 * 1024, rel=1e-5)
    assert clipper.norms is not None and float(clipper.norms) == pytest.approx(8.0, rel=1e-6)


def test_both_limits_the_smaller_holds_and_a_group_may_have_none() -> None:
    net = Net()
    clipper = GradClipper(net, max_norm=0.5)
    fill(net, {"model": 1.0})
    clipper.clip_()
    assert norm_of(net.parameters()) == pytest.approx(0.5, rel=1e-5), "also while z warms up"
    clipper = GradClipper(net, z=None, groups="stack", max_norm={"blocks": 0.5})
    fill(net, {"embed": 9.0, "blocks": 9.0, "head": 9.0, "bias": 9.0}, "stack")
    clipper.clip_()
    assert norm_of(net.blocks.parameters()) == pytest.approx(0.5, rel=1e-5)
    assert norm_of(net.head.parameters()) == pytest.approx(9.0, rel=1e-5)


def test_a_group_without_gradients_has_no_norm() -> None:
    net = Net()
    clipper = GradClipper(net, groups="stack", warmup=2)
    for step in range(10):
        fill(net, dict.fromkeys(("embed", "blocks", "head", "bias"), 1.0), "stack")
        if step % 2:
            net.embed.weight.grad = None
        clipper.clip_()
    place = [group.name for group in clipper.groups].index("embed")
    assert clipper.state_dict()["state"][place].tolist() == pytest.approx([5, 1, 0, 5, 0], abs=1e-6)
    for parameter in net.parameters():
        parameter.grad = None
    assert float(clipper.clip_()) == 0.0


def test_low_precision_and_mixed_gradients() -> None:
    net = Net().to(torch.bfloat16)
    net.head.to(torch.float32)
    clipper = GradClipper(net, z=None, max_norm=1.0)
    fill(net, {"model": 50.0})
    assert float(clipper.clip_()) == pytest.approx(50.0, rel=0.01)
    assert norm_of(net.parameters()) == pytest.approx(1.0, rel=0.01)
    assert net.blocks[0][0].weight.grad.dtype is torch.bfloat16


def test_state_goes_on_where_it_was() -> None:
    torch.manual_seed(0)
    net = Net()
    clipper = GradClipper(net, groups="layer", warmup=3)
    for _ in range(6):
        fill(net, {g.name: random.uniform(1, 2) for g in clipper.groups}, "layer")
        clipper.clip_()
    again = GradClipper(net, groups="layer", warmup=3)
    again.load_state_dict(pickle.loads(pickle.dumps(clipper.state_dict())))
    for other in (again, copy.deepcopy(clipper)):
        assert torch.equal(other.state_dict()["state"], clipper.state_dict()["state"])
    with pytest.raises(ValueError, match="other groups"):
        GradClipper(net).load_state_dict(clipper.state_dict())
    with pytest.raises(ValueError, match="shape"):
        GradClipper(net).load_state_dict({"groups": ["model"], "state": torch.zeros(2, 5)})
    assert GradClipper(net).clip_frequency() == {"model": None}


@pytest.mark.parametrize(
    "options, says",
    [
        ({"z": None}, "nothing would be clipped"),
        ({"z": 0.0}, "z must be"),
        ({"max_norm": -1.0}, "max_norm must be"),
        ({"max_norm": INF}, "max_norm must be"),
        ({"max_norm": {"model": NAN}}, "max_norm of 'model' must be"),
        ({"max_norm": {"blocks": 1.0}}, "no group 'blocks'; groups: model"),
        ({"margins": {"model": 2.0}}, "margins must lie"),
        ({"decay": 1.0}, "decay must lie"),
        ({"warmup": 1}, "warmup must be"),
        ({"groups": "each"}, "groups must be"),
    ],
)
def test_what_can_not_be_is_refused_in_one_line(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        GradClipper(Net(), **options)
    assert "\n" not in str(caught.value)


def test_sparse_gradients_are_refused_before_anything_is_changed() -> None:
    net = nn.ModuleDict({"linear": nn.Linear(2, 2), "embed": nn.Embedding(4, 2, sparse=True)})
    net["linear"](net["embed"](torch.tensor([1]))).sum().mul(100).backward()
    before = net["linear"].weight.grad.clone()
    with pytest.raises(TypeError, match="sparse gradients"):
        GradClipper(net, z=None, max_norm=0.1, groups="layer").clip_()
    assert torch.equal(net["linear"].weight.grad, before)


@pytest.mark.parametrize("groups", ["model", "layer"])
def test_nothing_is_read_from_the_device(groups: str) -> None:
    """Tensors on the meta device have no values: whatever needs one would raise here."""
    with torch.device("meta"):
        net = Net()
    for parameter in net.parameters():
        parameter.grad = torch.empty_like(parameter)
    clipper = GradClipper(net, groups=groups, max_norm=1.0)
    for scale in (None, torch.empty((), device="meta")):
        assert clipper.clip_(scale).is_meta and clipper.should_skip.is_meta
    with pytest.raises(RuntimeError):
        bool(clipper.should_skip)


def test_a_level_that_moves_slowly_is_followed() -> None:
    """The norm falls by half over 400 steps, as it does early in training: hardly anything is clipped on the way."""
    state, clipped, noise = torch.zeros(1, 5, dtype=torch.float64), 0, random.Random(5)
    for step in range(400):
        norm = torch.tensor([2.0 ** (1 - step / 400) * math.exp(noise.gauss(0, 0.1))], dtype=torch.float64)
        limit = clipping.z_limit(norm, state, 2.5)
        clipped += bool(norm > limit)
        state = clipping.taken_in(torch.minimum(norm, limit), state)
    assert clipped < 400 * 0.04
    assert float(state[0, 1]) == pytest.approx(1.0, rel=0.1)
