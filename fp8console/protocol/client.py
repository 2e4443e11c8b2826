"""A client of a run's supervisor: gives one command over its socket and waits for what becomes of it.

``send`` blocks, ``send_async`` is the same for an event loop. Both return the last message, ``{"state": "applied",
"step", "detail"}`` or ``{"state": "refused", "reason"}``, and raise ClientError, one line, when there will be none.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fp8console.protocol import wire

FINAL = ("applied", "refused")
OnState = Callable[[dict[str, Any]], None]


class ClientError(Exception):
    """The supervisor can't be asked, or its answer can't be had; the text is one line."""


class NoSupervisor(ClientError):
    """Nobody answers at the socket: the training has ended, or its supervisor is gone."""


class NoAnswer(ClientError):
    """The time given ran out before the command was applied or refused."""


def _unreachable(path: str, error: OSError) -> NoSupervisor:
    if isinstance(error, (FileNotFoundError, ConnectionRefusedError)):
        return NoSupervisor(
            "no supervisor answers: the training has ended, or its supervisor is gone; fp8console status says which"
        )
    return NoSupervisor(f"no supervisor answers at {path}: {error.strerror or error}")


def _opening(command: dict[str, Any]) -> tuple[str, bytes]:
    identifier = uuid.uuid4().hex[:12]
    hello = {"hello": "client", "pid": os.getpid()}
    return identifier, wire.encode(hello) + wire.encode({"id": identifier, "command": command})


def _take(messages: list[dict[str, Any]], identifier: str, on_state: OnState | None) -> dict[str, Any] | None:
    """The last message about this command among ``messages``, or None; tells ``on_state`` of each state."""
    for message in messages:
        if message.get("id") not in (identifier, None):
            continue
        state = message.get("state")
        if state is None:
            if message.get("error"):
                raise ClientError(str(message["error"]))
            continue
        if on_state is not None:
            on_state(message)
        if state in FINAL:
            return message
    return None


def _gone() -> ClientError:
    return NoSupervisor("the supervisor closed the connection before it answered")


def _late(timeout: float | None) -> NoAnswer:
    return NoAnswer(f"not applied within {timeout:g} s; the command stands as asked, see: fp8console status")


def send(
    socket_path: Path | str,
    command: dict[str, Any],
    timeout: float | None = None,
    on_state: OnState | None = None,
) -> dict[str, Any]:
    """Gives ``command`` and returns its last state; ``on_state`` gets every state, the last one too.

    ``timeout``: seconds for all of it, None to wait as long as it takes. Raises ClientError.
    """
    path = os.fspath(socket_path)
    deadline = None if timeout is None else time.monotonic() + timeout
    identifier, opening = _opening(command)
    buffer = wire.LineBuffer()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout)
        try:
            connection.connect(path)
            connection.sendall(opening)
        except TimeoutError:
            raise _late(timeout) from None
        except OSError as error:
            raise _unreachable(path, error) from None
        while True:
            if deadline is not None:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise _late(timeout)
                connection.settimeout(remaining)
            try:
                data = connection.recv(65536)
                messages = buffer.feed(data)
            except TimeoutError:
                raise _late(timeout) from None
            except ConnectionError:
                raise _gone() from None
            except wire.WireError as error:
                raise ClientError(f"the supervisor's answer makes no sense: {error}") from None
            final = _take(messages, identifier, on_state)
            if final is not None:
                return final
            if not data:
                raise _gone()


async def send_async(
    socket_path: Path | str,
    command: dict[str, Any],
    timeout: float | None = None,
    on_state: OnState | None = None,
) -> dict[str, Any]:
    """``send`` for an event loop; cancelling it takes nothing back that was asked."""
    import asyncio  # costs ctl, which does not need it, a third of its start

    try:
        return await asyncio.wait_for(_exchange(os.fspath(socket_path), command, on_state), timeout)
    except asyncio.TimeoutError:
        raise _late(timeout) from None


async def _exchange(path: str, command: dict[str, Any], on_state: OnState | None) -> dict[str, Any]:
    import asyncio

    identifier, opening = _opening(command)
    buffer = wire.LineBuffer()
    try:
        reader, writer = await asyncio.open_unix_connection(path)
    except OSError as error:
        raise _unreachable(path, error) from None
    try:
        writer.write(opening)
        while True:
            try:
                data = await reader.read(65536)
                messages = buffer.feed(data)
            except ConnectionError:
                raise _gone() from None
            except wire.WireError as error:
                raise ClientError(f"the supervisor's answer makes no sense: {error}") from None
            final = _take(messages, identifier, on_state)
            if final is not None:
                return final
            if not data:
                raise _gone()
    finally:
        writer.close()
