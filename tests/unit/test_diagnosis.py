"""Episodes of hardware trouble, balance and bounds, on streams made by hand: what is expected is worked out here."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8console.diagnosis import cards
from fp8console.diagnosis.bounds import bounds
from fp8console.diagnosis.hardware import HardwareEpisodes
from fp8console.supervisor.hardware import HardwareWatch

GB = 1e9
Values = dict[str, Any]


def card(index: int = 0, **values: Any) -> Values:
    return {"index": index, "bdf": f"0000:{index:02x}:00.0", "name": "MI300X", "age": 0.1, **values}


def throttled(power: float | None = 0.0, thermal: float | None = 0.0, hbm: float | None = 0.0) -> Values:
    return {"throttle": {"power": power, "thermal": thermal, "hbm": hbm}}


def stream(
    seconds: int, gpus: Callable[[int], list[Values]], start: float = 1000.0, every: int = 1, **more: Any
) -> list[dict[str, Any]]:
    """A sample a second, or ``every`` so many; ``gpus`` is called with the second."""
    return [
        {"time": start + second, "source": "amdsmi", "state": "ok", "gpus": gpus(second), "host": {}, **more}
        for second in range(0, seconds, every)
    ]


def found(samples: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """All events of a stream, with the time at which each came as ``at``."""
    episodes = HardwareEpisodes()
    return [{**event, "at": sample["time"]} for sample in samples for event in episodes.take(sample)]


def kinds(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(event["kind"], event.get("what") or event["of"]) for event in events]


@pytest.mark.parametrize(
    ("cause", "share", "words"),
    [
        ("power", 0.41, "GPU 0 is held back by the power limit 41% of the time (749 of 750 W, 1,410 MHz)"),
        ("thermal", 0.2, "GPU 0 is throttled by heat 20% of the time (hottest spot 99 C, 1,410 MHz)"),
        ("hbm", 0.2, "GPU 0 is throttled by the memory's heat 20% of the time (memory 96 C, 1,410 MHz)"),
    ],
)
def test_one_episode_is_one_alert_and_one_end(cause: str, share: float, words: str) -> None:
    figures = {"power_w": 749.0, "power_cap_w": 750, "temperature_c": 99, "memory_temperature_c": 96, "clock_mhz": 1410}

    def gpus(second: int) -> list[Values]:
        return [card(**figures, **throttled(**{cause: share if 30 <= second < 300 else 0.0}))]

    events = found(stream(400, gpus))
    assert kinds(events) == [("hardware", f"throttling_{cause}"), ("recovered", f"throttling_{cause}")]
    begun, over = events
    # The mean passes the limit a few seconds after second 30, then others are waited for; a quiet minute ends it.
    assert 1030 < begun["at"] <= 1030 + cards.WINDOW + 5 and 1360 < over["at"] <= 1360 + cards.WINDOW
    assert begun["gpus"] == [0] and begun["episode"] == over["episode"] == 1
    assert begun["evidence"][0]["gpu"] == 0 and begun["evidence"][0]["clock_mhz"] == 1410
    assert over["worst"] == pytest.approx(share) and over["since"] == begun["since"]
    assert over["text"].startswith("GPU 0: ") and ": over after" in over["text"]
    steady = found(stream(60, lambda second: [card(**figures, **throttled(**{cause: share}))]))
    assert [event["text"] for event in steady] == [words]


def test_a_ripple_and_a_lone_spike_are_no_alert() -> None:
    rng = random.Random(3)
    ripple = stream(600, lambda second: [card(**throttled(power=rng.uniform(0.0, 0.4), thermal=rng.uniform(0, 0.06)))])
    assert found(ripple) == []
    # One second in ten entirely held back by heat is a tenth of the time: that is news. Once in forty is not.
    assert found(stream(200, lambda second: [card(**throttled(thermal=0.4 * (second % 40 == 20)))])) == []
    assert kinds(found(stream(200, lambda second: [card(**throttled(thermal=float(second % 10 == 5)))]))) == [
        ("hardware", "throttling_thermal")
    ]


def test_noise_about_the_limit_begins_one_episode_and_does_not_end_it() -> None:
    rng = random.Random(5)
    noisy = stream(900, lambda second: [card(**throttled(thermal=0.05 + rng.uniform(-0.03, 0.03)))])
    assert kinds(found(noisy)) == [("hardware", "throttling_thermal")]


def test_cards_that_begin_together_are_one_episode_and_one_that_follows_has_its_own() -> None:
    def gpus(second: int) -> list[Values]:
        begin = {index: 20 + index % 3 for index in range(8)} | {5: 100}
        return [card(index, **throttled(power=0.9 * (second >= begin[index] and second < 200))) for index in range(8)]

    events = found(stream(300, gpus))
    others = [0, 1, 2, 3, 4, 6, 7]
    assert [(event["kind"], sorted(event["gpus"])) for event in events[:2]] == [("hardware", others), ("hardware", [5])]
    assert [(event["kind"], event["episode"]) for event in events[2:]] == [("recovered", 1), ("recovered", 2)]
    assert events[0]["text"].startswith("GPUs 0-4, 6, 7 are held back by the power limit up to ")


def test_unknown_neither_ends_an_episode_nor_begins_another() -> None:
    def gpus(second: int) -> list[Values]:
        if 60 <= second < 120:
            return [card(**throttled(None, None, None))] if second % 2 else []
        if 120 <= second < 180:
            return [{**card(**throttled(thermal=0.0)), "age": 14.0}]  # a zero that is 14 s old says nothing
        return [card(**throttled(thermal=0.5 if second < 240 else 0.0))]

    assert kinds(found(stream(400, gpus))) == [("hardware", "throttling_thermal"), ("recovered", "throttling_thermal")]


def test_a_pause_for_an_evaluation_is_not_the_end_of_an_episode() -> None:
    heat = stream(500, lambda second: [card(**throttled(thermal=0.3 * (second % 120 < 70)))])
    assert kinds(found(heat)) == [("hardware", "throttling_thermal")]


def test_the_open_episodes_stand_in_the_record() -> None:
    episodes = HardwareEpisodes()
    for sample in stream(120, lambda second: [card(3, **throttled(hbm=0.5 * (second < 30)))]):
        episodes.take(sample)
        if sample["time"] == 1020:
            assert [(one["episode"], one["what"], one["gpus"]) for one in episodes.open] == [(1, "throttling_hbm", [3])]
    assert episodes.open == []


def test_new_uncorrectable_errors_are_told_at_once_and_those_of_before_are_not() -> None:
    def gpus(second: int) -> list[Values]:
        return [card(ecc_uncorrectable=2 + (second >= 50) + 2 * (second >= 300))]

    events = found(stream(1000, gpus, every=5))
    assert [(event["kind"], event["at"]) for event in events] == [("hardware", 1050.0), ("recovered", 1900.0)]
    assert "GPU 0: 1 new uncorrectable memory error (ECC)" in events[0]["text"]
    assert events[0]["evidence"][0]["count"] == 3
    reset = stream(100, lambda second: [card(ecc_uncorrectable=7 if second < 40 else 0)])
    assert found(reset) == [], "a driver's reset brings the counter down: that is no error"


def test_correctable_errors_are_told_when_they_rise() -> None:
    hourly = stream(4800, lambda second: [card(ecc_correctable=100 + second // 1200)], every=10)
    assert found(hourly) == [], "three an hour"

    def gpus(second: int) -> list[Values]:
        return [card(ecc_correctable=100 + min(6, second // 100))]

    events = found(stream(5000, gpus, every=10))
    assert kinds(events) == [("hardware", "ecc_correctable"), ("recovered", "ecc_correctable")]
    assert events[0]["at"] == 1500.0, "the fifth"
    # Rises at 100 to 600 s: an hour after the fifth only the sixth is left.
    assert events[1]["at"] == 1000 + 500 + 3600


def test_memory_pressure_has_room_between_its_limits() -> None:
    def gpus(second: int) -> list[Values]:
        share = 0.9 if second < 50 else 0.98 if second < 100 else 0.955 + 0.01 * (second % 2) if second < 400 else 0.9
        return [card(1, vram_used=share * 192 * GB, vram_total=192 * GB)]

    events = found(stream(500, gpus))
    assert kinds(events) == [("hardware", "memory"), ("recovered", "memory")]
    assert events[0]["text"].startswith("GPU 1: memory is 9") and events[1]["at"] > 1400


def test_the_host_and_its_disk() -> None:
    host = {"memory_used": 981 * GB, "memory_total": 1024 * GB, "run_dir_free": 1.2 * GB, "run_dir_total": 800 * GB}
    events = found(stream(30, lambda second: [], host=host))
    assert sorted(event["text"] for event in events) == [
        "1.2 GB of 800 GB free where the run directory is: checkpoints and records may fail",
        "host memory is 96% full (981 GB of 1.0 TB): the kernel may kill the training",
    ]
    assert all(event["gpus"] == [] for event in events)


def test_cards_of_others_are_not_told_of() -> None:
    mine, other = card(0, used=True, **throttled()), card(1, used=False, **throttled(thermal=0.9))
    assert found(stream(60, lambda second: [mine, other])) == []
    hidden = [card(0, torch_index=0, **throttled()), card(1, torch_index=None, **throttled(thermal=0.9))]
    assert found(stream(60, lambda second: hidden)) == []


def test_a_clock_set_back_is_no_alert_and_stops_nothing() -> None:
    before = stream(60, lambda second: [card(**throttled(thermal=0.02))], start=9000.0)
    after = stream(60, lambda second: [card(**throttled(thermal=0.5))], start=2000.0)
    assert kinds(found([*before, *after])) == [("hardware", "throttling_thermal")]


def test_a_clock_set_back_delays_neither_an_alert_nor_its_end() -> None:
    bad, well = [card(**throttled(thermal=0.5))], [card(**throttled())]
    gathering = stream(8, lambda second: bad, start=9000.0)
    (begun,) = found([*gathering, *stream(40, lambda second: bad, start=2000.0)])
    assert begun["kind"] == "hardware" and begun["at"] < 2000 + 15
    told = stream(60, lambda second: bad, start=9000.0)
    events = found([*told, *stream(120, lambda second: well, start=2000.0)])
    assert kinds(events) == [("hardware", "throttling_thermal"), ("recovered", "throttling_thermal")]
    assert events[1]["at"] < 2000 + 75 and events[1]["since"] <= events[1]["until"]
    ended = stream(20, lambda second: bad, start=9000.0) + stream(30, lambda second: well, start=9020.0)
    assert len(found([*ended, *stream(90, lambda second: well, start=2000.0)])) == 2
    errors = [card(ecc_uncorrectable=0)], [card(ecc_uncorrectable=1)]
    before = stream(20, lambda second: errors[second > 10], start=9000.0)
    events = found([*before, *stream(1000, lambda second: errors[1], start=2000.0)])
    assert kinds(events) == [("hardware", "ecc_uncorrectable"), ("recovered", "ecc_uncorrectable")]


def test_balance_after_a_clock_set_back_is_of_what_came_since() -> None:
    before = stream(60, lambda second: [card(0, busy=90), card(1, busy=90)], start=9000.0)
    after = stream(9, lambda second: [card(0, busy=90), card(1, busy=45)], start=2000.0)
    assert cards.balance([*before, *after]) == pytest.approx(0.5)


def test_sources_that_count_differently_are_no_errors() -> None:
    """The library counts blocks that sysfs does not show: taking turns is not an error each time."""

    def gpus(second: int) -> list[Values]:
        by_library = second % 20 < 10
        counts = {"ecc_uncorrectable": 2 if by_library else 0, "ecc_correctable": 40 if by_library else 3}
        return [card(source="amdsmi" if by_library else "sysfs", **counts)]

    assert found(stream(200, gpus)) == []
    more = [card(source="sysfs", ecc_uncorrectable=1, ecc_correctable=3)]
    assert kinds(found([*stream(200, gpus), *stream(5, lambda second: more, start=1200.0)])) == [
        ("hardware", "ecc_uncorrectable")
    ]


FIELDS = ("busy", "memory_busy", "vram_used", "vram_total", "throttle", "ecc_correctable", "ecc_uncorrectable", "age")
ODD: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.floats(), st.integers(-5, 2**64), st.text(max_size=3), st.just({}), st.just([None])
)
GPUS = st.lists(st.dictionaries(st.sampled_from((*FIELDS, "index", "bdf", "used", "torch_index")), ODD), max_size=3)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.one_of(GPUS, ODD), st.one_of(st.none(), st.just({}), ODD)), min_size=1, max_size=15))
def test_odd_records_are_unknown_and_nothing_else(pairs: list[tuple[Any, Any]]) -> None:
    samples = [{"time": 1000.0 + i, "gpus": gpus, "host": host} for i, (gpus, host) in enumerate(pairs)]
    found(samples)
    bounds(samples, None)
    cards.balance(samples)


def test_none_everywhere_says_nothing() -> None:
    empty = card(**dict.fromkeys(FIELDS))
    host = dict.fromkeys(("memory_used", "memory_total", "run_dir_free", "run_dir_total"))
    samples = stream(60, lambda second: [empty, card(1)], host=host)
    assert found(samples) == [] and cards.balance(samples) is None and bounds(samples, None) == []
    assert found([{"time": None}, {}, {"time": 3.0, "gpus": None}]) == []


# balance


def busy(*percents: float | None, seconds: int = 12, **more: Any) -> list[dict[str, Any]]:
    return stream(seconds, lambda second: [card(i, busy=value, **more) for i, value in enumerate(percents)])


def test_balance_is_the_lowest_mean_over_the_highest() -> None:
    assert cards.balance(busy(88, 44, 80)) == pytest.approx(0.5)
    assert cards.balance(busy(88, None, 80)) == pytest.approx(80 / 88), "an unknown card enters nothing"
    turns = stream(12, lambda second: [card(0, busy=100 * (second % 2)), card(1, busy=100 * ((second + 1) % 2))])
    assert cards.balance(turns) == pytest.approx(1.0), "cards that take turns are even over the ten seconds"


def test_balance_is_unknown_where_it_would_say_nothing() -> None:
    assert cards.balance(busy(88)) is None
    assert cards.balance(busy(1, 3)) is None, "none of them works"
    assert cards.balance(busy(88, 44, seconds=3)) is None, "two seconds are no ten"
    assert cards.balance([]) is None
    old = stream(12, lambda second: [{**card(0, busy=88), "age": 9}, card(1, busy=44)])
    assert cards.balance(old) is None


def test_balance_is_over_the_cards_of_the_run() -> None:
    samples = stream(12, lambda second: [card(0, busy=90, used=True), card(1, busy=81, used=True), card(2, busy=0)])
    assert cards.balance(samples) == pytest.approx(0.9)


def test_the_cards_of_a_run_on_partitions() -> None:
    """A card that is several of torch's devices has no single number, and is visible all the same."""
    hidden, mine = card(0, torch_index=None, torch_indices=[]), card(1, torch_index=None, torch_indices=[0, 1, 2])
    assert cards.run_cards([hidden, mine]) == [mine]
    assert cards.run_cards([card(0, torch_indices=3), card(1)]) == [card(0, torch_indices=3), card(1)]


