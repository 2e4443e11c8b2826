"""The loss scale's rule against plain Python, torch's own update, Megatron's and apex's hysteresis, and hand values."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scaling_reference import Unclear, apex, begin, expected, megatron, numbers, rows, seen_of

from fp8console.numerics import scaling_rules as rules
from fp8console.numerics.scaling_rules import PRESETS, ScalerSettings, Seen, advance

INF, NAN = math.inf, math.nan


def draw_seen(draw: random.Random) -> Seen:
    """What a step may show, NaN and inf and nothing among it."""
    share = [0.0, 0.0, 0.0, 1e-5, 0.01, 0.5, 1.0, NAN]
    odd = [0.0, 1.0, NAN, INF, 2.0**-149, 3.4e38]
    amax = draw.choice(odd) if draw.random() < 0.3 else 2.0 ** draw.uniform(-30, 3)
    return seen_of(draw.choice([0.0, 0.0, 0.0, 1.0, 2.0, INF]), amax, draw.choice(share), draw.choice(share))


def draw_batch(draw: random.Random, width: int) -> Seen:
    return Seen(*map(torch.stack, zip(*(draw_seen(draw) for _ in range(width)))))


RANDOM = st.integers(0, 2**32).map(random.Random)
SETTINGS = st.builds(
    ScalerSettings,
    init_scale=st.integers(-30, 30).map(lambda e: 2.0**e),
    growth_factor=st.sampled_from([2.0, 2.0, 1.3, 4.0, 8.0]),
    backoff_factor=st.sampled_from([0.5, 0.5, 0.8, 0.25]),
    growth_interval=st.sampled_from([1, 2, 3, 7]),
    hysteresis=st.integers(1, 3),
    refill=st.sampled_from(rules.REFILLS),
    floor=st.sampled_from([2.0**-126, 2.0**-24, 2.0**-8]),
    cap=st.sampled_from([None, None, 2.0**15, 2.0**60]),
    smoothing=st.sampled_from([0.0, 0.0, 0.3]),
    margin=st.sampled_from([None, 0.0, 1.0, 3.0, 3.5]),
    underflow_tolerance=st.sampled_from([1e-3, 0.0]),
    saturation_tolerance=st.sampled_from([None, 1e-3, 0.0]),
    patience=st.integers(1, 4),
)


def test_it_does_what_the_text_says() -> None:
    compared = left_out = 0

    @settings(max_examples=60, deadline=None)
    @given(SETTINGS, RANDOM)
    def each_step(s: ScalerSettings, draw: random.Random) -> None:
        nonlocal compared, left_out
        state = rules.initial(s, torch.zeros(32))
        for _ in range(12):
            seen = draw_batch(draw, 32)
            after = advance(state, seen, s)
            for before, showed, found in zip(rows(state), rows(seen), rows(after)):
                try:
                    wanted = expected(before, showed, s)
                except Unclear:
                    left_out += 1
                    continue
                compared += 1
                assert all(close(name, found[name], wanted[name]) for name in found), (before, showed, found, wanted)
            state = after

    each_step()
    assert compared > 2000 and left_out < compared / 10


def close(name: str, found: float, wanted: float) -> bool:
    """Equal up to float32's rounding: a logarithm absolutely, a scale relatively, a count exactly."""
    tolerance = {"typical": 1e-6 * (10 + abs(wanted)), "scale": 1e-5 * wanted, "ceiling": 1e-5 * wanted}.get(name, 0.0)
    return found == wanted or abs(found - wanted) <= tolerance


