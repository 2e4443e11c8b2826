"""What the supervisor saves from a killed rank's shared memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fp8console.probe.rank import RankClaim
from fp8console.probe.recorder import Recorder
from fp8console.protocol import paths, records
from fp8console.supervisor.recovery import recover

WIDTH = records.STEP_STRUCT.size


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "run"
    made.mkdir()
    monkeypatch.setattr(paths, "spool_file", lambda run_dir, rank: tmp_path / f"spool.{rank}")
    return made


def rank(run_dir: Path, number: int, written: int, added: int) -> None:
    recorder = Recorder(paths.steps_file(run_dir, number), paths.spool_file(run_dir, number))
    for step in range(1, written + 1):
        recorder.add(records.pack_step({"step": step}, 0))
    recorder.flush()
    for step in range(written + 1, added + 1):
        recorder.add(records.pack_step({"step": step}, 0))


def steps(run_dir: Path, number: int) -> list[int]:
    body = paths.steps_file(run_dir, number).read_bytes()[records.HEADER_BYTES :]
    return [int(records.unpack_step(body[at : at + WIDTH])["step"] or -1) for at in range(0, len(body), WIDTH)]


def test_missing_records_are_appended_in_order_for_every_rank(run_dir: Path) -> None:
    rank(run_dir, 0, 5, 9)
    rank(run_dir, 1, 4, 4)
    rank(run_dir, 2, 0, 3)
    assert recover(run_dir) == 7
    assert steps(run_dir, 0) == list(range(1, 10))
    assert steps(run_dir, 1) == [1, 2, 3, 4] and steps(run_dir, 2) == [1, 2, 3]
    assert not any(paths.spool_file(run_dir, number).exists() for number in range(3))
    assert recover(run_dir) == 0


def test_a_ring_that_went_round_is_sorted(run_dir: Path) -> None:
    rank(run_dir, 0, records.SPOOL_SLOTS - 2, records.SPOOL_SLOTS + 3)
    assert recover(run_dir) == 5
    assert steps(run_dir, 0) == list(range(1, records.SPOOL_SLOTS + 4))


def test_a_torn_record_in_the_file_is_replaced_from_the_spool(run_dir: Path) -> None:
    rank(run_dir, 0, 2, 3)
    with open(paths.steps_file(run_dir, 0), "ab") as file:
        file.write(b"torn")
    assert recover(run_dir) == 1
    assert steps(run_dir, 0) == [1, 2, 3]


def test_what_makes_no_sense_is_left_alone(run_dir: Path) -> None:
    (run_dir / "steps.0.rec").write_bytes(b"not a record file")
    (run_dir / "steps.x.rec").write_bytes(b"")
    paths.spool_file(run_dir, 0).write_bytes(b"\0" * WIDTH * 3)
    assert recover(run_dir) == 0
    assert (run_dir / "steps.0.rec").read_bytes() == b"not a record file"


def test_a_removed_run_directory_has_nothing_to_save(run_dir: Path) -> None:
    run_dir.rmdir()
    assert recover(run_dir) == 0


def test_a_rank_that_outlived_its_launcher_keeps_its_files(run_dir: Path) -> None:
    """It still appends at its own offset: two writers would tear the file."""
    rank(run_dir, 0, 2, 3)
    go, ready = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        RankClaim(run_dir, 0)
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    assert recover(run_dir) == 0 and steps(run_dir, 0) == [1, 2]
    os.write(go[1], b"x")
    os.waitpid(pid, 0)
    assert recover(run_dir) == 1 and steps(run_dir, 0) == [1, 2, 3]
