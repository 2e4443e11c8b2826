"""The rank's thread against supervisors that are absent, silent, stopped or gone: the training never waits for it."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8console.probe import link as link_module
from fp8console.probe.agreement import Agreement
from fp8console.probe.link import Link
from fp8console.probe.recorder import Recorder
from fp8console.protocol import events, records
from fp8console.protocol.wire import LineBuffer, encode


class Supervisor:
    """A listening socket that says and hears what a test wants."""

    def __init__(self, path: Path) -> None:
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(str(path))
        self.listening.listen(4)
        self.buffer = LineBuffer()
        self.heard: list[dict[str, Any]] = []
        self.connection: socket.socket | None = None

    def accept(self) -> None:
        self.listening.settimeout(5.0)
        self.connection, _ = self.listening.accept()
        self.connection.settimeout(0.05)
        self.buffer = LineBuffer()

    def say(self, message: dict[str, Any]) -> None:
        assert self.connection is not None
        self.connection.sendall(encode(message))

    def hear(self, key: str, seconds: float = 5.0) -> dict[str, Any]:
        assert self.connection is not None
        end = time.monotonic() + seconds
        while True:
            for message in self.heard:
                if key in message:
                    self.heard.remove(message)
                    return message
            assert time.monotonic() < end, f"no {key!r} came"
            try:
                self.heard += self.buffer.feed(self.connection.recv(1 << 16))
            except TimeoutError:
                pass

    def leave(self) -> None:
        assert self.connection is not None
        self.connection.close()


@pytest.fixture
def supervisor(tmp_path: Path) -> Supervisor:
    return Supervisor(tmp_path / "socket")


@pytest.fixture
def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    monkeypatch.setattr(link_module, "RETRY", 0.05)
    recorder = Recorder(tmp_path / "steps.0.rec")
    made = Link(str(tmp_path / "socket"), recorder, tmp_path / "events.0.jsonl", Agreement(hold_seconds=5.0))
    made.hello = {"rank": 0}
    yield made
    made.close()


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    data = (tmp_path / "events.0.jsonl").read_bytes().splitlines()
    return [event for line in data if (event := events.parse_line(line))]


def test_hello_comes_first_and_a_command_is_agreed(link: Link, supervisor: Supervisor) -> None:
    link.send({"early": 1})
    link.start()
    supervisor.accept()
    assert supervisor.hear("hello")["rank"] == 0
    assert supervisor.hear("early")
    supervisor.say({"prepare": "x", "command": {"name": "pause"}})
    assert supervisor.hear("prepared")["step"] == 0
    supervisor.say({"commit": "x", "step": 1})
    end = time.monotonic() + 5
    while link.agreement.arrive(1) is None:
        assert time.monotonic() < end


def test_a_decision_that_comes_too_late_is_answered(link: Link, supervisor: Supervisor) -> None:
    link.start()
    supervisor.accept()
    supervisor.say({"commit": "never prepared", "step": 3})
    answer = supervisor.hear("done")
    assert answer["ok"] is False and "too late" in answer["reason"]


def test_without_a_supervisor_everything_is_written(link: Link, tmp_path: Path) -> None:
    link.start()
    link.record(records.pack_step({"step": 1}, 0))
    link.event(events.make("notice", "hello", part="x"))
    link.close()
    assert (tmp_path / "steps.0.rec").stat().st_size == records.HEADER_BYTES + records.STEP_STRUCT.size
    assert [event["text"] for event in lines(tmp_path)] == ["hello"]


def test_what_nobody_takes_does_not_pile_up(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "UNSENT", 100)
    link.start()
    for number in range(5000):
        link.send({"number": number})
    assert len(link._out) <= 100


def test_a_supervisor_that_stops_reading_costs_the_training_nothing(
    link: Link, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a process that was sent SIGSTOP: its socket stays open and fills up."""
    monkeypatch.setattr(link_module, "UNSENT", 200)
    link.start()
    supervisor.accept()
    slowest = 0.0
    for number in range(3000):
        started = time.perf_counter()
        link.send({"number": number, "text": "x" * 500})
        slowest = max(slowest, time.perf_counter() - started)
    assert slowest < 0.5 and len(link._out) <= 201
    started = time.monotonic()
    link.close()
    assert time.monotonic() - started < 3.0