# -- what must hold whatever comes ---------------------------------------------------------------------------------
@settings(max_examples=40, deadline=None)
@given(SETTINGS, RANDOM)
def test_state_stays_sound_and_its_types_too(s: ScalerSettings, draw: random.Random) -> None:
    state = rules.initial(s, torch.zeros(32))
    state = state._replace(scale=torch.tensor([2.0 ** draw.uniform(-126, 126) for _ in range(32)]))
    high = rules.SCALE_MAX if s.cap is None else s.cap
    for _ in range(12):
        state = advance(state, draw_batch(draw, 32), s)
        for name, tensor in state._asdict().items():
            floating = name in ("scale", "typical", "ceiling")
            assert tensor.dtype is (torch.float32 if floating else torch.int32) and tensor.shape == (32,), name
        assert ((s.floor <= state.scale) & (state.scale <= high)).all()
        assert state.typical.isfinite().all() and (state.ceiling > 0).all()
        assert ((state.measured >= 0) & (state.measured <= rules.WINDOW)).all()
        assert (state.outliers.abs() < rules.SHIFT_STEPS).all()
        assert ((state.hysteresis_tracker >= 0) & (state.hysteresis_tracker <= s.hysteresis)).all()
        assert ((state.growth_tracker >= 0) & (state.growth_tracker < s.growth_interval)).all()


@settings(max_examples=15, deadline=None)
@given(SETTINGS, RANDOM)
def test_a_batch_is_its_elements(s: ScalerSettings, draw: random.Random) -> None:
    singles = [begin(s) for _ in range(3)]
    batch = rules.initial(s, torch.zeros(3))
    for _ in range(10):
        row = [draw_seen(draw) for _ in range(3)]
        singles = [advance(state, seen, s) for state, seen in zip(singles, row)]
        batch = advance(batch, Seen(*map(torch.stack, zip(*row))), s)
        assert list(rows(batch)) == [numbers(state) for state in singles]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", list(PRESETS))
def test_the_default_dtype_of_a_script_changes_nothing(name: str, dtype: torch.dtype) -> None:
    s = rules.preset(name, growth_interval=3, growth_factor=1.3, backoff_factor=0.8)
    draw = random.Random(1)
    steps = [seen_of(draw.random() < 0.2, 2.0 ** draw.uniform(-20, 1), 0.0, draw.choice([0.0, 0.1])) for _ in range(40)]
    wanted, found = begin(s), begin(s)
    for seen in steps:
        wanted = advance(wanted, seen, s)
    torch.set_default_dtype(dtype)
    try:
        for seen in steps:
            found = advance(found, seen, s)
    finally:
        torch.set_default_dtype(torch.float32)
    assert numbers(found) == numbers(wanted)


@settings(max_examples=20, deadline=None)
@given(RANDOM)
def test_powers_of_two_stay_powers_of_two(draw: random.Random) -> None:
    s = rules.preset("headroom")
    state = rules.initial(s, torch.zeros(32))
    state = state._replace(scale=torch.tensor([2.0 ** draw.randint(-20, 20) for _ in range(32)]))
    for _ in range(30):
        state = advance(state, draw_batch(draw, 32), s)
        assert (state.scale.frexp().mantissa == 0.5).all()


def test_power_of_two_is_exact() -> None:
    exponents = [-INF, *range(-130, 131), INF]
    wanted = [2.0 ** min(max(exponent, -126), 127) for exponent in exponents]
    assert rules.power_of_two(torch.tensor(exponents)).tolist() == wanted


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.lists(st.sampled_from([0.0, NAN, INF, 2.0**-3, 3e38]), min_size=1, max_size=6))
def test_bad_steps_below_patience_move_nothing_measured(patience: int, amax: list[float]) -> None:
    s = rules.preset("headroom", patience=patience)
    state = advance(begin(s, 64.0), seen_of(amax=2.0**-3), s)
    for number, value in enumerate(amax, 1):
        after = advance(state, seen_of(found_inf=1.0, amax=value), s)
        assert torch.equal(after.typical, state.typical) and torch.equal(after.measured, state.measured)
        assert after.scale.item() == 64.0 * 0.5 ** max(0, number - patience + 1)
        state = after


