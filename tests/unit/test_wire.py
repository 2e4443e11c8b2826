"""Messages and the client: lines in pieces, nonsense, a supervisor that is slow, silent or gone."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8console.protocol import client, wire
from fp8console.protocol.numbers import dumps, number, to_jsonable

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

_VALUE = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
_MESSAGE = st.dictionaries(st.text(max_size=8), _VALUE | st.lists(_VALUE, max_size=4), max_size=5)


@PATIENT
@given(st.lists(_MESSAGE, max_size=4), st.lists(st.integers(1, 40), min_size=1))
def test_messages_come_whole_however_they_are_cut(messages: list[dict[str, Any]], cuts: list[int]) -> None:
    data = b"".join(wire.encode(message) for message in messages)
    buffer, got = wire.LineBuffer(), []
    while data:
        size = cuts[len(got) % len(cuts)]
        got += buffer.feed(data[:size])
        data = data[size:]
    assert got == [json.loads(dumps(message)) for message in messages]


@PATIENT
@given(_VALUE)
def test_numbers_go_through_strict_json(value: Any) -> None:
    back = json.loads(dumps(value), parse_constant=lambda token: pytest.fail(f"bare {token}"))
    if isinstance(value, float):
        parsed = number(back)
        assert parsed is not None
        assert parsed == value or (math.isnan(parsed) and math.isnan(value))
    else:
        assert back == value


def test_non_finite_numbers_have_names() -> None:
    assert to_jsonable([math.nan, math.inf, -math.inf, (1.5,)]) == ["NaN", "Infinity", "-Infinity", [1.5]]
    assert number("Infinity") == math.inf
    assert number(True) is None and number("12") is None and number(None) is None
    assert float("NaN") != float("NaN") and float("Infinity") == math.inf


@pytest.mark.parametrize("line", [b"{", b"[]", b"1", b"\xff\n", b"[" * 100_000])
def test_nonsense_is_a_wire_error(line: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.decode(line)


def test_an_endless_line_is_a_wire_error() -> None:
    with pytest.raises(wire.WireError):
        wire.LineBuffer().feed(b"x" * (wire.MAX_LINE + 1))


Answer = Callable[[socket.socket, dict[str, Any]], None]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[Answer], Path]]:
    """A socket that answers one client's command as the given function does."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    threads: list[threading.Thread] = []

    def start(answer: Answer) -> Path:
        path = tmp_path / "s.sock"
        server.bind(str(path))
        server.listen()

        def run() -> None:
            connection, _ = server.accept()
            with connection:
                buffer, messages = wire.LineBuffer(), []
                while len(messages) < 2:
                    messages += buffer.feed(connection.recv(65536))
                assert messages[0]["hello"] == "client"
                answer(connection, messages[1])

        threads.append(threading.Thread(target=run, daemon=True))
        threads[0].start()
        return path

    yield start
    server.close()
    for thread in threads:
        thread.join(5)


def applied(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(wire.encode({"id": "another", "state": "refused", "reason": "not yours"}))
    connection.sendall(wire.encode({"id": message["id"], "state": "asked", "text": "pause"}))
    connection.sendall(wire.encode({"id": message["id"], "state": "applied", "step": 7, "detail": {"loss": math.nan}}))


def test_send_tells_each_state_and_returns_the_last(serve: Callable[[Answer], Path]) -> None:
    states: list[str] = []
    answer = client.send(serve(applied), {"name": "pause"}, 5, lambda message: states.append(message["state"]))
    assert states == ["asked", "applied"]
    assert answer["step"] == 7 and answer["detail"] == {"loss": "NaN"}


def test_send_async_is_the_same(serve: Callable[[Answer], Path]) -> None:
    states: list[str] = []
    path = serve(applied)
    answer = asyncio.run(client.send_async(path, {"name": "pause"}, 5, lambda message: states.append(message["state"])))
    assert states == ["asked", "applied"] and answer["state"] == "applied"


def test_refused_is_an_answer(serve: Callable[[Answer], Path]) -> None:
    def refuse(connection: socket.socket, message: dict[str, Any]) -> None:
        connection.sendall(wire.encode({"id": message["id"], "state": "refused", "reason": "no scaler"}))

    assert client.send(serve(refuse), {"name": "set", "scale": 2.0})["reason"] == "no scaler"


@pytest.mark.parametrize("variant", ["send", "send_async"])
@pytest.mark.parametrize("case", ["missing", "stale", "gone", "silent", "nonsense", "long"])
def test_no_answer_is_one_clear_line(serve: Callable[[Answer], Path], tmp_path: Path, variant: str, case: str) -> None:
    over = threading.Event()
    words = {
        "missing": "no supervisor answers",
        "stale": "no supervisor answers",
        "gone": "closed the connection before it answered",
        "silent": "not applied within 0.2 s",
        "nonsense": "makes no sense",
        "long": "no supervisor answers",
    }
    if case == "missing":
        path = tmp_path / "none.sock"
    elif case == "long":
        path = tmp_path / ("x" * 200)
    elif case == "stale":
        path = tmp_path / "stale.sock"
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
    elif case == "gone":
        path = serve(lambda connection, message: None)
    elif case == "silent":
        path = serve(lambda connection, message: over.wait(5) and None)
    else:
        path = serve(lambda connection, message: connection.sendall(b"{nonsense\n"))
    with pytest.raises(client.ClientError) as caught:
        if variant == "send":
            client.send(path, {"name": "pause"}, 0.2 if case == "silent" else 5)
        else:
            asyncio.run(client.send_async(path, {"name": "pause"}, 0.2 if case == "silent" else 5))
    over.set()
    assert words[case] in str(caught.value) and "\n" not in str(caught.value)
