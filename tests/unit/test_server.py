"""The supervisor's socket against peers of every kind: none can end it, none reaches the training by mistake."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fp8console.protocol.wire import MAX_LINE, encode
from fp8console.supervisor.coordinator import RankPeer
from fp8console.supervisor.server import Server


class Desk:
    def __init__(self) -> None:
        self.joined: list[RankPeer] = []
        self.left: list[RankPeer] = []
        self.said: list[dict[str, Any]] = []
        self.asked: list[dict[str, Any]] = []
        self.server = Server(self.joined.append, self.hear, self.left.append, self.answer)

    def hear(self, peer: RankPeer, message: dict[str, Any]) -> None:
        int(message.get("step", 0))
        self.said.append(message)

    def answer(self, message: dict[str, Any], reply: Any) -> None:
        self.asked.append(message)
        reply({"id": message.get("id"), "state": "asked"})


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    made = Desk()
    await made.server.open(tmp_path / "sockets" / "s")
    yield made
    await made.server.close()


async def talk(path: Path, *data: bytes) -> list[dict[str, Any]]:
    reader, writer = await asyncio.open_unix_connection(str(path))
    for piece in data:
        writer.write(piece)
    try:
        await writer.drain()
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 5.0)
    except (BrokenPipeError, ConnectionResetError):
        answer = b""
    writer.close()
    return [json.loads(line) for line in answer.splitlines()]


CLIENT = encode({"hello": "client"})
RANK = encode({"hello": "rank", "rank": 0})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"not json\n",
        b"[]\n",
        b"{}\n",
        b"\xff\xff\n",
        encode({"hello": "nobody"}),
        encode({"hello": "rank"}),
        encode({"hello": "rank", "rank": "x"}),
        encode({"hello": "rank", "rank": None}),
        encode({"hello": "rank", "rank": [1]}),
        b"[" * 200_000 + b"\n",
        b"x" * (MAX_LINE + 10) + b"\n",
        CLIENT + b'{"id": "1", "command": ',
        CLIENT + b"y" * (MAX_LINE + 10) + b"\n",
        RANK + encode({"done": "x", "step": "not a number"}),
        RANK + encode({"prepared": [1], "step": None}),
    ],
    ids=range(17),
)
async def test_rubbish_ends_its_own_connection_alone(desk: Desk, tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "sockets" / "s"
    problems: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
    await talk(path, data)
    assert await talk(path, CLIENT, encode({"id": "2", "command": {"name": "pause"}})) == [
        {"id": "2", "state": "asked"}
    ]
    assert len(desk.joined) == len(desk.left)
    assert problems == []


async def test_two_clients_with_one_id_get_their_own_answers(desk: Desk, tmp_path: Path) -> None:
    path = tmp_path / "sockets" / "s"
    answers = await asyncio.gather(*(talk(path, CLIENT, encode({"id": "same", "n": n})) for n in range(5)))
    assert answers == [[{"id": "same", "state": "asked"}]] * 5
    assert sorted(message["n"] for message in desk.asked) == [0, 1, 2, 3, 4]


async def test_the_folder_is_made_this_users_alone(tmp_path: Path) -> None:
    folder = tmp_path / "ours" / "sockets"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    desk = Desk()
    await desk.server.open(folder / "s")
    assert folder.stat().st_mode & 0o077 == 0 and folder.parent.stat().st_mode & 0o077 == 0
    await desk.server.close()


async def test_a_folder_that_is_a_link_is_a_trap(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "sockets").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError):
        await Desk().server.open(tmp_path / "ours" / "sockets" / "s")


async def test_a_socket_that_was_left_is_taken_over_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "sockets" / "s"
    path.parent.mkdir(mode=0o700)
    path.write_text("left")
    desk = Desk()
    await desk.server.open(path)
    assert path.stat().st_mode & 0o077 == 0
    assert await talk(path, CLIENT, encode({"id": "1"}))
    await desk.server.close()
    assert not path.exists()


async def test_a_client_that_never_reads_holds_nobody_up(desk: Desk, tmp_path: Path) -> None:
    path = tmp_path / "sockets" / "s"
    _, writer = await asyncio.open_unix_connection(str(path))
    writer.write(CLIENT + b"".join(encode({"id": "x" * 1000}) for _ in range(2000)))
    await writer.drain()
    assert await talk(path, CLIENT, encode({"id": "2"})) == [{"id": "2", "state": "asked"}]
    started = asyncio.get_running_loop().time()
    await desk.server.close()
    assert asyncio.get_running_loop().time() - started < 3.0
    writer.close()
