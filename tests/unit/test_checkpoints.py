"""Checkpoints on disk: what has its final name is whole, whatever was killed, full, damaged or asked for twice."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8console.probe import checkpoints, state
from fp8console.probe.checkpoints import MANIFEST, STATE, CheckpointError, CheckpointStore, folder_name, parse_folder
from fp8console.probe.digest import digest
from fp8console.probe.snapshots import Snapshot

ROOT = Path(checkpoints.__file__).parents[2]


class Store(CheckpointStore):
    """A store that remembers what it told."""

    def __init__(self, root: Path, rank: int = 0, keep: int = 3) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.results: list[dict[str, Any]] = []
        super().__init__(root, rank, keep, lambda what, details: self.told.append((what, details)))

    def write(self, step: int, tag: str | None = None, snapshot: Snapshot | None = None) -> dict[str, Any]:
        self.save(snapshot or point(step), tag, self.results.append)
        self.wait(30.0)
        return self.results[-1]


def point(step: int, size: int = 100) -> Snapshot:
    model = torch.nn.Linear(size, 1)
    with torch.no_grad():
        model.weight.fill_(float(step))
    roots = state.Roots([weakref.ref(model)], [], [], [], {})
    tree, tensors = state.capture(roots)
    host = [tensor.clone() for tensor in tensors]
    return Snapshot(step, roots, tree, host, {"step": step, "loss": float("nan")}, 4 * size, 0.0)


def check(store: CheckpointStore, step: int) -> None:
    """What is loaded is what was captured."""
    tree, tensors, manifest = store.load(step)
    assert manifest["step"] == step and digest(tensors, state.plain_part(tree)) == manifest["digest"]
    weights = [tensor for tensor in tensors if tensor.dim() == 2]
    assert set(weights[0].flatten().tolist()) == {float(step)}


@pytest.mark.parametrize(
    "step, tag", [(1, None), (123_456_789, "a"), (12_345_678_901, "x-1.0_b"), (7, "step-000000001")]
)
def test_names_say_step_and_tag(step: int, tag: str | None) -> None:
    assert parse_folder(folder_name(step, tag)) == (step, tag)


@pytest.mark.parametrize(
    "name", ["", "step-1", "step-", "step-00000000x", "other", ".step-000000001", "step-000000001-"]
)
def test_other_names_are_none_of_ours(name: str) -> None:
    assert parse_folder(name) is None


def test_written_is_read_and_nobody_else_reads_it(tmp_path: Path) -> None:
    store = Store(tmp_path / "checkpoints")
    result = store.write(5)
    assert result["ok"] and Path(result["path"]).name == "rank-0" and result["bytes"] > 400
    check(store, 5)
    assert store.complete() == [(5, None)] and [what for what, _ in store.told] == ["saved"]
    assert Path(result["path"]).stat().st_mode & 0o077 == 0
    manifest = json.loads((Path(result["path"]) / MANIFEST).read_text())
    assert manifest["point"]["loss"] == "NaN"


def test_the_newest_untagged_stay_and_all_tagged(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=3)
    store.write(1, "first")
    for step in range(2, 8):
        store.write(step)
    assert sorted(store.complete(), key=str) == [(1, "first"), (5, None), (6, None), (7, None)]
    dropped = [details["step"] for what, details in store.told if what == "dropped"]
    assert dropped == [2, 3, 4] and not (tmp_path / folder_name(2, None)).exists()


def test_another_ranks_part_is_left_alone(tmp_path: Path) -> None:
    mine, other = Store(tmp_path, 0), Store(tmp_path, 1)
    other.write(1)
    for step in range(1, 6):
        mine.write(step)
    assert (tmp_path / folder_name(1, None) / "rank-1" / MANIFEST).is_file()
    check(other, 1)
    assert other.complete() == [(1, None)] and (1, None) not in mine.complete()


def test_the_same_step_twice_is_the_later_one(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.write(5)["ok"] and store.write(5)["ok"]
    check(store, 5)
    assert store.complete() == [(5, None)]
    assert sorted(entry.name for entry in (tmp_path / folder_name(5, None)).iterdir()) == ["rank-0"]


def test_one_snapshot_under_two_tags_is_held_until_both_are_written(tmp_path: Path) -> None:
    store = Store(tmp_path)
    snapshot = point(5)
    inside, go = threading.Event(), threading.Event()
    real = store._write_aside

    def slow(what: Snapshot, tag: str | None) -> dict[str, Any]:
        if tag == "b":
            inside.set()
            go.wait(10.0)
        return real(what, tag)

    store._write_aside = slow  # type: ignore[method-assign]
    store.save(snapshot, "a", store.results.append)
    while not store.results:
        time.sleep(0.001)
    store.save(snapshot, "b", store.results.append)
    assert inside.wait(10.0) and snapshot.holders  # "a" is done, "b" still reads it
    go.set()
    store.wait(10.0)
    assert not snapshot.holders and [result["ok"] for result in store.results] == [True, True]


def test_a_damaged_one_is_told_and_its_twin_under_another_tag_is_taken(tmp_path: Path) -> None:
    store = Store(tmp_path)
    snapshot = point(5)
    path = Path(store.write(5, "a", snapshot)["path"]) / STATE
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="is damaged: its SHA-256"):
        store.load(5)
    store.write(5, "b", snapshot)
    check(store, 5)


@pytest.mark.parametrize(
    "damage",
    ["no state", "empty state", "not json", "a list", "no files", "empty manifest", "not a pickle", "unreadable"],
)
def test_every_damage_is_one_line_and_no_surprise(tmp_path: Path, damage: str) -> None:
    import hashlib

    store = Store(tmp_path)
    folder = Path(store.write(5)["path"])
    manifest = folder / MANIFEST
    if damage == "no state":
        (folder / STATE).unlink()
    elif damage == "empty state":
        (folder / STATE).write_bytes(b"")
    elif damage == "not a pickle":
        (folder / STATE).write_bytes(b"x")
        about = json.loads(manifest.read_text())
        about["files"][STATE]["sha256"] = hashlib.sha256(b"x").hexdigest()
        manifest.write_text(json.dumps(about))
    elif damage == "unreadable":
        (folder / STATE).unlink()
        (folder / STATE).mkdir()
    else:
        manifest.write_text({"not json": "{", "a list": "[1]", "no files": "{}", "empty manifest": ""}[damage])
    with pytest.raises(CheckpointError) as caught:
        store.load(5)
    assert "\n" not in str(caught.value).split(": ")[0] and str(folder) in str(caught.value)


def test_none_is_told_by_its_step(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint of step 1,234 on disk"):
        Store(tmp_path / "nowhere").load(1234)


def test_a_full_disk_is_the_reason_that_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    store = Store(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        result = store.write(5, snapshot=point(5, 100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert result == {"ok": False, "reason": "the checkpoint could not be written: File too large"}
    assert store.complete() == [] and [what for what, _ in store.told] == ["failed"]
    assert list((tmp_path / folder_name(5, None)).iterdir()) == []
    check_after = store.write(6)
    assert check_after["ok"]


def test_a_folder_that_can_not_be_made_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    result = Store(tmp_path / "checkpoints").write(5)
    assert not result["ok"] and "Not a directory" in result["reason"]


def test_a_run_directory_that_was_deleted_is_made_again(tmp_path: Path) -> None:
    import shutil

    store = Store(tmp_path / "run" / "checkpoints")
    store.write(1)
    shutil.rmtree(tmp_path / "run")
    assert store.complete() == []
    assert store.write(2)["ok"]
    check(store, 2)


def test_what_does_not_pickle_is_a_reason(tmp_path: Path) -> None:
    store = Store(tmp_path)
    snapshot = point(5)
    snapshot.tree["registered"] = {"x": lambda: None}
    result = store.write(5, snapshot=snapshot)
    assert not result["ok"] and "pickle" in result["reason"]


def test_pruning_that_fails_does_not_lose_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)

    def fails() -> list[tuple[int, str | None]]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(store, "complete", fails)
    assert store.write(5)["ok"]
    assert [what for what, _ in store.told] == ["saved", "failed"]


def test_at_the_end_of_the_time_a_slow_writer_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would abort the process, were it inside torch when the interpreter ends."""
    store = Store(tmp_path)
    real = checkpoints._Checked.write
    monkeypatch.setattr(checkpoints._Checked, "write", lambda self, data: (time.sleep(0.1), real(self, data))[1])
    store.save(point(5, 100_000), None, store.results.append)
    assert store.pending == 1
    store.wait(0.2)
    assert store.pending == 0
    assert not store.results[0]["ok"] and store.complete() == []


