"""The ring of snapshots: which stay, within what memory, and that no buffer is used again while somebody reads it."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8console.probe import snapshots, state
from fp8console.probe.digest import digest
from fp8console.probe.snapshots import Snapshot, SnapshotRing, choose_victim, compare_live, copy_to_host

BYTES = 4 * 1000  # of the model below, without the random state


def nothing(what: str, point: Snapshot, reason: str) -> None:
    return None


@pytest.fixture
def model() -> torch.nn.Module:
    return torch.nn.Linear(1000, 1, bias=False)


def roots_of(model: torch.nn.Module) -> state.Roots:
    return state.Roots([weakref.ref(model)], [], [], [], {})


def fill(model: torch.nn.Module, value: float) -> None:
    with torch.no_grad():
        next(model.parameters()).fill_(value)


def size_of(model: torch.nn.Module) -> int:
    _, tensors = state.capture(roots_of(model))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def values(point: Snapshot) -> set[float]:
    return set(next(tensor for tensor in point.host if tensor.shape == (1, 1000)).flatten().tolist())


def test_victims_are_old_and_close_to_others_and_never_the_oldest_or_the_newest_two() -> None:
    steps: list[int] = []
    for step in range(1, 400):
        if len(steps) == 8:
            victim = choose_victim(steps)
            assert 0 < victim < len(steps) - 2
            steps.pop(victim)
        steps.append(step)
    assert steps[0] == 1 and steps[-3:] == [397, 398, 399]
    gaps = [after - before for before, after in zip(steps, steps[1:])]
    assert max(gaps[-3:]) <= 4 and gaps[0] > 40  # close together near the present, far apart in the past


@pytest.mark.parametrize("steps", [[1], [1, 2], [1, 2, 3]])
def test_of_a_few_the_oldest_goes(steps: list[int]) -> None:
    assert choose_victim(steps) == 0


def test_the_ring_keeps_count_and_every_kept_state_is_its_own(model: torch.nn.Module) -> None:
    """Buffers of dropped points are used again; kept ones must not change by it."""
    dropped: list[int] = []
    ring = SnapshotRing(
        4, 1 << 30, lambda what, point, reason: dropped.append(point.step) if what == "dropped" else None
    )
    for step in range(1, 60):
        fill(model, float(step))
        point = ring.take(roots_of(model), step, {})
        assert len(ring.points) <= 4 and ring.find(step) is point
        for kept in ring.points:
            assert values(kept) == {float(kept.step)}
            assert kept.compute_digest() == digest(kept.host, state.plain_part(kept.tree))
    assert len(dropped) == 59 - 4 and not set(dropped) & {point.step for point in ring.points}
    pointers = [tensor.data_ptr() for point in ring.points for tensor in point.host]
    assert len(set(pointers)) == len(pointers)
    ring.close()


def test_memory_is_bounded_when_the_state_shrinks_and_grows(model: torch.nn.Module) -> None:
    small = torch.nn.Linear(10, 1)
    limit = 3 * size_of(model) + 100
    ring = SnapshotRing(50, limit, nothing)
    for step in range(1, 60):
        ring.take(roots_of(model if step % 7 < 4 else small), step, {})
        assert sum(point.bytes for point in ring.points) <= limit
    ring.close()


def test_one_that_does_not_fit_is_an_error_and_changes_nothing(model: torch.nn.Module) -> None:
    ring = SnapshotRing(5, size_of(model) + 10, nothing)
    ring.take(roots_of(model), 1, {})
    big = torch.nn.Linear(5000, 1)
    with pytest.raises(MemoryError, match=r"over the limit of .* GiB \(--snapshot-memory"):
        ring.take(roots_of(big), 2, {})
    assert [point.step for point in ring.points] == [1]
    ring.close()


def test_a_checkpoints_copy_is_outside_the_ring(model: torch.nn.Module) -> None:
    ring = SnapshotRing(5, 10, nothing)
    point = ring.take(roots_of(model), 1, {}, keep=False)
    assert ring.points == [] and point.bytes == size_of(model)


def test_a_point_that_is_being_written_is_not_used_again(model: torch.nn.Module) -> None:
    """Two writers of one point (two tags at one step): the first that is done must not free it for the second."""
    ring = SnapshotRing(1, 1 << 30, nothing)
    fill(model, 1.0)
    point = ring.take(roots_of(model), 1, {})
    first, second = object(), object()
    point.holders |= {first, second}
    point.holders.discard(first)
    for step in range(2, 6):
        fill(model, float(step))
        ring.take(roots_of(model), step, {})
        assert values(point) == {1.0}
    ring.close()


def test_an_abandoned_stretch_is_dropped(model: torch.nn.Module) -> None:
    told: list[tuple[int, str]] = []
    ring = SnapshotRing(
        9, 1 << 30, lambda what, p, reason: told.append((p.step, reason)) if what == "dropped" else None
    )
    for step in range(1, 6):
        ring.take(roots_of(model), step, {})
    ring.forget_after(3)
    assert [point.step for point in ring.points] == [1, 2, 3]
    assert told == [(4, "abandoned by a rollback"), (5, "abandoned by a rollback")]
    assert ring.find(4) is None
    ring.close()


def test_digests_arrive_and_tell_a_change(model: torch.nn.Module) -> None:
    ready = threading.Event()
    ring = SnapshotRing(9, 1 << 30, lambda what, point, reason: ready.set() if what == "ready" else None)
    point = ring.take(roots_of(model), 1, {})
    assert ready.wait(5.0) and compare_live(point) == (point.digest, True)
    fill(model, 0.5)
    assert not compare_live(point)[1]
    state.restore(point.roots, point.tree, point.host)
    assert compare_live(point) == (point.digest, True)
    ring.close()


def test_a_digest_that_fails_is_a_point_without_one(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = threading.Event()
    monkeypatch.setattr(snapshots, "digest", lambda tensors, plain: 1 / 0)
    ring = SnapshotRing(9, 1 << 30, lambda what, point, reason: ready.set())
    point = ring.take(roots_of(model), 1, {})
    assert ready.wait(5.0) and point.digest is None
    monkeypatch.undo()
    ready.clear()
    assert ring.take(roots_of(model), 2, {}) and ready.wait(5.0)  # the worker lives on
    ring.close()


def test_the_scale_in_the_figures_is_the_one_after_the_update() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    where = state.Roots([], [], [weakref.ref(scaler)], [], {})
    ring = SnapshotRing(3, 1 << 30, nothing)
    scaler._scale.fill_(4.0)
    point = ring.take(where, 1, {"scale": 8.0})
    point.compute_digest()
    assert point.about["scale"] == 4.0
    ring.close()


def test_dropped_points_are_given_up_by_the_worker(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that lags behind must not keep the memory of points that are long gone."""
    gate = threading.Event()
    real = digest

    def slow(tensors: Any, plain: Any) -> str:
        gate.wait(5.0)
        return real(tensors, plain)

    monkeypatch.setattr(snapshots, "digest", slow)
    done: list[int] = []
    ring = SnapshotRing(2, 1 << 30, lambda what, point, reason: done.append(point.step) if what == "ready" else None)
    for step in range(1, 11):
        ring.take(roots_of(model), step, {})
    gate.set()
    end = time.monotonic() + 5
    while 10 not in done:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert set(done) <= {1, 9, 10}
    ring.close()


