"""The sampling of layers on real trainings in this process: what is measured, against plain PyTorch, what is not."""

from __future__ import annotations

import copy
import gc
import json
import math
import pickle
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8console.probe import hooks, layer_sampling, layers
from fp8console.probe.core import Probe
from fp8console.protocol import paths
from fp8console.protocol.settings import Settings
from fp8console.runs.layers import LayerRecords

EVERY_STEP = {"layer_steps": 1, "layer_budget": 1.0, "snapshot_budget": 0.0}


class Watched:
    """A probe in this process, and what it has recorded of the layers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.patches = hooks.Patches()
        self.probe: Any = None

    def begin(self, **settings: Any) -> None:
        self.probe = Probe(self.folder, None, Settings(**{**EVERY_STEP, **settings}))
        hooks.install(self.probe.observer, self.patches)

    def end(self) -> LayerRecords:
        self.probe.close()
        self.patches.undo()
        assert self.probe.guard.off == {}
        return LayerRecords(self.folder)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    for module in (layers, layer_sampling):  # another test in this process may have compiled something
        monkeypatch.setattr(module, "compiling", lambda: False)
    made = Watched(tmp_path)
    yield made
    made.patches.undo()


class Truth:
    """The figures of the same tensors, taken by the test's own hooks: kind -> layer -> tensors as they came."""

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, list[Tensor]]] = {}

    def note(self, kind: str, name: str, tensor: Tensor) -> None:
        self.seen.setdefault(kind, {}).setdefault(name, []).append(tensor.detach().clone())

    def agree(self, records: LayerRecords) -> None:
        """Of the newest sample: amax, L2, mean and elements of every layer and kind, and no others."""
        found = {
            kind: {row["name"]: row for row in records.latest(kind)}
            for kind in ("weight", "gradient", "activation", "activation_gradient")
        }
        assert {kind: set(rows) for kind, rows in found.items() if rows} == {
            kind: set(tensors) for kind, tensors in self.seen.items()
        }
        for kind, by_name in self.seen.items():
            for name, tensors in by_name.items():
                row = found[kind][name]
                x = torch.cat([tensor.double().reshape(-1) for tensor in tensors])
                assert row["elements"] == x.numel() and row["nonfinite"] == 0, (kind, name)
                assert row["amax"] == pytest.approx(float(x.abs().max()), rel=1e-6), (kind, name)
                assert row["l2"] == pytest.approx(float(x.norm()), rel=1e-5), (kind, name)
                assert row["mean"] == pytest.approx(float(x.mean()), abs=1e-5 * row["amax"]), (kind, name)
                top = 448.0 if kind in ("weight", "activation") else 57344.0
                assert row["headroom"] == pytest.approx(math.log2(top) - math.log2(row["amax"]), abs=1e-4)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def loss_of(net: Callable[[Tensor], Any]) -> Tensor:
    return net(torch.randn(5, 6)).square().mean()


def step(net: Any, optimizer: Any, scaler: Any = None, unscale: bool = False, clip: float | None = None) -> None:
    optimizer.zero_grad()
    loss = loss_of(net)
    (loss if scaler is None else scaler.scale(loss)).backward()
    if unscale:
        scaler.unscale_(optimizer)
    if clip is not None:
        nn.utils.clip_grad_norm_(net.parameters(), clip)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def truth_of(net: nn.Sequential, scale: float = 1.0) -> Truth:
    """What one step on ``net`` measures, from a copy of it and the same random numbers."""
    truth, state = Truth(), torch.get_rng_state()
    twin = copy.deepcopy(net)
    outputs = {}
    for name, module in twin.named_children():
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            module.register_forward_hook(lambda module, inputs, out, name=name: outputs.update({name: out}))
    loss = loss_of(twin) * scale
    for out in outputs.values():
        out.retain_grad()
    loss.backward()
    torch.set_rng_state(state)
    for name, out in outputs.items():
        weight = twin.get_submodule(name).weight
        truth.note("weight", name, weight)
        truth.note("gradient", name, weight.grad)
        truth.note("activation", name, out)
        truth.note("activation_gradient", name, out.grad)
    return truth


