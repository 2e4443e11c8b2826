"""Commands, one after the other, agreed over all ranks so that each applies at the same step.

Two phases without collectives: every rank promises to hold at its next boundary and tells its step; the command is
then set for the step after the furthest rank's. A rank that refuses, leaves or does not exist ends it for all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

#: Seconds for every rank to answer a command's first phase; meanwhile all of them hold. Well below the ranks' own limit
#: (probe/agreement.py), so that no rank has gone on by itself when the command is set.
PREPARE_SECONDS = 20.0
#: Seconds that a command waits for the rest of the ranks once some have joined, or some have left.
INCOMPLETE_SECONDS = 60.0


class RankLeft(RuntimeError):
    """A rank's connection ended while it was needed."""


@dataclass
class RankPeer:
    """One connected rank: its hello, how to reach it, what it is expected to answer."""

    rank: int
    hello: dict[str, Any]
    send: Callable[[dict[str, Any]], None]
    progress: dict[str, Any] = field(default_factory=dict)
    waiting: dict[tuple[str, str], asyncio.Future[dict[str, Any]]] = field(default_factory=dict)

    def expect(self, what: str, id: str) -> asyncio.Future[dict[str, Any]]:
        """A future of the message ``{what: id, ...}`` from this rank; fails with RankLeft when it leaves first."""
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.waiting[(what, id)] = future
        return future

    def receive(self, message: dict[str, Any]) -> None:
        for what in ("prepared", "taken", "done"):
            if what in message:
                future = self.waiting.pop((what, str(message[what])), None)
                if future is not None and not future.done():
                    future.set_result(message)

    def left(self) -> None:
        for future in self.waiting.values():
            if not future.done():
                future.set_exception(RankLeft(f"rank {self.rank} ended"))
        self.waiting.clear()


@dataclass
class Request:
    """A command on its way. ``answer`` is called with each state of it: asked, then applied or refused."""

    id: str
    command: dict[str, Any]
    answer: Callable[[dict[str, Any]], None]
    internal: bool = False


