"""Giving commands to the supervisor, and telling what becomes of each: asked, then applied at step N, or why not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fp8console.console.answers import SECONDS, applied_words
from fp8console.console.snapshot import Snapshot
from fp8console.protocol.commands import CommandError, describe, validate

if TYPE_CHECKING:
    from fp8console.console.app import ConsoleApp

#: Seconds that a refusal stands in the second line; "asked" stands until there is an answer.
REFUSAL_SECONDS = 12.0
UNTIL_ANSWERED = 24 * 3600.0


class Steering:
    """Commands on their way. Each is a task of the app's event loop: nothing blocks, and several may be open."""

    def __init__(self, app: ConsoleApp) -> None:
        self._app = app
        self._told = 0
        #: How the app is left once the command to end the training is applied; None when nobody leaves.
        self.leaving: str | None = None

    def give(self, command: dict[str, Any], leaving: str | None = None) -> None:
        """Give a command; with ``leaving`` the app is left, with that result, when it was applied."""
        try:
            command = validate(command)
        except CommandError as error:
            self._app.notify(str(error), severity="error", markup=False)
            return
        snapshot, words = self._app.snapshot, describe(command)
        if snapshot is None or snapshot.socket is None:
            self._tell(f"{words}: not yet, the run is still starting", "warning")
        elif snapshot.ended:
            self._tell(f"{words}: the training is over, there is nothing to steer", "warning")
        else:
            self.leaving = leaving
            self._tell(f"{self._app.glyphs.asked} asked: {words}", "asked", UNTIL_ANSWERED)
            self._app.run_worker(self._send(snapshot.socket, command, words), group="commands", exit_on_error=False)

    async def _send(self, socket_path: str, command: dict[str, Any], words: str) -> None:
        from fp8console.protocol.client import ClientError, send_async

        try:
            answer = await send_async(socket_path, command)
        except (ClientError, OSError) as error:
            answer = {"state": "refused", "reason": str(error)}
        self._app.request()
        if answer.get("state") == "applied":
            text, role, seconds = applied_words(command, words, answer)
            self._tell(f"{self._app.glyphs.check} {text}", role, seconds)
            if self.leaving:
                self._app.exit(self.leaving)
        else:
            self.leaving = None
            reason = str(answer.get("reason") or "no reason was given")
            self._tell(f"{self._app.glyphs.failed} not applied: {words}: {reason}", "warning", REFUSAL_SECONDS)
            self._app.notify(reason, title=f"{words}: not applied", severity="error", markup=False)

    def _tell(self, text: str, role: str, seconds: float = SECONDS) -> None:
        self._told += 1
        number = self._told
        self._app.tell((text, role))
        self._app.set_timer(seconds, lambda: self._app.tell(None) if number == self._told else None)


def is_held(snapshot: Snapshot) -> bool:
    """Whether the training is paused, or was asked to pause."""
    asked = (snapshot.status.asked or {}).get("command")
    return snapshot.status.state == "paused" or (isinstance(asked, dict) and asked.get("name") == "pause")
