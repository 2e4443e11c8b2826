"""Commands over ranks that drift, refuse, fall silent or leave: all are answered, no rank is left holding."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from fp8console.supervisor.coordinator import Coordinator, RankPeer, Request

COMMAND = {"name": "set", "scale": 4.0}


class Rank:
    """A rank that obeys as the probe does, on the event loop; ``leave_at`` names the message at which it is gone."""

    def __init__(self, coordinator: Coordinator, rank: int, step: int, world: int = 2, leave_at: str = "") -> None:
        self.peer = RankPeer(rank, {"world_size": world}, self.hear)
        self.coordinator = coordinator
        self.step = step
        self.leave_at = leave_at
        self.refuses: str | None = None
        self.silent = False
        self.slow_done = False
        self.holding: set[str] = set()
        self.applied: list[tuple[str, int]] = []
        self.heard: list[dict[str, Any]] = []
        coordinator.joined(self.peer)

    def hear(self, message: dict[str, Any]) -> None:
        self.heard.append(message)
        kind = next(iter(message))
        if kind == self.leave_at:
            asyncio.get_running_loop().call_soon(self.leave)
        elif not self.silent:
            asyncio.get_running_loop().call_soon(self.obey, kind, message)

    def obey(self, kind: str, message: dict[str, Any]) -> None:
        id = message[kind]
        if kind == "prepare":
            if self.refuses is None:
                self.holding.add(id)
            self.step += 1  # the training goes on until its next boundary
            self.say({"prepared": id, "step": self.step - 1, "paused": False, "refused": self.refuses})
        elif kind == "abort":
            self.holding.discard(id)
        elif kind == "commit":
            self.holding.discard(id)
            self.step = max(self.step, message["step"])
            self.applied.append((id, self.step))
            if self.slow_done:
                self.say({"taken": id, "step": self.step})
            else:
                self.say({"done": id, "step": self.step, "ok": True, "detail": {"digests_equal": True}})

    def say(self, message: dict[str, Any]) -> None:
        self.peer.receive(message)

    def leave(self) -> None:
        self.coordinator.left(self.peer)


class Desk:
    """A coordinator at work, and the answers to what was asked of it."""

    def __init__(self, **options: Any) -> None:
        self.coordinator = Coordinator(lambda command: command, **options)
        self.answers: dict[str, list[dict[str, Any]]] = {}
        self.task = asyncio.get_running_loop().create_task(self.coordinator.run())

    def ask(self, id: str, command: dict[str, Any] = COMMAND) -> None:
        self.answers[id] = []
        self.coordinator.submit(Request(id, command, self.answers[id].append))

    async def answer(self, id: str, seconds: float = 2.0) -> dict[str, Any]:
        end = asyncio.get_running_loop().time() + seconds
        while not self.answers[id]:
            assert asyncio.get_running_loop().time() < end, f"{id} is never answered"
            assert not self.task.done(), "the coordinator has died"
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        assert len(self.answers[id]) == 1
        return self.answers[id][0]


async def test_ranks_that_drift_apply_at_the_step_after_the_furthest() -> None:
    desk = Desk()
    ranks = [Rank(desk.coordinator, rank, step) for rank, step in enumerate((10, 13, 11))]
    for rank in ranks:
        rank.peer.hello["world_size"] = 3
    desk.ask("x")
    answer = await desk.answer("x")
    assert answer == {"state": "applied", "step": 14, "detail": {"digests_equal": True, "ranks": 3}}
    assert [rank.applied for rank in ranks] == [[("x", 14)]] * 3


async def test_trainings_that_know_nothing_of_each_other_keep_their_own_steps() -> None:
    """The furthest one's step may be hours away for a training that has just begun."""
    desk = Desk()
    ranks = [Rank(desk.coordinator, rank, step, world=1) for rank, step in enumerate((5000, 3))]
    desk.ask("x")
    assert (await desk.answer("x"))["detail"]["steps"] == [4, 5001]
    assert [rank.applied for rank in ranks] == [[("x", 5001)], [("x", 4)]]


