"""Which objects a restore point covers as a training makes, drops and replaces them; going back when they changed."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fp8console.probe import state
from fp8console.probe.checkpoints import CheckpointError
from fp8console.probe.guard import Guard
from fp8console.probe.restore_points import RestorePoints, mean_of_finite
from fp8console.protocol.settings import Settings

pytestmark = pytest.mark.usefixtures("only_own_modules")


class Script:
    """What a probe knows of a script, and its restore points."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.events: list[tuple[str, str, Any]] = []
        self.faults: list[str] = []
        observer = SimpleNamespace(optimizers=[], schedulers=[], scalers=[])
        self.observer = observer
        self.probe: Any = SimpleNamespace(
            guard=Guard(lambda part, reason: self.faults.append(reason)),
            event=lambda kind, text, step=None, **fields: self.events.append((kind, text, fields)),
            observer=observer,
            registered={},
            models=[],
        )
        self.points = RestorePoints(self.probe, Settings(**settings), folder / "checkpoints", 0)
        self.searches = 0

    def model(self, width: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
        net = nn.Linear(width, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        self.observer.optimizers = [optimizer]
        return net, optimizer


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Script(tmp_path)
    real = state.find_modules

    def counted() -> Any:
        made.searches += 1
        return real()

    monkeypatch.setattr(state, "find_modules", counted)
    yield made
    made.points.ring.close()


def fill(net: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(value)


def back(script: Script, step: int) -> dict[str, Any]:
    assert script.points.missing(step) is None
    return script.points.roll_back(step)


def test_the_search_is_made_once(script: Script) -> None:
    net, optimizer = script.model()
    for step in range(1, 6):
        script.points.snapshot(step, {})
    assert script.searches == 1 and net is not None and optimizer is not None
    script.observer.schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1)]
    script.points.snapshot(6, {})
    script.probe.registered["x"] = nn.Linear(1, 1)
    script.points.snapshot(7, {})
    assert script.searches == 2
    assert "x" in script.points.ring.points[-1].tree["registered"]


def test_a_new_optimizer_where_an_old_one_was_is_seen(script: Script) -> None:
    """A trial after another: the second model's optimizer often gets the freed memory, and so the id, of the first."""
    for trial in range(6):
        net, optimizer = script.model()
        fill(net, float(trial))
        script.points.snapshot(trial + 1, {})
        fill(net, -1.0)
        result = back(script, trial + 1)
        assert result["digests_equal"] and net.weight.flatten().tolist() == [float(trial)] * 4
        script.observer.optimizers = []
        del net, optimizer
        gc.collect()


def test_modules_that_gc_freeze_hides_stay_covered(script: Script) -> None:
    net, optimizer = script.model()
    script.points.snapshot(1, {})
    gc.collect()
    gc.freeze()
    try:
        other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        script.observer.optimizers = [optimizer, other]
        script.points.snapshot(2, {})
        assert any(ref() is net for ref in script.points.roots().modules)
    finally:
        gc.unfreeze()


def test_a_model_replaced_since_is_told_and_nothing_of_the_new_one_changes(script: Script) -> None:
    net, optimizer = script.model()
    script.points.snapshot(1, {})
    optimizer.param_groups[0]["params"] = list(nn.Linear(9, 9).parameters())
    before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    with pytest.raises(
        CheckpointError, match=r"step 1 does not fit this training any more: SGD holds other parameters"
    ):
        script.points.roll_back(1)
    assert all(torch.equal(p, was) for p, was in zip(optimizer.param_groups[0]["params"], before))
    assert net is not None


def test_a_model_that_is_gone_is_not_called_equal(script: Script) -> None:
    net, optimizer = script.model()
    script.points.snapshot(1, {})
    script.observer.optimizers = []
    del net, optimizer
    gc.collect()
    assert script.points.roll_back(1)["digests_equal"] is False


def test_a_checkpoint_is_read_by_the_next_process(tmp_path: Path, script: Script) -> None:
    net, optimizer = script.model()
    average = nn.Linear(4, 1)  # looks like the model, but nothing trains it
    fill(net, 3.0)
    fill(average, 5.0)
    results: list[dict[str, Any]] = []
    script.points.checkpoint(7, {"step": 7}, "t", results.append)
    script.points.store.wait(10.0)
    assert results[0]["ok"]
    del net, average, optimizer
    gc.collect()

    again = Script(tmp_path)
    average = nn.Linear(4, 1)  # made before the model this time: found in another order
    net, optimizer = again.model()
    result = back(again, 7)
    assert result["where"] == "disk" and result["digests_equal"]
    assert net.weight.flatten().tolist() == [3.0] * 4 and average.weight.flatten().tolist() == [5.0] * 4


def test_another_scripts_checkpoint_does_not_fit(tmp_path: Path, script: Script) -> None:
    net, optimizer = script.model()
    results: list[dict[str, Any]] = []
    script.points.checkpoint(7, {"step": 7}, None, results.append)
    script.points.store.wait(10.0)
    del net, optimizer
    gc.collect()
    again = Script(tmp_path)
    net, optimizer = again.model(width=6)
    with pytest.raises(CheckpointError, match="does not fit"):
        again.points.roll_back(7)


def test_a_rollback_while_that_very_point_is_being_written(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    net, optimizer = script.model()
    fill(net, 2.0)
    results: list[dict[str, Any]] = []
    real = script.points.store._write_aside
    monkeypatch.setattr(script.points.store, "_write_aside", lambda *a: (time.sleep(0.2), real(*a))[1])
    script.points.snapshot(3, {"step": 3})
    script.points.checkpoint(3, {"step": 3}, "x", results.append)
    fill(net, 9.0)
    assert back(script, 3)["digests_equal"]
    script.points.forget_after(2)  # drops it from memory while it is written
    for step in range(4, 30):
        fill(net, float(step))
        script.points.snapshot(step, {})
    script.points.store.wait(10.0)
    assert results[0]["ok"]
    for point in list(script.points.ring.points):
        script.points.ring._drop(point, "test")
    assert back(script, 3)["where"] == "disk" and net.weight.flatten().tolist() == [2.0] * 4
    assert optimizer is not None


def test_too_many_waiting_checkpoints_are_refused(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    net, optimizer = script.model()
    gate: list[int] = []
    real = script.points.store._write_aside

    def slow(*arguments: Any) -> Any:
        while not gate:
            time.sleep(0.005)
        return real(*arguments)

    monkeypatch.setattr(script.points.store, "_write_aside", slow)
    taken = 0
    while script.points.busy() is None:
        taken += 1
        script.points.checkpoint(taken, {"step": taken}, None, lambda result: None)
        assert taken < 10
    assert taken == 3 and "3 checkpoints are still being written" in str(script.points.busy())
    gate.append(1)
    script.points.store.wait(10.0)
    assert script.points.busy() is None and net is not None and optimizer is not None


def test_no_such_point_lists_what_there_is(script: Script) -> None:
    assert script.points.missing(1234) == "no restore point at step 1,234; there are: none yet"
    net, optimizer = script.model()
    script.points.snapshot(1000, {})
    assert script.points.missing(1) == "no restore point at step 1; there are: 1,000"
    assert net is not None and optimizer is not None


@pytest.mark.parametrize("memory", [0.0])
def test_memory_that_is_too_small_switches_snapshots_off_once(tmp_path: Path, memory: float) -> None:
    script = Script(tmp_path, snapshot_memory_gib=memory)
    net, optimizer = script.model()
    assert script.points.snapshot(1, {}) is None and script.points.snapshot(2, {}) is None
    assert len(script.faults) == 1 and "--snapshot-memory" in script.faults[0]
    assert net is not None and optimizer is not None


def test_cadence(script: Script) -> None:
    assert [step for step in range(1, 302) if script.points.due(step)] == [1, 101, 201, 301]
    script.points.set_cadence(7, 310)
    assert [step for step in range(310, 330) if script.points.due(step)] == [310, 317, 324]
    script.points.set_cadence(0, 330)
    assert not any(script.points.due(step) for step in range(330, 400))


@pytest.mark.parametrize(
    "values, wanted", [([], None), ([float("nan")], None), ([1.0, float("inf"), 3.0], 2.0), ([2.0], 2.0)]
)
def test_mean_of_finite(values: list[float], wanted: float | None) -> None:
    assert mean_of_finite(values) == wanted
