"""A socket that answers commands as a supervisor does, and remembers them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any


class Supervisor:
    """Applies what it is asked, or refuses with ``refusal``; holds answers back until ``go`` is set."""

    def __init__(self) -> None:
        self.commands: list[dict[str, Any]] = []
        self.refusal: str | None = None
        self.detail: dict[str, Any] = {}
        self.go = asyncio.Event()
        self.go.set()

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = json.loads(await reader.readline())
        assert hello["hello"] == "client"
        message = json.loads(await reader.readline())
        self.commands.append(message["command"])
        writer.write(json.dumps({"id": message["id"], "state": "asked", "text": "asked"}).encode() + b"\n")
        await writer.drain()
        await self.go.wait()
        answer: dict[str, Any] = {"id": message["id"], "state": "applied", "step": 4211, "detail": self.detail}
        if self.refusal:
            answer = {"id": message["id"], "state": "refused", "reason": self.refusal}
        writer.write(json.dumps(answer).encode() + b"\n")
        await writer.drain()
        writer.close()


@asynccontextmanager
async def supervisor_at(path: Path) -> AsyncIterator[Supervisor]:
    """A supervisor that listens on a socket for the length of the block."""
    supervisor = Supervisor()
    server = await asyncio.start_unix_server(supervisor.talk, path)
    try:
        yield supervisor
    finally:
        supervisor.go.set()
        server.close()
        await server.wait_closed()