async def test_a_paused_rank_is_at_its_step_already() -> None:
    desk = Desk()
    rank = Rank(desk.coordinator, 0, 7, world=1)
    rank.obey = lambda kind, message: (  # type: ignore[method-assign]
        rank.say({"prepared": "x", "step": 7, "paused": True, "refused": None})
        if kind == "prepare"
        else rank.say({"done": "x", "step": 7, "ok": True, "detail": None})
    )
    desk.ask("x", {"name": "resume"})
    assert (await desk.answer("x")) == {"state": "applied", "step": 7, "detail": {}}
    assert rank.heard[1] == {"commit": "x", "step": 7}


async def test_one_refusal_is_everybodys() -> None:
    desk = Desk()
    ranks = [Rank(desk.coordinator, 0, 5), Rank(desk.coordinator, 1, 5)]
    ranks[1].refuses = "no scaler here"
    desk.ask("x")
    assert await desk.answer("x") == {"state": "refused", "reason": "no scaler here"}
    assert not ranks[0].holding and not ranks[0].applied
    ranks[1].refuses = None
    desk.ask("y")
    assert (await desk.answer("y"))["state"] == "applied"


@pytest.mark.parametrize("moment", ["prepare", "commit"])
async def test_a_rank_that_leaves_leaves_nobody_holding(moment: str) -> None:
    desk = Desk(incomplete_seconds=0.1)
    stays, goes = Rank(desk.coordinator, 0, 5), Rank(desk.coordinator, 1, 5, leave_at=moment)
    desk.ask("x")
    assert await desk.answer("x") == {"state": "refused", "reason": "rank 1 ended"}
    assert not stays.holding
    assert goes.peer.waiting == {}
    desk.ask("y")
    answer = await desk.answer("y")
    assert answer == {"state": "refused", "reason": "only 1 of 2 ranks are connected; a command needs all of them"}


async def test_restarted_ranks_are_waited_for() -> None:
    desk = Desk(incomplete_seconds=5.0)
    ranks = [Rank(desk.coordinator, 0, 5), Rank(desk.coordinator, 1, 5)]
    ranks[0].leave()
    ranks[1].leave()
    desk.ask("x")
    await asyncio.sleep(0.05)
    assert not desk.answers["x"]
    Rank(desk.coordinator, 0, 4)
    await asyncio.sleep(0.05)
    assert not desk.answers["x"]
    Rank(desk.coordinator, 1, 4)
    assert (await desk.answer("x"))["step"] == 5


async def test_a_rank_that_reconnects_before_its_old_connection_ends_stays() -> None:
    desk = Desk()
    old = Rank(desk.coordinator, 0, 5, world=1)
    new = Rank(desk.coordinator, 0, 6, world=1)
    old.leave()
    desk.ask("x")
    assert (await desk.answer("x"))["step"] == 7
    assert new.applied and not old.applied


async def test_a_silent_rank_does_not_hold_the_others_for_ever() -> None:
    desk = Desk(prepare_seconds=0.1)
    answers, silent = Rank(desk.coordinator, 0, 5), Rank(desk.coordinator, 1, 5)
    silent.silent = True
    desk.ask("x")
    assert await desk.answer("x") == {"state": "refused", "reason": "rank 1 did not answer within 0.1 s"}
    assert not answers.holding
    silent.say({"prepared": "x", "step": 5, "paused": False, "refused": None})  # too late: says nothing to anybody
    silent.silent = False
    desk.ask("y")
    assert (await desk.answer("y"))["state"] == "applied"


@pytest.mark.parametrize("reply", [{"step": None}, {}, {"step": "nan"}])
async def test_an_answer_that_makes_no_sense_is_a_refusal(reply: dict[str, Any]) -> None:
    desk = Desk()
    rank = Rank(desk.coordinator, 0, 5, world=1)
    rank.obey = lambda kind, message: rank.say({"prepared": message[kind], **reply})  # type: ignore[method-assign]
    desk.ask("x")
    assert (await desk.answer("x"))["state"] == "refused"
    assert rank.heard[-1] == {"abort": "x"}