# -- what is measured ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("late", [False, True])
def test_all_four_kinds(watched: Watched, late: bool) -> None:
    watched.begin(read_late=late)
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        step(net, optimizer)
    truth = truth_of(net)
    step(net, optimizer)
    records = watched.end()
    truth.agree(records)
    steps, values = records.samples("weight", "scale")
    assert steps.tolist() == [2, 3, 4, 5] and (values == 1).all()  # the first step's model is not known before it
    assert [layer["name"] for layer in records.layers] == ["0", "2", "3", "4"]
    assert records.layers[0] == {
        "name": "0",
        "type": "Linear",
        "shape": [8, 6],
        "parameters": 56,
        "weights": ["weight"],
        "kinds": ["weight", "gradient", "activation", "activation_gradient"],
    }
    assert records.formats["forward"]["name"] == "e4m3fn" and records.formats["backward"]["name"] == "e5m2"


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("clip", [None, 1e-3])
def test_values_are_as_seen_before_unscaling_and_clipping(watched: Watched, unscale: bool, clip: float | None) -> None:
    watched.begin()
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    step(net, optimizer, scaler, unscale, clip)
    truth = truth_of(net, 1024.0)
    step(net, optimizer, scaler, unscale, clip)
    records = watched.end()
    truth.agree(records)
    for kind, scale in (("weight", 1), ("activation", 1), ("gradient", 1024), ("activation_gradient", 1024)):
        assert {row["scale"] for row in records.latest(kind)} == {scale}


def test_a_skipped_step_shows_what_was_not_finite(watched: Watched) -> None:
    watched.begin()
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    for _ in range(2):
        step(net, optimizer, scaler)
    records = watched.end()
    rows = records.latest("activation_gradient") + records.latest("gradient")
    assert sum(row["nonfinite"] for row in rows) > 0
    assert all(not math.isfinite(row["l2"]) for row in rows if row["nonfinite"])
    assert all(row["step"] == 2 and row["scale"] == 2.0**126 for row in rows)


def test_the_first_micro_batch_counts(watched: Watched) -> None:
    watched.begin()
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step(net, optimizer)
    truth = truth_of(net)
    optimizer.zero_grad()
    gradient = torch.zeros_like(net[0].weight)
    for _ in range(3):
        loss_of(net).backward()
        gradient = net[0].weight.grad.clone()
    optimizer.step()
    records = watched.end()
    found = {kind: records.latest(kind) for kind in ("activation", "activation_gradient", "gradient")}
    for kind in ("activation", "activation_gradient"):
        wanted = [float(tensors[0].abs().max()) for tensors in truth.seen[kind].values()]
        assert [row["amax"] for row in found[kind]] == pytest.approx(wanted)
        assert [row["elements"] for row in found[kind]] == [40, 40, 40, 10]
    assert found["gradient"][0]["amax"] == pytest.approx(float(gradient.abs().max()))  # the sum, as it is used


def test_a_module_used_twice_is_one(watched: Watched) -> None:
    watched.begin()
    torch.manual_seed(0)
    layer = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    step(lambda x: layer(layer(x)), optimizer)
    seen: list[Tensor] = []
    handle = layer.register_forward_hook(lambda module, inputs, output: seen.append(output.detach().clone()))
    step(lambda x: layer(layer(x)), optimizer)
    handle.remove()
    row = watched.end().latest("activation")[0]
    assert row["name"] == "Linear" and row["elements"] == 60
    assert row["amax"] == pytest.approx(max(float(out.abs().max()) for out in seen))
    assert row["l2"] == pytest.approx(math.sqrt(sum(float(out.double().norm()) ** 2 for out in seen)))


def test_tied_weights_are_measured_for_both(watched: Watched) -> None:
    watched.begin()
    table, head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
    head.weight = table.weight
    net = nn.Sequential(table, head)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.arange(10)).square().mean().backward()
        optimizer.step()
    for kind in ("weight", "gradient"):
        first, second = watched_rows(watched, kind)
        assert first["amax"] == second["amax"] and (first["name"], second["name"]) == ("0", "1")


def watched_rows(watched: Watched, kind: str) -> list[dict[str, Any]]:
    return (watched.end() if not watched.probe._closed else LayerRecords(watched.folder)).latest(kind)