def test_a_supervisor_that_dies_frees_a_rank_that_holds(link: Link, supervisor: Supervisor) -> None:
    link.start()
    supervisor.accept()
    supervisor.say({"prepare": "x", "command": {}})
    supervisor.hear("prepared")
    found: list[Any] = []
    training = threading.Thread(target=lambda: found.append(link.agreement.arrive(1)), daemon=True)
    training.start()
    training.join(0.1)
    assert training.is_alive()
    supervisor.listening.close()
    supervisor.leave()
    training.join(3.0)
    assert found == [None] and link.agreement.lost


def test_a_connection_that_comes_back_is_no_loss(link: Link, supervisor: Supervisor) -> None:
    """Else a paused training would go on by itself a minute after a short break."""
    link.start()
    supervisor.accept()
    supervisor.hear("hello")
    supervisor.leave()
    supervisor.accept()
    supervisor.hear("hello")
    assert not link.agreement.lost


@pytest.mark.parametrize("rubbish", [b"not json\n", b"[1]\n", b"\xff\xfe\n", b"x" * (1 << 20) + b"xx"], ids=range(4))
def test_rubbish_ends_the_connection_and_a_new_one_is_made(link: Link, supervisor: Supervisor, rubbish: bytes) -> None:
    link.start()
    supervisor.accept()
    supervisor.hear("hello")
    assert supervisor.connection is not None
    supervisor.connection.settimeout(5.0)
    try:
        supervisor.connection.sendall(rubbish)
    except (BrokenPipeError, ConnectionResetError):
        pass
    supervisor.accept()
    supervisor.hear("hello")


def test_many_messages_at_once_and_in_pieces(link: Link, supervisor: Supervisor) -> None:
    link.start()
    supervisor.accept()
    assert supervisor.connection is not None
    data = b"".join(encode({"prepare": str(number), "command": {"x": "y" * 1000}}) for number in range(300))
    supervisor.connection.settimeout(5.0)
    for start in range(0, len(data), 7777):
        supervisor.connection.sendall(data[start : start + 7777])
    supervisor.connection.settimeout(0.05)
    assert [supervisor.hear("prepared")["prepared"] for _ in range(300)] == [str(number) for number in range(300)]
    link.agreement.supervisor_lost()


def test_an_event_that_can_not_be_written_down_costs_itself_alone(
    link: Link, supervisor: Supervisor, tmp_path: Path
) -> None:
    link.start()
    supervisor.accept()
    link.event({"time": 0.0, "kind": "notice", "odd": object()})
    link.event(events.make("notice", "after", part="x"))
    end = time.monotonic() + 5
    while not any(event["text"] == "after" for event in lines(tmp_path)):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_more_than_a_thousand_open_files(link: Link, supervisor: Supervisor) -> None:
    """select() can't watch a descriptor over 1,023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1300:
        pytest.skip("no more files allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1300), hard))
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        link.start()
        supervisor.accept()
        assert supervisor.connection is not None and supervisor.connection.fileno() > 1023
        supervisor.say({"prepare": "x", "command": {}})
        assert supervisor.hear("prepared")
        link.agreement.supervisor_lost()
        link.close()
    finally:
        for fd in opened:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_writer_that_hangs_does_not_keep_the_process_from_ending(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, go = threading.Event(), threading.Event()

    def hangs() -> None:
        inside.set()
        go.wait(20.0)

    monkeypatch.setattr(link._recorder, "flush", hangs)
    link.start()
    assert inside.wait(5.0)
    started = time.monotonic()
    link.close()
    assert time.monotonic() - started < 4.0
    go.set()
