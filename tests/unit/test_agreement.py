"""The training thread's side of the agreement: nobody hangs, nobody passes the decided step."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from fp8console.probe.agreement import Agreed, Agreement

COMMAND = {"name": "pause"}


class Training(threading.Thread):
    """Runs through boundaries until it is told to end; notes what it took at which step.

    ``others`` are kept within three steps, as by collectives, which let ranks drift that little apart.
    """

    def __init__(self, agreement: Agreement, pace: float = 0.001) -> None:
        super().__init__(daemon=True)
        self.agreement = agreement
        self.pace = pace
        self.others: list[Training] = []
        self.step = 0
        self.taken: list[tuple[int, str]] = []
        self.ending = False

    def run(self) -> None:
        while not self.ending:
            time.sleep(self.pace)
            if any(self.step > other.step + 3 and not other.ending for other in self.others):
                continue
            self.step += 1
            agreed = self.agreement.arrive(self.step)
            if agreed is not None:
                self.taken.append((self.step, agreed.id))

    def end(self) -> None:
        self.ending = True
        self.join(5.0)
        assert not self.is_alive()


def arrive_in_thread(agreement: Agreement, step: int) -> tuple[threading.Thread, list[Agreed | None]]:
    found: list[Agreed | None] = []
    thread = threading.Thread(target=lambda: found.append(agreement.arrive(step)), daemon=True)
    thread.start()
    return thread, found


def test_nothing_asked_is_nothing_taken() -> None:
    assert Agreement().arrive(1) is None


def test_the_promise_holds_at_the_next_boundary_and_a_commit_frees_it() -> None:
    agreement = Agreement()
    agreement.arrive(4)
    assert agreement.prepare("x", COMMAND) == {"prepared": "x", "step": 4, "paused": False, "refused": None}
    thread, found = arrive_in_thread(agreement, 5)
    thread.join(0.1)
    assert thread.is_alive()
    assert agreement.commit("x", 5) is None
    thread.join(5.0)
    assert found[0] is not None and (found[0].id, found[0].step, found[0].command) == ("x", 5, COMMAND)
    assert agreement.arrive(6) is None  # taken once


def test_a_later_step_is_waited_for() -> None:
    agreement = Agreement()
    agreement.arrive(1)
    agreement.prepare("x", COMMAND)
    agreement.commit("x", 4)
    assert [agreement.arrive(step) for step in (2, 3)] == [None, None]
    taken = agreement.arrive(4)
    assert taken is not None and taken.id == "x"


@pytest.mark.parametrize("way", ["abort", "lost"])
def test_a_promise_is_lifted(way: str) -> None:
    agreement = Agreement()
    agreement.prepare("x", COMMAND)
    thread, found = arrive_in_thread(agreement, 1)
    thread.join(0.05)
    assert thread.is_alive()
    agreement.abort("another's")  # changes nothing
    thread.join(0.05)
    assert thread.is_alive()
    if way == "abort":
        agreement.abort("x")
    else:
        agreement.supervisor_lost()
    thread.join(5.0)
    assert found == [None] and agreement.arrive(2) is None


def test_a_decided_command_survives_the_supervisors_death() -> None:
    agreement = Agreement()
    agreement.prepare("x", COMMAND)
    agreement.commit("x", 3)
    agreement.supervisor_lost()
    assert agreement.arrive(2) is None
    assert agreement.arrive(3) is not None


def test_lost_is_over_when_there_is_a_connection_again() -> None:
    agreement = Agreement()
    agreement.supervisor_lost()
    assert agreement.lost
    agreement.supervisor_found()
    assert not agreement.lost


def test_a_stopped_supervisor_does_not_hold_the_training_for_ever() -> None:
    """Its socket stays open, so nothing tells that it will never decide."""
    agreement = Agreement(hold_seconds=0.2)
    agreement.prepare("x", COMMAND)
    started = time.monotonic()
    assert agreement.arrive(1) is None
    assert 0.15 < time.monotonic() - started < 2.0
    assert agreement.arrive(2) is None
    reason = agreement.commit("x", 1)
    assert reason is not None and "step 2" in reason
    assert agreement.arrive(3) is None


def test_a_refusal_and_a_check_that_fails_hold_nothing() -> None:
    def check(command: dict[str, Any]) -> str | None:
        if command["name"] == "bad":
            return "no"
        raise RuntimeError("dictionary changed size during iteration")

    agreement = Agreement(check)
    assert agreement.prepare("x", {"name": "bad"})["refused"] == "no"
    assert "dictionary changed" in agreement.prepare("y", {"name": "odd"})["refused"]
    assert agreement.arrive(1) is None


def test_paused_takes_what_is_decided_for_any_step_and_never_spins() -> None:
    """After a restart another rank may run on, ahead: the common step is one that this rank never reaches."""
    agreement = Agreement()
    agreement.arrive(10)
    assert agreement.wait_paused(0.0) is None
    assert agreement.prepare("x", {"name": "resume"})["paused"] is True
    agreement.commit("x", 12)
    taken = agreement.wait_paused(1.0)
    assert taken is not None and taken.id == "x"
    started = time.monotonic()
    assert agreement.wait_paused(0.1) is None
    assert time.monotonic() - started >= 0.09
    agreement.unpause()
    assert agreement.prepare("y", COMMAND)["paused"] is False


def test_two_trainings_at_different_paces_apply_each_command_at_one_step() -> None:
    trainings = [Training(Agreement(), pace) for pace in (0.0002, 0.001)]
    for training in trainings:
        training.others = [other for other in trainings if other is not training]
        training.start()
    decided = []
    for number in range(60):
        answers = [training.agreement.prepare(str(number), COMMAND) for training in trainings]
        step = max(answer["step"] + 1 for answer in answers)
        if number % 5 == 4:
            for training in trainings:
                training.agreement.abort(str(number))
            continue
        for training in trainings:
            training.agreement.commit(str(number), step)
        decided.append((step, str(number)))
        end = time.monotonic() + 10
        while any(len(training.taken) < len(decided) for training in trainings):
            assert time.monotonic() < end, "a training hangs"
            time.sleep(0.001)
    for training in trainings:
        training.end()
        assert training.taken == decided


def test_threads_that_do_anything_in_any_order_never_hang() -> None:
    agreement = Agreement(hold_seconds=0.5)
    training = Training(agreement, 0.0)
    training.start()
    for number in range(2000):
        id = str(number)
        agreement.prepare(id, COMMAND)
        match number % 7:
            case 0:
                agreement.supervisor_lost()
            case 1:
                agreement.abort(id)
            case 2:
                agreement.prepare(id + "again", COMMAND)
                agreement.commit(id, training.step + 1)  # a decision that belongs to nothing any more
                agreement.abort(id + "again")
            case _:
                agreement.commit(id, training.step + number % 3)
    agreement.supervisor_lost()
    before = training.step
    end = time.monotonic() + 5
    while training.step < before + 10:
        assert time.monotonic() < end, "the training hangs"
        time.sleep(0.001)
    training.end()