def test_nothing_of_the_training_is_kept_alive(model: torch.nn.Module) -> None:
    ring = SnapshotRing(3, 1 << 30, nothing)
    net = torch.nn.Linear(3, 3)
    alive = weakref.ref(net)
    ring.take(roots_of(net), 1, {})
    del net
    import gc

    gc.collect()
    assert alive() is None
    ring.close()


@pytest.mark.parametrize("late", [False, True])
def test_copies_are_new_memory_unless_spare_fits(late: bool) -> None:
    tensors = [torch.randn(3, 4), torch.tensor(2, dtype=torch.int64), torch.randn(2).bfloat16(), torch.randn(0)]
    host, events = copy_to_host(tensors, [], late)
    assert events == [] and all(torch.equal(one, other) for one, other in zip(host, tensors))
    assert all(one.data_ptr() != other.data_ptr() or one.numel() == 0 for one, other in zip(host, tensors))
    again, _ = copy_to_host(tensors, host, late)
    assert all(one is other for one, other in zip(host, again))
    for wrong in (host[:3], [torch.empty(3, 5), *host[1:]], [host[0].double(), *host[1:]]):
        other, _ = copy_to_host(tensors, wrong, late)
        assert not any(one is two for one in other for two in wrong)


EXIT = """
import sys, time, weakref
import torch
from fp8console.probe import snapshots, state
model = torch.nn.Linear(3000, 3000)
roots = state.Roots([weakref.ref(model)], [], [], [], {})
ring = snapshots.SnapshotRing(3, 1 << 33, lambda *told: None)
for step in range(3):
    ring.take(roots, step, {})
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("pause", [0.0, 0.004, 0.01, 0.02])
def test_an_exit_in_the_middle_of_a_digest_is_an_ordinary_exit(pause: float) -> None:
    """A daemon thread inside torch while the interpreter ends would abort the process: exit status 134."""
    root = str(Path(snapshots.__file__).parents[2])
    command = [sys.executable, "-c", EXIT, str(pause)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_forked_child_neither_waits_for_the_worker_nor_for_its_lock(model: torch.nn.Module) -> None:
    import os

    ring = SnapshotRing(3, 1 << 30, nothing)
    ring.take(roots_of(model), 1, {})
    with ring._condition:  # held, as by the worker, while the process forks
        pid = os.fork()
        if pid == 0:
            ring.close()
            os._exit(7)
    end = time.monotonic() + 10
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    ring.close()


def test_points_from_before_a_divergence_are_not_pushed_out() -> None:
    """Twelve sound points, then nothing but unsound ones: one sound point makes room for the first of them, no more."""
    steps, sound = list(range(10, 130, 10)), [True] * 12
    for step in range(130, 2000, 10):
        victim = choose_victim(steps, sound)
        del steps[victim], sound[victim]
        steps.append(step)
        sound.append(False)
    assert sound.count(True) == 11 and steps[-1] == 1990 and max(s for s, ok in zip(steps, sound) if ok) == 120


def test_a_model_that_has_gone_since_is_no_difference_and_a_changed_weight_is() -> None:
    """A script dropped one of its models after the snapshot: what is left is compared, and compared truly."""
    first, second = torch.nn.Linear(3, 2), torch.nn.Linear(5, 4)
    roots = state.Roots([weakref.ref(first), weakref.ref(second)], [], [], [], {})
    ring = SnapshotRing(2, 1 << 30, lambda what, point, reason: None)
    point = ring.take(roots, 1, {})
    assert compare_live(point)[1]
    del first
    gc.collect()
    state.restore(point.roots, point.tree, point.host)
    assert compare_live(point)[1]
    with torch.no_grad():
        second.bias[0] += 1.0
    assert not compare_live(point)[1]
    ring.close()