class Coordinator:
    """Owns the ranks and the queue. ``resolve`` turns words ("best") into steps; a str result of it is a refusal."""

    def __init__(
        self,
        resolve: Callable[[dict[str, Any]], dict[str, Any] | str],
        prepare_seconds: float = PREPARE_SECONDS,
        incomplete_seconds: float = INCOMPLETE_SECONDS,
    ) -> None:
        self.ranks: dict[int, RankPeer] = {}
        self.paused = False
        self._resolve = resolve
        self._prepare_seconds = prepare_seconds
        self._incomplete_seconds = incomplete_seconds
        self._since_change = 0.0
        self._queue: asyncio.Queue[Request] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._ended: str | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, request: Request) -> None:
        """Queue a command; it is answered "refused" at once when the training has ended."""
        if self._ended is not None:
            request.answer({"state": "refused", "reason": self._ended})
            return
        self._queue.put_nowait(request)

    def joined(self, peer: RankPeer) -> None:
        self.ranks[peer.rank] = peer
        self._note_change()

    def left(self, peer: RankPeer) -> None:
        peer.left()
        if self.ranks.get(peer.rank) is peer:
            del self.ranks[peer.rank]
            self.paused = self.paused and bool(self.ranks)
            self._note_change()

    def _note_change(self) -> None:
        self._since_change = asyncio.get_running_loop().time()
        self._changed.set()

    def end(self, reason: str) -> None:
        """The training is over: refuse what waits and all that comes."""
        self._ended = reason
        for peer in list(self.ranks.values()):
            peer.left()
        while not self._queue.empty():
            self._queue.get_nowait().answer({"state": "refused", "reason": reason})
        self._changed.set()

    @property
    def complete(self) -> bool:
        """Whether every rank of the world has joined."""
        sizes = [int(peer.hello.get("world_size") or 1) for peer in self.ranks.values()]
        return bool(sizes) and len(self.ranks) >= max(sizes)

    async def run(self) -> None:
        """Carry out the queue, for ever."""
        while True:
            request = await self._queue.get()
            try:
                await self._carry_out(request)
            except Exception as error:  # the next command must not suffer from this one
                try:
                    request.answer({"state": "refused", "reason": self._ended or _reason(error)})
                except Exception:
                    pass  # it was the answering that failed

    async def _wait_for_ranks(self) -> str | None:
        """Until every rank is there; a reason when they won't be. For the first one it waits without limit."""
        while not self.complete and self._ended is None:
            self._changed.clear()
            left = None
            if self.ranks:
                left = self._since_change + self._incomplete_seconds - asyncio.get_running_loop().time()
                if left <= 0:
                    size = max(int(peer.hello.get("world_size") or 1) for peer in self.ranks.values())
                    return f"only {len(self.ranks)} of {size} ranks are connected; a command needs all of them"
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except asyncio.TimeoutError:
                pass
        return self._ended

    async def _carry_out(self, request: Request) -> None:
        reason = await self._wait_for_ranks()
        if reason is not None:
            request.answer({"state": "refused", "reason": reason})
            return
        command = self._resolve(request.command)
        if isinstance(command, str):
            request.answer({"state": "refused", "reason": command})
            return
        peers = list(self.ranks.values())
        expected = [peer.expect("prepared", request.id) for peer in peers]
        for peer in peers:
            peer.send({"prepare": request.id, "command": command})
        try:
            replies = await asyncio.wait_for(_all(expected), self._prepare_seconds)
            refusal = next((str(reply["refused"]) for reply in replies if reply.get("refused")), None)
            steps = [int(reply["step"]) + (0 if reply.get("paused") else 1) for reply in replies]
        except asyncio.TimeoutError:
            silent = ", ".join(str(peer.rank) for peer in peers if ("prepared", request.id) in peer.waiting)
            refusal = f"rank {silent} did not answer within {self._prepare_seconds:g} s"
        except Exception as error:
            refusal = self._ended or _reason(error)
        if refusal is not None:
            # Every rank that has promised to hold must hear that it need not.
            for peer in peers:
                peer.waiting.pop(("prepared", request.id), None)
                peer.send({"abort": request.id})
            request.answer({"state": "refused", "reason": refusal})
            return
        if all(int(peer.hello.get("world_size") or 1) == 1 for peer in peers):
            at = steps  # trainings that know nothing of each other count for themselves
        else:
            at = [max(steps)] * len(peers)
        done = [peer.expect("done", request.id) for peer in peers]
        taken = [peer.expect("taken", request.id) for peer in peers]
        for peer, step in zip(peers, at):
            peer.send({"commit": request.id, "step": step})
        finishing = asyncio.ensure_future(self._finish(request, command, peers, done))
        self._tasks.add(finishing)
        finishing.add_done_callback(self._tasks.discard)
        # A checkpoint is answered when it is on disk, but frees the queue once its copy is taken.
        copied = asyncio.ensure_future(asyncio.gather(*taken, return_exceptions=True))
        await asyncio.wait({finishing, copied}, return_when=asyncio.FIRST_COMPLETED)
        copied.cancel()
        for future in taken:
            future.cancel()
        for peer in peers:
            peer.waiting.pop(("taken", request.id), None)

    async def _finish(
        self,
        request: Request,
        command: dict[str, Any],
        peers: list[RankPeer],
        done: list[asyncio.Future[dict[str, Any]]],
    ) -> None:
        try:
            answers = await _all(done)
            self._answer(request, command, peers, answers)
        except Exception as error:
            request.answer({"state": "refused", "reason": self._ended or _reason(error)})

    def _answer(
        self, request: Request, command: dict[str, Any], peers: list[RankPeer], answers: list[dict[str, Any]]
    ) -> None:
        failed = [answer for answer in answers if not answer.get("ok")]
        if failed:
            request.answer({"state": "refused", "reason": str(failed[0].get("reason"))})
            return
        first = min(range(len(peers)), key=lambda i: peers[i].rank)
        detail = dict(answers[first].get("detail") or {})
        steps = sorted({int(answer["step"]) for answer in answers})
        if len(peers) > 1:
            detail["ranks"] = len(peers)
            if "digests_equal" in detail:
                detail["digests_equal"] = all((answer.get("detail") or {}).get("digests_equal") for answer in answers)
        if len(steps) > 1:
            detail["steps"] = steps
        if command["name"] in ("pause", "step"):
            self.paused = True
        elif command["name"] == "resume":
            self.paused = False
        request.answer({"state": "applied", "step": steps[-1], "detail": detail})


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, RankLeft) else f"{type(error).__name__}: {error}"


async def _all(futures: list[asyncio.Future[dict[str, Any]]]) -> list[dict[str, Any]]:
    return list(await asyncio.gather(*futures))