def test_balance_of_xcds() -> None:
    assert cards.xcd_balance([50, 100, None]) == 0.5
    assert cards.xcd_balance([100, None]) is None and cards.xcd_balance(None) is None
    assert cards.xcd_balance([1, 5]) is None


@pytest.mark.parametrize(
    ("indices", "words"),
    [([2], "GPU 2"), ([0, 1], "GPUs 0, 1"), ([0, 1, 2, 3, 6], "GPUs 0-3, 6"), ([None], "a GPU"), ([], "a GPU")],
)
def test_cards_by_name(indices: list[int | None], words: str) -> None:
    assert cards.names([{"index": index} for index in indices]) == words


# bounds


def whats(samples: list[dict[str, Any]], share: float | None) -> list[str]:
    return [bound.what for bound in bounds(samples, share)]


def test_data_wait_bounds_from_a_tenth_of_the_step() -> None:
    assert whats([], 0.09) == [] and whats([], 0.10) == ["data wait"]
    assert bounds([], 0.34)[0].text == "data wait, 34% of the step"
    assert whats([], float("nan")) == []


def test_a_wait_that_the_cards_do_not_notice_bounds_nothing() -> None:
    assert whats(busy(70), 0.3) == ["data wait"]
    assert whats(busy(99), 0.3) == [], "the loader makes the host wait while the card works on what is queued"
    assert whats(busy(None), 0.3) == ["data wait"], "nothing known of the card"


