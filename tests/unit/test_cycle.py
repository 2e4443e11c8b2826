"""Where an iteration of several optimizers ends: the sequences of real training loops, written out by hand."""

from __future__ import annotations

import tracemalloc

from fp8console.probe.cycle import StepCycle


def ends(sequence: str, cycle: StepCycle | None = None) -> str:
    """The keys after which a step ended, "." for the others."""
    cycle = cycle or StepCycle()
    return "".join(key if cycle.closes(key) else "." for key in sequence)


def test_one_optimizer_ends_each_step() -> None:
    assert ends("aaaa") == "aaaa"


def test_a_gan_ends_its_steps_with_the_second_optimizer() -> None:
    # The second optimizer is not known before it has stepped, the end of a round not before the next one starts.
    assert ends("dgdgdgdg") == "d..g.g.g"


def test_three_optimizers_end_with_the_last() -> None:
    assert ends("abcabcabc") == "a....c..c"


def test_wgan_with_five_critic_updates_ends_with_the_generator() -> None:
    found = ends("cccccg" * 6)
    assert found[:6] == "ccccc."  # nothing tells yet that there is a generator
    assert found[12:] == ".....g" * 4  # one whole round was seen


def test_irregular_rounds_end_with_the_key_that_closed_the_last_one() -> None:
    cycle = StepCycle()
    ends("dgddgdddgddddgdg", cycle)
    assert ends("dddgdgddg", cycle) == "...g.g..g"


def test_an_odd_round_now_and_then_costs_that_round_alone() -> None:
    cycle = StepCycle()
    ends("dg" * 10, cycle)
    assert ends("dddgdgdgdg", cycle) == ".......g.g" or ends("dgdg", cycle).endswith("g.g")


def test_a_replaced_optimizer_is_learnt() -> None:
    cycle = StepCycle()
    ends("a" * 20, cycle)
    found = ends("b" * 40, cycle)
    assert "." * 14 not in found and found.endswith("b" * 20)


def test_a_pair_replaced_by_another_pair_is_learnt() -> None:
    cycle = StepCycle()
    ends("ab" * 20, cycle)
    assert ends("cd" * 40, cycle).endswith(".d" * 20)


def test_the_leader_goes_on_alone_when_the_others_are_used_no_more() -> None:
    cycle = StepCycle()
    ends("ab" * 20, cycle)
    found = ends("a" * 200, cycle)
    assert found.endswith("a" * 100)


def test_the_leader_goes_on_alone_after_irregular_rounds() -> None:
    cycle = StepCycle()
    ends("abaabaaabaaaabab", cycle)
    assert ends("a" * 200, cycle).endswith("a" * 100)


def test_optimizers_that_alternate_in_long_phases_keep_ending_steps() -> None:
    found = ends(("a" * 100 + "b" * 100) * 3)
    assert all(found[start : start + 70].strip(".") for start in range(0, len(found) - 70, 10))


def test_nothing_grows_with_the_number_of_updates() -> None:
    cycle = StepCycle()
    ends("ab" * 5, cycle)
    tracemalloc.start()
    ends("a" * 1000, cycle)
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(20_000):
        cycle.closes("a")
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 20_000
