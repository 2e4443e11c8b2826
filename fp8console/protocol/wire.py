"""JSON lines over the supervisor's socket, for ranks and for clients.

A peer's first line is ``{"hello": "rank", ...}`` or ``{"hello": "client"}``. The messages:

client -> supervisor    {"id", "command": {"name", ...}}           one command, see commands.py
supervisor -> client    {"id", "state": "asked" | "applied" | "refused", "step", "reason", "detail"}
supervisor -> rank      {"prepare": id, "command": {...}}          answer with your step and hold at the next boundary
                        {"commit": id, "step": N}                  apply at boundary N, acknowledge
                        {"abort": id}                              forget it, stop holding
rank -> supervisor      {"prepared": id, "step", "paused", "refused"}
                        {"done": id, "step", "ok", "reason", "detail"}
                        {"progress": step, "step_seconds", ...}    a few times a second
                        {"point": {...}} {"dropped": {...}}        restore points that came and went
"""

from __future__ import annotations

import json
from typing import Any

from fp8console.protocol.numbers import dumps

MAX_LINE = 1 << 20


class WireError(ValueError):
    """A line that is not a JSON object, or too long."""


def encode(message: dict[str, Any]) -> bytes:
    """One line; non-finite floats by name (numbers.py)."""
    return dumps(message).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """The object of one line. Raises WireError."""
    if len(line) > MAX_LINE:
        raise WireError(f"a line of {len(line)} bytes is over the limit of {MAX_LINE}")
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {error}") from None
    if not isinstance(message, dict):
        raise WireError("not a JSON object")
    return message


class LineBuffer:
    """Bytes in, whole messages out; keeps the unfinished rest."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages completed by ``data``. Raises WireError on a malformed or endless line."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE:
            raise WireError("a line without an end")
        return [decode(line) for line in lines if line.strip()]