def test_throttling_bounds() -> None:
    samples = stream(12, lambda second: [card(0, **throttled(0.1)), card(4, **throttled(0.4, 0.3))])
    (bound,) = bounds(samples, 0.0)
    assert bound.what == "throttling" and bound.text == "throttling: GPU 4, heat 30% of the time"
    assert bound.evidence == {"gpu": 4, "cause": "thermal", "share": pytest.approx(0.3)}
    assert whats(stream(12, lambda second: [card(0, **throttled(0.29, 0.04))]), None) == []


def test_imbalance_bounds_while_a_card_works() -> None:
    (bound,) = bounds(busy(87, 86, 44), None)
    assert bound.text == "imbalance: GPU 2 is busy 44%, GPU 0 87%"
    assert bound.evidence["balance"] == pytest.approx(44 / 87)
    assert whats(busy(90, 80), None) == [] and whats(busy(40, 10), None) == []


def test_memory_bounds_where_its_figure_is_the_controllers() -> None:
    assert whats(busy(95, 95, memory_busy=85), None) == ["memory"]
    assert whats(busy(95, 95, memory_busy=79), None) == []
    assert whats(busy(95, 95, memory_busy=85, source="nvml"), None) == []


def test_all_that_bounds_is_told_in_order() -> None:
    samples = busy(87, 44, memory_busy=90, **throttled(thermal=0.5))
    assert whats(samples, 0.2) == ["data wait", "throttling", "imbalance", "memory"]


