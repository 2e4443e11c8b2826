"""Step records under a torn file, a full disk, a kill and a restart: no tear in the middle, nothing raised."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fp8console.probe import recorder as recorder_module
from fp8console.probe.rank import RankClaim
from fp8console.probe.recorder import Recorder
from fp8console.protocol import records

WIDTH = records.STEP_STRUCT.size


def packed(step: int) -> bytes:
    return records.pack_step({"step": step, "loss": step / 2}, 0)


def steps(path: Path) -> list[int]:
    data = path.read_bytes()
    records.parse_header(data)
    body = data[records.HEADER_BYTES :]
    assert len(body) % WIDTH == 0
    return [int(records.unpack_step(body[at : at + WIDTH])["step"] or -1) for at in range(0, len(body), WIDTH)]


def write(path: Path, *numbers: int, **options: Any) -> Recorder:
    made = Recorder(path, **options)
    for number in numbers:
        made.add(packed(number))
    made.flush()
    return made


def test_what_is_flushed_is_there_and_its_mode_is_private(tmp_path: Path) -> None:
    path = tmp_path / "steps.0.rec"
    write(path, *range(1, 6001), rank=0)
    assert steps(path) == list(range(1, 6001))
    assert path.stat().st_mode & 0o077 == 0


def test_a_restart_goes_on_counting(tmp_path: Path) -> None:
    path = tmp_path / "steps.0.rec"
    write(path, 1, 2, 3)
    again = Recorder(path)
    assert again.last_step == 3
    again.add(packed(4))
    again.flush()
    assert steps(path) == [1, 2, 3, 4]


@pytest.mark.parametrize("torn", [1, WIDTH - 1])
def test_a_torn_last_record_is_written_over(tmp_path: Path, torn: int) -> None:
    path = tmp_path / "steps.0.rec"
    write(path, 1, 2)
    with open(path, "ab") as file:
        file.write(packed(3)[:torn])
    again = write(path, 3)
    assert again.last_step == 2 and steps(path) == [1, 2, 3]


@pytest.mark.parametrize("size", [0, 1, records.HEADER_BYTES - 1])
def test_a_torn_header_is_a_new_file(tmp_path: Path, size: int) -> None:
    path = tmp_path / "steps.0.rec"
    path.write_bytes(records.header()[:size])
    assert write(path, 1).last_step == 0
    assert steps(path) == [1]


def test_a_foreign_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "steps.0.rec"
    path.write_bytes(b"x" * 5000)
    with pytest.raises(ValueError, match="not a record file"):
        Recorder(path)
    assert path.read_bytes() == b"x" * 5000
    other = records.header(records.STEP_FIELDS[:3])
    path.write_bytes(other)
    with pytest.raises(ValueError, match="another version"):
        Recorder(path)


def test_a_full_disk_is_a_problem_that_passes(tmp_path: Path) -> None:
    path = tmp_path / "steps.0.rec"
    made = write(path, 1)
    good, made._file._fd = made._file._fd, os.open("/dev/full", os.O_RDWR)
    for number in (2, 3):
        made.add(packed(number))
        made.flush()
        assert made.problem == "No space left on device"
    made._file._fd = good
    made.flush()
    assert made.problem is None and steps(path) == [1, 2, 3]


def test_a_short_write_never_tears_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "steps.0.rec"
    made = write(path, 1)
    room = 2 * WIDTH + 7

    def short(fd: int, data: bytes, offset: int) -> int:
        return real(fd, data[:room], offset)

    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", short)
    for number in range(2, 7):
        made.add(packed(number))
    made.flush()
    assert made.problem == "short write" and steps(path) == [1, 2, 3]
    monkeypatch.setattr(os, "ftruncate", lambda fd, size: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    made.flush()
    assert made.problem == "Input/output error"
    monkeypatch.undo()
    made.flush()
    assert made.problem is None and steps(path) == [1, 2, 3, 4, 5, 6]


def test_a_limit_on_the_file_size_is_no_more_than_a_problem(tmp_path: Path) -> None:
    import resource

    path = tmp_path / "steps.0.rec"
    made = write(path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (records.HEADER_BYTES + 3 * WIDTH + 10, hard))
    try:
        for number in range(2, 10):
            made.add(packed(number))
        made.flush()
        made.flush()
        assert made.problem is not None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    made.flush()
    assert steps(path) == list(range(1, 10))


def test_a_disk_that_never_comes_back_costs_the_oldest_and_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "QUEUE", 100)
    path = tmp_path / "steps.0.rec"
    made = write(path)
    for number in range(1, 131):
        made.add(packed(number))
    assert made.lost == 30
    made.flush()
    assert steps(path) == list(range(31, 131))


def test_a_removed_run_directory_is_not_noticed(tmp_path: Path) -> None:
    path = tmp_path / "run" / "steps.0.rec"
    path.parent.mkdir()
    made = write(path, 1)
    path.unlink()
    path.parent.rmdir()
    made.add(packed(2))
    made.flush()
    assert made.problem is None


def test_a_restart_after_a_kill_takes_what_only_the_spool_has(tmp_path: Path) -> None:
    path, spool = tmp_path / "steps.0.rec", tmp_path / "spool"
    killed = write(path, 1, 2, spool=spool)
    for number in (3, 4):
        killed.add(packed(number))  # never flushed
    again = Recorder(path, spool=spool)
    assert again.last_step == 4 and steps(path) == [1, 2, 3, 4]
    again.add(packed(5))
    again.flush()
    assert steps(path) == [1, 2, 3, 4, 5]
    assert spool.read_bytes() == packed(5)


def test_a_spool_that_a_deleted_run_left_is_not_this_runs(tmp_path: Path) -> None:
    path, spool = tmp_path / "steps.0.rec", tmp_path / "spool"
    spool.write_bytes(packed(99))
    assert Recorder(path, spool=spool).last_step == 0
    assert steps(path) == []


def test_the_spool_keeps_the_newest(tmp_path: Path) -> None:
    path, spool = tmp_path / "steps.0.rec", tmp_path / "spool"
    made = Recorder(path, spool=spool)
    for number in range(1, records.SPOOL_SLOTS + 11):
        made.add(packed(number))
    assert spool.stat().st_size == records.SPOOL_SLOTS * WIDTH
    kept = spool.read_bytes()
    found = {records.unpack_step(kept[at : at + WIDTH])["step"] for at in range(0, len(kept), WIDTH)}
    assert found == set(range(11, records.SPOOL_SLOTS + 11))


def test_an_ordinary_end_leaves_no_spool_and_a_full_disk_keeps_it(tmp_path: Path) -> None:
    path, spool = tmp_path / "steps.0.rec", tmp_path / "spool"
    write(path, 1, spool=spool).close()
    assert not spool.exists()
    made = write(path, spool=spool)
    made.add(packed(2))
    made.close()
    assert spool.exists()


def test_no_shared_memory_is_no_problem(tmp_path: Path) -> None:
    path = tmp_path / "steps.0.rec"
    made = write(path, 1, spool=tmp_path / "missing" / "spool")
    made.close()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    write(path, 2, spool=tmp_path / "link").close()  # somebody's trap in a folder that all can write
    assert steps(path) == [1, 2] and not (tmp_path / "elsewhere").exists()


# -- the claim on a rank's files ----------------------------------------------------------------------------------
def test_a_rank_is_claimed_once_and_freed_by_death(tmp_path: Path) -> None:
    held = RankClaim(tmp_path, 0)
    assert held.rank == 0
    read, write_ = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write_, bytes([RankClaim(tmp_path, 0).rank, RankClaim(tmp_path, 3).rank]))
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 2) == bytes([1, 3])
    pid = os.fork()
    if pid == 0:
        os.write(write_, bytes([RankClaim(tmp_path, 1).rank]))
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 1) == bytes([1])


def test_a_file_system_without_locks_is_no_reason_to_give_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno
    import fcntl

    def none(*arguments: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "lockf", none)
    assert RankClaim(tmp_path, 2).rank == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["rank.2.lock"]
