"""The supervisor's socket: ranks and clients, JSON lines (protocol/wire.py)."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fp8console.protocol.wire import MAX_LINE, WireError, decode, encode
from fp8console.supervisor.coordinator import RankPeer


class Server:
    """Accepts this user's processes only. What peers say goes to the four callables."""

    def __init__(
        self,
        rank_joined: Callable[[RankPeer], None],
        rank_said: Callable[[RankPeer, dict[str, Any]], None],
        rank_left: Callable[[RankPeer], None],
        asked: Callable[[dict[str, Any], Callable[[dict[str, Any]], None]], None],
    ) -> None:
        self._rank_joined = rank_joined
        self._rank_said = rank_said
        self._rank_left = rank_left
        self._asked = asked
        self._server: asyncio.AbstractServer | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._path: Path | None = None

    async def open(self, path: Path) -> None:
        """Listen at ``path``, in a folder that only this user can enter. Raises OSError."""
        for folder in (path.parent.parent, path.parent):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for folder in (path.parent, path.parent.parent):
            # In a shared temporary folder somebody else may have made ours first.
            about = folder.lstat()
            if about.st_uid != os.getuid() or not stat.S_ISDIR(about.st_mode):
                raise PermissionError(errno.EPERM, "belongs to somebody else", str(folder))
            folder.chmod(0o700)
        path.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._serve, str(path), limit=MAX_LINE)
        finally:
            os.umask(before)
        self._path = path

    async def close(self) -> None:
        """Stop listening, give peers what is still on its way, remove the socket."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            try:
                await asyncio.wait_for(writer.drain(), 1.0)
            except (OSError, asyncio.TimeoutError):
                pass
            writer.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            if _peer_uid(writer) == os.getuid():
                await self._talk(reader, writer)
        except (OSError, ValueError, KeyError, TypeError, EOFError) as error:  # WireError is a ValueError
            _send(writer, {"error": f"{type(error).__name__}: {error}"})
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = await _read(reader)
        if hello is None:
            return
        if hello.get("hello") == "rank":
            peer = RankPeer(int(hello["rank"]), hello, lambda message: _send(writer, message))
            self._rank_joined(peer)
            try:
                while (message := await _read(reader)) is not None:
                    peer.receive(message)
                    self._rank_said(peer, message)
            finally:
                self._rank_left(peer)
        elif hello.get("hello") == "client":
            while (message := await _read(reader)) is not None:
                self._asked(message, lambda answer: _send(writer, answer))
        else:
            raise WireError("the first line must be a hello")


async def _read(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    line = await reader.readline()
    return decode(line) if line else None


def _send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    if not writer.is_closing():
        writer.write(encode(message))


def _peer_uid(writer: asyncio.StreamWriter) -> int | None:
    connection = writer.get_extra_info("socket")
    credentials = getattr(socket, "SO_PEERCRED", None)
    if credentials is None:
        return os.getuid()  # elsewhere than on Linux the folder's mode alone protects the socket
    raw = connection.getsockopt(socket.SOL_SOCKET, credentials, struct.calcsize("3i"))
    return int(struct.unpack("3i", raw)[1])