def test_outputs_of_any_kind(watched: Watched) -> None:
    """A tuple's first floating tensor, a mapping's, and none."""

    class Odd(nn.Linear):
        def __init__(self, make: Any) -> None:
            super().__init__(6, 6)
            self.make = make

        def forward(self, x: Tensor) -> Any:
            return self.make(super().forward(x))

    watched.begin()
    net = nn.ModuleList(
        [
            Odd(lambda y: (torch.arange(3), None, y, y * 1000)),
            Odd(lambda y: {"a": torch.arange(2), "b": y, "c": y * 1000}),
            Odd(lambda y: [[y], y * 1000]),
            Odd(lambda y: "text"),
        ]
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        x = torch.ones(2, 6)
        optimizer.zero_grad()
        loss = net[0](x)[2].sum() + net[1](x)["b"].sum() + net[2](x)[0][0].sum()
        net[3](x)
        loss.backward()
        optimizer.step()
    records = watched.end()
    rows = records.latest("activation")
    assert [row["name"] for row in rows] == ["0", "1", "2"] and all(row["amax"] < 10 for row in rows)
    assert [row["name"] for row in records.latest("activation_gradient")] == ["0", "1", "2"]


def test_in_place_changes_come_after_us(watched: Watched) -> None:
    """The output as it was, and the gradient that belongs to it."""
    watched.begin()
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    step(net, optimizer)
    torch.manual_seed(5)
    outputs = []
    handle = net[0].register_forward_hook(lambda module, inputs, output: outputs.append(output.detach().clone()))
    step(net, optimizer)
    handle.remove()
    torch.manual_seed(5)
    x = torch.randn(5, 6)
    before = net[0](x)
    before.retain_grad()
    net[2](before.clamp_min(0)).square().mean().backward()
    records = watched.end()
    row, gradient = records.latest("activation")[0], records.latest("activation_gradient")[0]
    assert row["mean"] == pytest.approx(float(outputs[0].double().mean()), abs=1e-6) and outputs[0].min() < 0
    assert gradient["l2"] == pytest.approx(float(before.grad.double().norm()), rel=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(watched: Watched, reentrant: bool) -> None:
    watched.begin()
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def forward(x: Tensor) -> Any:
        return checkpoint(net, x.requires_grad_(), use_reentrant=reentrant)

    for _ in range(2):
        step(forward, optimizer)
    truth = truth_of(net)
    step(forward, optimizer)
    truth.agree(watched.end())


def test_evaluation_is_none_of_it(watched: Watched) -> None:
    watched.begin()
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step(net, optimizer)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            net(torch.full((5, 6), 1e6))
    truth = truth_of(net)
    step(net, optimizer)
    truth.agree(watched.end())


def test_two_models_with_a_loop_of_their_own(watched: Watched) -> None:
    """As in a GAN: the step ends with the second optimizer, and each model's first pass counts."""
    watched.begin()
    nets = [network(), nn.Sequential(nn.Linear(6, 3))]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    for _ in range(5):
        for net, optimizer in zip(nets, optimizers):
            step(net, optimizer)
    records = watched.end()
    for kind in ("weight", "gradient", "activation", "activation_gradient"):
        names = [row["name"] for row in records.latest(kind)]
        assert sorted(names) == sorted(
            ["Sequential.0", "Sequential.2", "Sequential.3", "Sequential.4", "Sequential.0#2"]
        )


def test_a_closure(watched: Watched) -> None:
    watched.begin()
    net = network()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
    x = torch.randn(5, 6)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    records = watched.end()
    for kind in ("weight", "gradient", "activation", "activation_gradient"):
        assert len(records.latest(kind)) == 4


def test_without_an_optimizer(watched: Watched) -> None:
    watched.begin()
    net = network()
    for _ in range(3):
        net.zero_grad()
        loss_of(net).backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.1 * parameter.grad
    net.zero_grad()
    records = watched.end()
    assert len(records.latest("gradient")) == 4 and len(records.latest("activation")) == 4


def test_what_has_no_figures_has_no_record(watched: Watched) -> None:
    """Sparse gradients, frozen layers, a layer that is not used."""
    watched.begin()
    net = nn.ModuleDict(
        {
            "table": nn.Embedding(9, 6, sparse=True),
            "frozen": nn.Linear(6, 6),
            "on": nn.Linear(6, 1),
            "off": nn.Linear(1, 1),
        }
    )
    net["frozen"].requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        net["on"](net["frozen"](net["table"](torch.arange(4)))).sum().backward()
        optimizer.step()
    records = watched.end()
    names = {kind: [row["name"] for row in records.latest(kind)] for kind in ("weight", "gradient", "activation")}
    assert names == {
        "weight": ["table", "frozen", "on", "off"],
        "gradient": ["on"],
        "activation": ["table", "frozen", "on"],
    }
    steps, values = records.samples("gradient", "l2")
    assert values.shape == (1, 4) and np.isnan(values[0]).tolist() == [True, True, False, True]


# -- harmless -----------------------------------------------------------------------------------------------------
def test_a_model_that_is_pickled_or_copied_in_a_sampled_step_holds_nothing_of_ours(watched: Watched) -> None:
    watched.begin()
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    plain = pickle.dumps(net)
    step(net, optimizer)
    assert watched.probe.layers.sampling
    assert len(pickle.dumps(net)) == len(plain)
    twin = copy.deepcopy(net)
    assert not any(module._forward_hooks for model in (net, twin) for module in model.modules())
    step(net, optimizer)
    watched.end()
    assert not torch.nn.modules.module._global_forward_hooks


def test_nothing_of_a_training_that_is_over_is_kept_alive(watched: Watched) -> None:
    watched.begin()
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        step(net, optimizer)
    alive = [weakref.ref(item) for item in (net, net[0].weight, optimizer)]
    del net, optimizer
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3
    other = network()
    step(other, torch.optim.SGD(other.parameters(), lr=0.1))
    assert watched.probe.guard.off == {}
    watched.end()


def test_a_failure_ends_the_statistics_and_nothing_else(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8console.numerics.statistics import Statistics

    def broken(self: Any, key: Any, x: Any, fmt: Any) -> bool:
        raise RuntimeError("broken on purpose")

    watched.begin()
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step(net, optimizer)
    monkeypatch.setattr(Statistics, "add", broken)
    for _ in range(3):
        step(net, optimizer)
    assert list(watched.probe.guard.off) == ["layers"] and watched.probe.step == 4
    assert not torch.nn.modules.module._global_forward_hooks and watched.probe.observer.sample is None
    watched.probe.close()
    events = [json.loads(line) for line in paths.events_file(watched.folder, 0).read_text().splitlines()]
    assert [(event["kind"], event["part"]) for event in events if event["kind"] == "fault"] == [("fault", "layers")]


def test_off_is_off(watched: Watched) -> None:
    watched.begin(layer_steps=0)
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        step(net, optimizer)
    watched.end()
    assert not list(watched.folder.glob("layers*"))


# -- how often ----------------------------------------------------------------------------------------------------
def test_every_kth_step(watched: Watched) -> None:
    watched.begin(layer_steps=3)
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(10):
        step(net, optimizer)
    assert watched.end().samples("weight", "l2")[0].tolist() == [3, 6, 9]


def test_samples_come_less_often_until_the_cost_is_within_the_budget(watched: Watched) -> None:
    """The cost of a sample and a step's time are told to it: 4 ms and 10 ms, 1% allowed: every 40th step."""
    watched.begin(layer_steps=5, layer_budget=0.01)
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step(net, optimizer)
    sampling = watched.probe.layers
    sampling._plain.extend([0.010] * 5)
    for wanted, cost in ((40, 0.004), (40, 0.004), (80, 0.0061), (80, 0.005), (10, 0.001), (5, 0.00001)):
        sampling._costs.clear()
        sampling._spent = cost
        sampling._pace()
        assert sampling.every == wanted, cost
    assert [event["text"] for event in _events(watched) if event["kind"] == "notice"] == [
        "layers are sampled every 40 steps for now, to cost at most 1% of the time: "
        "a sample takes 4.0 ms, a step 10.0 ms"
    ], "said once"


def _events(watched: Watched) -> list[dict[str, Any]]:
    watched.end()
    return [json.loads(line) for line in paths.events_file(watched.folder, 0).read_text().splitlines()]


# -- files --------------------------------------------------------------------------------------------------------
def test_a_restarted_rank_goes_on_and_layers_keep_their_places(tmp_path: Path) -> None:
    for build in (network, lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1))):
        watched = Watched(tmp_path)
        watched.begin()
        net = build()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            step(net, optimizer)
        records = watched.end()
        del net, optimizer
        gc.collect()
    assert [layer["name"] for layer in records.layers] == ["0", "2", "3", "4", "1"]
    steps, values = records.samples("weight", "amax")
    assert steps.tolist() == [2, 3, 5, 6]
    assert np.isnan(values).tolist() == [[False] * 4 + [True]] * 2 + [[False, False, True, True, False]] * 2
    assert [row["step"] for row in records.latest("weight")] == [6, 6, 3, 3, 6]