async def test_commands_before_the_first_step_wait_in_order() -> None:
    desk = Desk(incomplete_seconds=0.05)
    for id in "abc":
        desk.ask(id)
    await asyncio.sleep(0.1)
    assert not any(desk.answers.values())
    rank = Rank(desk.coordinator, 0, 0, world=1)
    for id in "abc":
        await desk.answer(id)
    assert [id for id, _ in rank.applied] == ["a", "b", "c"]


async def test_a_checkpoint_frees_the_queue_when_its_copy_is_taken() -> None:
    desk = Desk()
    rank = Rank(desk.coordinator, 0, 5, world=1)
    rank.slow_done = True
    desk.ask("slow", {"name": "checkpoint", "tag": None})
    await asyncio.sleep(0.02)
    rank.slow_done = False
    desk.ask("next")
    assert (await desk.answer("next"))["state"] == "applied"
    assert not desk.answers["slow"]
    rank.say({"done": "slow", "step": 6, "ok": False, "reason": "No space left on device"})
    assert await desk.answer("slow") == {"state": "refused", "reason": "No space left on device"}


async def test_digests_are_equal_only_when_every_ranks_are() -> None:
    desk = Desk()
    ranks = [Rank(desk.coordinator, 0, 5), Rank(desk.coordinator, 1, 5)]
    obey = ranks[1].obey

    def unequal(kind: str, message: dict[str, Any]) -> None:
        if kind == "commit":
            ranks[1].say({"done": "x", "step": message["step"], "ok": True, "detail": {"digests_equal": False}})
        else:
            obey(kind, message)

    ranks[1].obey = unequal  # type: ignore[method-assign]
    desk.ask("x", {"name": "rollback", "to": 3})
    assert (await desk.answer("x"))["detail"]["digests_equal"] is False


@pytest.mark.parametrize("name, paused", [("pause", True), ("step", True), ("resume", False), ("set", False)])
async def test_it_knows_whether_the_training_is_paused(name: str, paused: bool) -> None:
    desk = Desk()
    rank = Rank(desk.coordinator, 0, 5, world=1)
    desk.ask("x", {"name": name})
    await desk.answer("x")
    assert desk.coordinator.paused is paused
    rank.leave()
    assert desk.coordinator.paused is False  # what comes in its place is not paused


@pytest.mark.parametrize("moment", ["waiting for ranks", "prepared", "committed", "queued"])
async def test_the_end_of_the_training_answers_everything(moment: str) -> None:
    desk = Desk()
    if moment != "waiting for ranks":
        rank = Rank(desk.coordinator, 0, 5, world=1)
        rank.silent = moment in ("prepared", "queued")
        if moment == "committed":
            obey = rank.obey
            rank.obey = lambda kind, message: obey(kind, message) if kind == "prepare" else None  # type: ignore
    desk.ask("x")
    desk.ask("y")
    await asyncio.sleep(0.02)
    desk.coordinator.end("the training has ended")
    desk.ask("z")
    for id in "xyz":
        assert await desk.answer(id) == {"state": "refused", "reason": "the training has ended"}


def raising(error: Exception) -> Callable[[Any], Any]:
    def function(argument: Any) -> Any:
        raise error

    return function


async def test_what_fails_in_one_command_does_not_stop_the_next() -> None:
    desk = Desk()
    Rank(desk.coordinator, 0, 5, world=1)
    desk.coordinator._resolve = raising(KeyError("step"))
    desk.ask("x")
    assert (await desk.answer("x"))["state"] == "refused"
    desk.coordinator._resolve = lambda command: command
    desk.coordinator.submit(Request("gone", COMMAND, raising(RuntimeError("the client's loop is closed"))))
    desk.ask("y")
    assert (await desk.answer("y"))["state"] == "applied"


async def test_words_that_mean_nothing_are_refused_before_anybody_holds() -> None:
    desk = Desk()
    rank = Rank(desk.coordinator, 0, 5, world=1)
    desk.coordinator._resolve = lambda command: "there is no restore point yet"
    desk.ask("x", {"name": "rollback", "to": "best"})
    assert await desk.answer("x") == {"state": "refused", "reason": "there is no restore point yet"}
    assert rank.heard == []