# -- torch's rule --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(4))
def test_pytorch_is_torchs_own_update(seed: int) -> None:
    draw = random.Random(seed)
    interval, rate = draw.choice([1, 2, 5, 20]), draw.choice([0.02, 0.2, 0.4])
    s = rules.preset("pytorch", growth_interval=interval)
    state = begin(s)
    scale, tracker = torch.tensor(65536.0), torch.tensor(0, dtype=torch.int32)
    for _ in range(1000):
        found_inf = float(draw.random() < rate)
        if not 2.0**-120 < scale.item() < 2.0**120:  # torch goes on to 0 and to float32's end
            scale.fill_(1.0)
            state = state._replace(scale=torch.tensor(1.0))
        torch._amp_update_scale_(scale, tracker, torch.tensor(found_inf), 2.0, 0.5, interval)
        state = advance(state, seen_of(found_inf, draw.choice([0.0, 1.0, NAN]), draw.choice([0.0, 0.5])), s)
        assert state.scale.item() == scale.item() and state.growth_tracker.item() == tracker.item()


def test_the_floor_is_where_torch_goes_on_to_zero() -> None:
    s = rules.preset("pytorch")
    state = begin(s)
    for _ in range(400):
        state = advance(state, seen_of(1.0), s)
    assert state.scale.item() == 2.0**-126 and math.isfinite(1 / state.scale.item())


def test_a_growth_over_the_cap_stays_at_it() -> None:
    s = rules.preset("pytorch", growth_interval=1, cap=3e5)
    state = advance(advance(advance(begin(s), seen_of(), s), seen_of(), s), seen_of(), s)
    assert state.scale.item() == 3e5


# -- hysteresis ----------------------------------------------------------------------------------------------------
@settings(max_examples=40, deadline=None)
@given(
    st.text("x..", min_size=1, max_size=40),
    st.integers(1, 4),
    st.integers(1, 5),
    st.sampled_from(["pytorch", "headroom"]),
)
def test_hysteresis_is_megatrons_or_apexs(found: str, hysteresis: int, interval: int, name: str) -> None:
    for refill, reference in (("on_growth", megatron), ("every_clean_step", apex)):
        s = rules.preset(name, growth_interval=interval, hysteresis=hysteresis, refill=refill, floor=2.0**-100)
        state, scales = begin(s, 1024.0), []
        for step in found:
            state = advance(state, seen_of(float(step == "x")), s)  # nothing measured
            scales.append(state.scale.item())
        assert scales == reference(found, hysteresis, interval)


@pytest.mark.parametrize(
    "refill, found, halvings",
    [
        ("on_growth", "x", 0),
        ("on_growth", "xx", 1),
        ("on_growth", "x..x", 1),
        ("on_growth", "x...x..x", 1),  # the growth after three clean steps fills it again
        ("on_growth", "xxxx", 3),
        ("every_clean_step", "xx", 1),
        ("every_clean_step", "x.x.x.x", 0),
        ("every_clean_step", "xx.xx", 2),
        ("every_clean_step", "xxx", 2),
    ],
)
def test_hysteresis_by_hand(refill: str, found: str, halvings: int) -> None:
    s = rules.preset("pytorch", growth_interval=3, hysteresis=2, refill=refill, cap=65536.0)
    state = begin(s)
    backoffs = 0
    for step in found:
        after = advance(state, seen_of(float(step == "x")), s)
        backoffs += after.scale.item() < state.scale.item()
        state = after
    assert backoffs == halvings


# -- the article's settings, by hand -------------------------------------------------------------------------------
def test_article_grows_smoothed_after_75_clean_steps_up_to_2_to_the_15() -> None:
    s = rules.preset("article")
    state = begin(s)
    for _ in range(74):
        state = advance(state, seen_of(), s)
    assert state.scale.item() == 128.0
    state = advance(state, seen_of(), s)
    assert state.scale.item() == pytest.approx(153.80495, rel=1e-6)  # 128 * 1.3 ** 0.7
    for _ in range(75 * 40):
        state = advance(state, seen_of(), s)
    assert state.scale.item() == 32768.0


def test_article_tolerates_one_overflow_and_backs_off_unsmoothed() -> None:
    s = rules.preset("article")
    state = advance(begin(s), seen_of(1.0), s)
    assert state.scale.item() == 128.0 and state.growth_tracker.item() == 0
    state = advance(state, seen_of(1.0), s)
    assert state.scale.item() == pytest.approx(102.4, rel=1e-6)  # 128 * 0.8


