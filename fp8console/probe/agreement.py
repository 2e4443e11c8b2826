"""At which step a command is applied: the training thread's side of the two-phase agreement.

The supervisor asks every rank (*prepare*); a reader thread answers with the last finished step s and promises that the
training thread will not pass boundary s + 1 before it has heard more; the supervisor takes N = max(s) + 1 over all
ranks (*commit*), and each applies at its boundary N. No collective is used and the coordinator is not a training
thread, so ranks that wait in a collective can't block it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: Seconds that the training waits for a decision. The supervisor gives up on a silent rank long before; this is for a
#: supervisor that hangs itself (stopped, or stuck on a disk) without its connection ending.
HOLD_SECONDS = 60.0


@dataclass
class Agreed:
    """A command and the step at which it is to be applied (None: not decided yet)."""

    id: str
    command: dict[str, Any]
    hold_at: int
    step: int | None = None


class Agreement:
    """One command at a time between a reader thread and the training thread."""

    def __init__(
        self, check: Callable[[dict[str, Any]], str | None] = lambda command: None, hold_seconds: float = HOLD_SECONDS
    ) -> None:
        self._condition = threading.Condition()
        self._check = check
        self._hold_seconds = hold_seconds
        self._step = 0
        self._paused = False
        self._agreed: Agreed | None = None
        self._lost = False

    # -- reader thread --------------------------------------------------------------------------------------------
    def prepare(self, id: str, command: dict[str, Any]) -> dict[str, Any]:
        """Promise to hold; the answer for the supervisor: ``step``, ``paused``, ``refused`` (reason or None)."""
        try:
            reason = self._check(command)
        except Exception as error:
            reason = f"it can't be checked here: {type(error).__name__}: {error}"
        with self._condition:
            self._lost = False
            if reason is None:
                hold_at = self._step if self._paused else self._step + 1
                self._agreed = Agreed(id, command, hold_at)
            return {"prepared": id, "step": self._step, "paused": self._paused, "refused": reason}

    def commit(self, id: str, step: int) -> str | None:
        """The command is to be applied at boundary ``step``; the reason if it won't be."""
        with self._condition:
            if self._agreed is None or self._agreed.id != id:
                return f"the training went on at step {self._step:,}: the decision came too late"
            self._agreed.step = step
            self._condition.notify_all()
            return None

    def abort(self, id: str) -> None:
        """Another rank refused: forget the command."""
        with self._condition:
            if self._agreed is not None and self._agreed.id == id:
                self._agreed = None
                self._condition.notify_all()

    def supervisor_lost(self) -> None:
        """Nobody will commit any more: an undecided command is forgotten, so that no rank waits for ever."""
        with self._condition:
            self._lost = True
            if self._agreed is not None and self._agreed.step is None:
                self._agreed = None
            self._condition.notify_all()

    def supervisor_found(self) -> None:
        """There is a connection (again)."""
        with self._condition:
            self._lost = False

    # -- training thread ------------------------------------------------------------------------------------------
    def arrive(self, step: int) -> Agreed | None:
        """The training has reached boundary ``step``: what is to be applied here, after waiting for the decision."""
        with self._condition:
            self._step = step
            if self._agreed is None:
                return None
            end = time.monotonic() + self._hold_seconds
            while self._agreed is not None and self._agreed.step is None and self._agreed.hold_at <= step:
                if not self._condition.wait(max(0.0, end - time.monotonic())) and time.monotonic() >= end:
                    self._agreed = None
            return self._take(step)

    def wait_paused(self, timeout: float) -> Agreed | None:
        """While paused: the next decided command, or None after ``timeout`` seconds.

        It is taken whatever its step: a training that holds never reaches another (other ranks may run on, after a
        restart for one).
        """
        with self._condition:
            self._paused = True
            self._condition.wait_for(lambda: self._agreed is not None and self._agreed.step is not None, timeout)
            agreed = self._agreed
            if agreed is None or agreed.step is None:
                return None
            self._agreed = None
            return agreed

    def unpause(self) -> None:
        """The training goes on."""
        with self._condition:
            self._paused = False

    @property
    def lost(self) -> bool:
        return self._lost

    def _take(self, step: int) -> Agreed | None:
        agreed = self._agreed
        if agreed is None or agreed.step is None or agreed.step > step:
            return None
        self._agreed = None
        return agreed