# the supervisor's part


def test_samples_get_the_balance_and_events_their_step() -> None:
    written: list[tuple[str, int | None, dict[str, Any]]] = []
    watch = HardwareWatch(lambda kind, text, step=None, **fields: written.append((kind, step, fields)))
    samples = stream(
        40, lambda second: [card(0, busy=80, **throttled(thermal=0.5)), card(1, busy=40, **throttled(0.0))]
    )
    for step, sample in zip(itertools.count(500), samples):
        watch.take(sample, step)
    assert samples[0]["balance"] is None and samples[-1]["balance"] == pytest.approx(0.5)
    assert [one["what"] for one in samples[-1]["episodes"]] == ["throttling_thermal"]
    ((kind, at, fields),) = written
    assert kind == "hardware" and at is not None and 500 < at < 520 and fields["what"] == "throttling_thermal"


def test_what_fails_in_the_watch_is_said_once() -> None:
    written: list[tuple[str, str]] = []
    watch = HardwareWatch(lambda kind, text, step=None, **fields: written.append((kind, text)))

    class Odd(dict[str, Any]):
        def get(self, *names: Any) -> Any:
            raise RuntimeError("odd")

    for _ in range(3):
        watch.take(Odd(), None)
    assert written == [("fault", "hardware alerts are off: RuntimeError: odd")]