# -- saturation, where inf never comes -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    "tolerance, share, backs_off", [(1e-3, 0.002, True), (1e-3, 0.0005, False), (None, 1.0, False)]
)
def test_saturation_beyond_tolerance_is_an_overflow(tolerance: float | None, share: float, backs_off: bool) -> None:
    for margin in (None, 0.0):
        s = rules.preset("headroom", margin=margin, saturation_tolerance=tolerance)
        state = begin(s, 64.0)._replace(measured=torch.tensor(16, dtype=torch.int32), typical=torch.tensor(-6.0))
        after = advance(state, seen_of(0.0, 1.0, share), s)
        assert after.scale.item() == (32.0 if backs_off else 64.0), margin


# -- headroom ------------------------------------------------------------------------------------------------------
@settings(max_examples=25, deadline=None)
@given(
    st.floats(-40, 5),
    st.sampled_from([0.0, 1.0, 2.5, 3.0, 8.0]),
    st.sampled_from([(2.0, 0.5), (1.3, 0.8), (4.0, 0.25)]),
    st.integers(-24, 24),
)
def test_it_settles_at_its_margin_without_overflowing_on_the_way_up(
    typical: float, margin: float, factors: tuple[float, float], exponent: int
) -> None:
    s = rules.preset("headroom", margin=margin, growth_factor=factors[0], backoff_factor=factors[1], floor=2.0**-100)
    state = begin(s, 2.0**exponent)
    beyond = []
    for _ in range(30):
        amax = 2.0**typical * state.scale.item()
        beyond.append(amax > 1 + 1e-6)
        state = advance(state, seen_of(float(beyond[-1]), amax, 0.5 * beyond[-1], 0.1), s)
    room = -typical - math.log2(state.scale.item()) - margin
    width = max(1.0, math.log2(factors[0]), -math.log2(factors[1]))
    assert -rules.SLACK - 1e-3 <= room <= rules.GROWTH_ROOM + width
    started_below = exponent + typical < 0
    assert not (started_below and any(beyond))


def test_it_stays_where_it_is_while_nothing_underflows() -> None:
    s = rules.preset("headroom", growth_interval=2)
    state = begin(s, 1.0)
    for _ in range(50):
        state = advance(state, seen_of(amax=2.0**-20, underflowed=1e-4), s)
    assert state.scale.item() == 1.0


# The third outlier in a row is the new typical amax: 2^3 at the scale in use, which has to come to 2^-3.
@pytest.mark.parametrize("room, moves", [(0.0, (32.0, 32.0, 2.0**-1)), (6.0, (64.0, 64.0, 1.0))])
def test_an_overflow_backs_off_at_once_unless_the_scale_is_low_already(room: float, moves: tuple[float, ...]) -> None:
    s = rules.preset("headroom")
    state = begin(s, 64.0)._replace(
        measured=torch.tensor(16, dtype=torch.int32), typical=torch.tensor(-3.0 - 6.0 - room)
    )
    for scale in moves:
        state = advance(state, seen_of(1.0, 2.0**3, 0.01), s)
        assert state.scale.item() == scale
    assert state.overflows.item() == 3 and state.bad_steps.item() == 0


def test_a_ceiling_learnt_from_bad_steps_is_tried_again_after_growth_interval_clean_ones() -> None:
    s = rules.preset("headroom", patience=2, growth_interval=5)
    clean = seen_of(amax=2.0**-20, underflowed=0.5)
    state = begin(s, 64.0)._replace(measured=torch.tensor(16, dtype=torch.int32), typical=torch.tensor(-26.0))
    for _ in range(2):
        state = advance(state, seen_of(found_inf=1.0), s)
    assert state.scale.item() == 32.0 and state.bad_steps.item() == 2
    scales = []
    for _ in range(10):
        state = advance(state, clean, s)
        scales.append(state.scale.item())
    assert scales == [32.0] * 4 + [64.0] * 5 + [128.0]