WRITER = """
import sys, weakref
from pathlib import Path
sys.path.insert(0, sys.argv[2])
sys.path.insert(0, sys.argv[3])
from test_checkpoints import Store, point
store = Store(Path(sys.argv[1]), keep=3)
step = int(sys.argv[4])
print("ready", flush=True)
while True:
    step += 1
    at = step if step % 3 else step - 1  # the same step twice, now and then
    store.write(at, None if step % 4 else "tagged", point(at, 20_000))
"""


@pytest.mark.slow
def test_whatever_a_kill_leaves_under_a_final_name_is_whole(tmp_path: Path) -> None:
    chance = random.Random(1)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    store = Store(tmp_path)
    for round_ in range(4):
        command = [
            sys.executable,
            "-c",
            WRITER,
            str(tmp_path),
            str(ROOT),
            str(Path(__file__).parent),
            str(round_ * 1000),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as process:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            time.sleep(0.1 + chance.random() * 0.4)
            process.send_signal(signal.SIGKILL)
        found = store.complete()
        assert found
        for step, _ in found:
            check(store, step)
        finals = list(tmp_path.glob("step-*/rank-0"))
        assert all((path / MANIFEST).is_file() and (path / STATE).is_file() for path in finals)
    store.write(9000)  # the next writer clears away what the killed ones had begun
    assert list(tmp_path.glob("step-*/.rank-*")) == []


def test_the_newest_sound_checkpoint_outlives_a_divergence(tmp_path: Path) -> None:
    """Sound at 1 and 2, diverged from 3 on: 2 stays beside the newest three and 1 goes; sound again, 2 goes too."""
    store = Store(tmp_path, keep=3)

    def save(step: int, healthy: bool) -> None:
        snapshot = point(step)
        snapshot.about["healthy"] = healthy
        store.save(snapshot, None, store.results.append)
        store.wait(30.0)

    for step in range(1, 9):
        save(step, healthy=step <= 2)
    assert sorted(step for step, _ in store.complete()) == [2, 6, 7, 8]
    save(9, healthy=True)
    assert sorted(step for step, _ in store.complete()) == [7, 8, 9]


@pytest.mark.slow
def test_the_weights_are_anybodys_with_torch(tmp_path: Path) -> None:
    """torch.load with weights_only=True, in a process that can't import fp8console, and a plain load_state_dict."""
    Store(tmp_path, keep=3).write(5)
    file = tmp_path / folder_name(5, None) / "rank-0" / "state.pt"
    code = (
        "import sys, torch; sys.modules['fp8console'] = None; model = torch.nn.Linear(100, 1); "
        "model.load_state_dict(torch.load(sys.argv[1], weights_only=True)['modules'][0]); "
        "print(set(model.weight.flatten().tolist()))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == "{5.0}", done.stderr
