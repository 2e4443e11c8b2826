"""Reading a run directory's growing text files: events, output, hardware samples, run.json; finding runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fp8console.protocol import events, paths
from fp8console.runs.find import RunNotFound, find_runs, resolve
from fp8console.runs.reader import EventLog, HardwareLog, OutputTail, clean_line, is_primary
from fp8console.runs.run import Run


def event_line(kind: str, time: Any, **fields: Any) -> bytes:
    return json.dumps({"time": time, "kind": kind, "step": None, "text": kind, **fields}).encode() + b"\n"


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


# events


def test_events_of_all_files_are_merged_by_time(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    assert log.refresh() == []
    append(tmp_path / "events.jsonl", event_line("launched", 1) + event_line("ended", 9))
    append(tmp_path / "events.0.jsonl", event_line("paused", 3))
    append(tmp_path / "events.1.jsonl", event_line("paused", 2))
    assert [event["time"] for event in log.refresh()] == [1, 2, 3, 9]
    assert [event.get("rank") for event in log.events] == [None, 1, 0, None]
    assert [is_primary(event) for event in log.events] == [True, False, True, True]
    append(tmp_path / "events.0.jsonl", event_line("resumed", 4))
    assert [event["kind"] for event in log.refresh()] == ["resumed"]
    assert [event["time"] for event in log.events] == [1, 2, 3, 4, 9]
    assert [event["time"] for event in log.arrived] == [1, 2, 3, 9, 4]


def test_a_torn_tail_is_left_for_later(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    line = event_line("notice", 1)
    append(tmp_path / "events.jsonl", line + line[:20])
    assert len(log.refresh()) == 1
    assert log.refresh() == []
    append(tmp_path / "events.jsonl", line[20:])
    assert len(log.refresh()) == 1


@pytest.mark.parametrize(
    "line",
    [b"{\n", b"[]\n", b"\xff\n", b"\n", b'{"kind":"x"}\n', b"[" * 9999 + b"\n"]
    + [event_line("x", time) for time in ("soon", "NaN", None, True)],
)
def test_foreign_lines_are_passed_over(tmp_path: Path, line: bytes) -> None:
    append(tmp_path / "events.jsonl", line + event_line("notice", 1))
    log = EventLog(tmp_path)
    assert [event["kind"] for event in log.refresh()] == ["notice"]


def test_a_truncated_event_file_is_read_anew(tmp_path: Path) -> None:
    append(tmp_path / "events.jsonl", event_line("launched", 1) * 3)
    append(tmp_path / "events.0.jsonl", event_line("scaler", 2))
    log = EventLog(tmp_path)
    log.refresh()
    (tmp_path / "events.jsonl").write_bytes(event_line("notice", 5))
    log.refresh()
    assert log.generation == 1
    assert [event["kind"] for event in log.events] == ["scaler", "notice"]


def test_a_probe_that_could_not_start_is_heard(tmp_path: Path) -> None:
    append(tmp_path / "events.start.jsonl", b'{"time": 1, "kind": "fault", "reason": "no torch"}\n')
    (event,) = EventLog(tmp_path).refresh()
    assert event["text"] == "no torch" and event["step"] is None and "rank" not in event


def test_the_writers_events_are_readable(tmp_path: Path) -> None:
    writer = events.EventWriter(paths.events_file(tmp_path, 0))
    writer.write(events.make("nonfinite", "the loss is NaN", 7, what="loss", value=float("nan")))
    (event,) = EventLog(tmp_path).refresh()
    assert event["value"] == "NaN" and event["step"] == 7 and event["rank"] == 0
    with pytest.raises(KeyError):
        events.make("unheard_of", "")


def test_a_writer_that_cannot_write_says_so_and_raises_nothing(tmp_path: Path) -> None:
    writer = events.EventWriter(tmp_path / "missing" / "events.jsonl")
    writer.write(events.make("notice", "x"))
    assert writer.failed is not None and "No such file" in writer.failed


# output


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("plain", "plain"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("10%\r 50%\r100%", "100%"),
        ("10%\r50%\r", "50%"),
        ("50%|##  |\x1b[A", "50%|##  |"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("a\tb", "a       b"),
        ("bell\x07\x00\x9b", "bell"),
        ("crlf\r", "crlf"),
        ("\r", ""),
        ("\x1b[?25l\x1b(Bx", "x"),
        ("cut \x1b[3", "cut 3"),
    ],
)
def test_a_line_is_what_a_terminal_would_leave(raw: str, clean: str) -> None:
    cleaned = clean_line(raw)
    assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in cleaned)
    assert cleaned == clean


def test_the_tail_of_the_output(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    tail = OutputTail(path)
    assert tail.refresh() is False and tail.lines(5) == []
    append(path, b"one\ntwo\nth")
    assert tail.refresh() is True and tail.refresh() is False
    assert tail.lines(2) == ["two", "th"]
    append(path, b"ree\n\xff\n")
    tail.refresh()
    assert tail.lines(3) == ["two", "three", "�"]
    assert tail.lines(100) == ["one", "two", "three", "�"]
    assert tail.lines(0) == []


def test_the_tail_keeps_no_more_than_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    tail = OutputTail(path, limit_bytes=1000)
    for start in range(0, 10_000, 500):
        append(path, b"".join(b"line %d\n" % number for number in range(start, start + 500)))
        tail.refresh()
    assert tail.lines(2) == ["line 9998", "line 9999"]
    kept = tail.lines(10_000)
    assert len(kept) < 120 and all(line.startswith("line 9") for line in kept), "no half line at the cut"
    fresh = OutputTail(path, limit_bytes=1000)
    fresh.refresh()
    assert fresh.lines(10_000) == kept


def test_a_truncated_output_starts_again(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    path.write_bytes(b"old line\n")
    tail = OutputTail(path)
    tail.refresh()
    path.write_bytes(b"new\n")
    assert tail.refresh() is True
    assert tail.lines(9) == ["new"]


# hardware


def test_hardware_samples(tmp_path: Path) -> None:
    log = HardwareLog(tmp_path, keep=3)
    assert log.refresh() is False and log.latest is None
    path = tmp_path / paths.HARDWARE
    append(path, b"".join(b'{"time": %d, "gpus": []}\n' % second for second in range(5)) + b"nonsense\n[]\n{")
    assert log.refresh() is True
    assert log.latest is not None and log.latest["time"] == 4
    assert [sample["time"] for sample in log.history] == [2, 3, 4]
    append(path, b'"time": 9}\n')
    log.refresh()
    assert log.latest["time"] == 9


# runs


def make_run(folder: Path, created: float | None = None, **info: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / paths.RUN).write_text(json.dumps({"id": folder.name, "created": created, **info}))
    return folder


def test_run_json_is_read_again_when_it_changed(tmp_path: Path) -> None:
    run = Run(tmp_path / "r")
    assert run.info == {} and run.problem is not None and run.id == "r"
    make_run(tmp_path / "r")
    run.refresh()
    assert run.info["id"] == "r" and run.problem is None
    new = tmp_path / "r" / "run.json.new"
    new.write_text(json.dumps({"id": "r", "exit_status": 3}))
    os.replace(new, tmp_path / "r" / paths.RUN)
    run.refresh()
    assert run.info["exit_status"] == 3
    (tmp_path / "r" / paths.RUN).write_text("{")
    run.refresh()
    assert run.info["exit_status"] == 3 and run.problem is not None, "the last good one stays"


def test_runs_are_found_newest_first(tmp_path: Path) -> None:
    make_run(tmp_path / "a", 100.0)
    make_run(tmp_path / "b", 300.0)
    make_run(tmp_path / "c", 200.0)
    (tmp_path / "not a run").mkdir()
    (tmp_path / "d").symlink_to(make_run(tmp_path.parent / f"{tmp_path.name}-elsewhere", 400.0))
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    assert [run_dir.name for run_dir in find_runs(tmp_path)] == ["d", "b", "c", "a"]
    assert find_runs(tmp_path / "missing") == []


def test_a_run_goes_by_id_part_path_or_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    root = paths.state_root()
    monkeypatch.setattr(paths, "fallback_root", lambda: tmp_path / "none")
    with pytest.raises(RunNotFound, match="no runs in"):
        resolve(None)
    first = make_run(root / "0101-gpt", 1.0)
    second = make_run(root / "0102-gpt-long", 2.0)
    assert resolve(None) == resolve("newest") == second
    assert resolve("0101") == first
    assert resolve("0101-gpt") == first
    assert resolve(str(first)) == first
    with pytest.raises(RunNotFound, match="'gpt' fits 2 runs: 0102-gpt-long, 0101-gpt"):
        resolve("gpt")
    with pytest.raises(RunNotFound, match=r"no run 'cnn'.*there are: 0102-gpt-long, 0101-gpt"):
        resolve("cnn")
    with pytest.raises(RunNotFound, match=r"no run at .*no run\.json there"):
        resolve(str(root))
    monkeypatch.chdir(first)
    assert resolve(".").resolve() == first.resolve()
