"""Stability figures: worked out by hand on small arrays, and against a plain loop over attempts on random ones."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8console.runs import stability as module
from fp8console.runs.stability import UNITS, Stability, StabilityFigures, stability

NAN, INF = math.nan, math.inf


def bits(text: str) -> list[bool]:
    """ "..x." as booleans."""
    return [letter == "x" for letter in text]


def test_nothing_is_known_of_no_attempt() -> None:
    assert stability([]) == StabilityFigures()
    figures = asdict(StabilityFigures())
    assert {name for name, value in figures.items() if value == 0} == {"steps", "recovered", "judged"}


def test_every_figure_has_a_unit() -> None:
    assert list(UNITS) == list(asdict(StabilityFigures()))


def test_consecutive_bad_steps_are_one_failure() -> None:
    found = stability([1.0] * 10, skipped=bits("..xx...x.."))
    assert found.failures == 2
    assert found.mean_steps_between_failures == 7 / 2, "seven sound attempts, two failures"
    assert found.mean_steps_at_least is None
    assert found.longest_stable_stretch == 3
    assert found.skips_per_1000_steps == 300


def test_skipped_and_not_finite_in_a_row_are_one_failure() -> None:
    found = stability([1.0, NAN, 1.0, 1.0, -INF, 1.0], skipped=bits("..x..."), grad_norms=[1, 1, NAN, INF, 1, 1])
    assert (found.failures, found.longest_stable_stretch, found.steps) == (1, 1, 6)
    assert found.mean_steps_between_failures == 2.0
    assert found.skips_per_1000_steps == pytest.approx(1000 / 6)


def test_without_a_failure_only_a_lower_bound_is_known() -> None:
    found = stability([1.0] * 8, skipped=[False] * 8)
    assert found.mean_steps_between_failures is None
    assert (found.mean_steps_at_least, found.failures, found.longest_stable_stretch) == (8, 0, 8)
    assert found.recovery_rate is None and found.skips_per_1000_steps == 0


def test_all_bad() -> None:
    found = stability([NAN] * 5)
    assert (found.failures, found.longest_stable_stretch, found.mean_steps_between_failures) == (1, 0, 0.0)
    assert found.loss_jitter is None and found.recovery_rate is None


def test_attempts_of_which_nothing_is_known_are_left_out_and_interrupt_nothing() -> None:
    found = stability([1.0, None, NAN, None, NAN, 1.0, None, 1.0])
    assert (found.steps, found.failures, found.longest_stable_stretch) == (5, 1, 2)
    assert found.mean_steps_between_failures == 3.0
    nothing = stability([None, None])
    assert nothing == StabilityFigures(), "not one attempt tells anything: all is unknown, nothing is 0"


def test_an_unknown_loss_is_no_failure_where_a_scaler_is_in_use() -> None:
    found = stability([None] * 4, skipped=bits("..x."))
    assert (found.steps, found.failures, found.longest_stable_stretch) == (4, 1, 2)
    assert found.loss_jitter is None
    assert found.recovery_rate is None and found.judged == 0, "no loss to judge by"


def test_jitter_is_the_median_change_over_the_median_loss() -> None:
    # Changes 1, 2, 3 and 1; median 1.5. Losses 4, 5, 3, 6, 5: median 5.
    assert stability([4, 5, 3, 6, 5]).loss_jitter == 1.5 / 5
    # The same downhill: a trend of 0.1 a step hardly counts.
    assert stability([2.0 - 0.1 * i for i in range(9)]).loss_jitter == pytest.approx(0.1 / 1.6)
    # Between 5 and 3 lies a NaN, before 6 an unknown loss: the changes are 1 and 1, of 4, 5, 3, 6, 5, median 5.
    assert stability([4, 5, NAN, 3, None, 6, 5]).loss_jitter == 1 / 5
    assert stability([4, 5, INF, 3, None, 6, 5]).loss_jitter == 1 / 5


def test_jitter_of_negative_zero_and_single_losses() -> None:
    assert stability([-4.0, -5.0]).loss_jitter == 1 / 4.5
    assert stability([0.0, 0.0, 0.0]).loss_jitter is None
    assert stability([3.0]).loss_jitter is None
    assert stability([3.0, NAN]).loss_jitter is None
    assert stability([1.7e308, -1.7e308]).loss_jitter is None


def test_jitter_is_told_over_the_newest_attempts() -> None:
    losses = [100.0, 0.0] * 50 + [4, 5, 3, 6, 5]
    assert stability(losses, jitter_steps=5).loss_jitter == 1.5 / 5
    assert stability(losses, jitter_steps=None).loss_jitter == pytest.approx(100 / 5)


def test_jitter_of_normal_noise_is_what_the_docstring_says() -> None:
    random = np.random.default_rng(3)
    losses = 10 + random.normal(0, 0.5, 200_000)
    # The difference of two has sqrt(2) times the deviation; half of a normal's values lie within 0.6745 of it.
    wanted = 0.5 * math.sqrt(2) * statistics.NormalDist().inv_cdf(0.75) / 10
    assert stability(losses, jitter_steps=None).loss_jitter == pytest.approx(wanted, rel=0.01)
    assert wanted == pytest.approx(0.954 * 0.05, rel=1e-3)


def test_a_loss_that_comes_back_has_recovered() -> None:
    # Band up to 3. After the skip 9, 9, then 2: of five in a row the third smallest is 2 from the fifth on.
    found = stability([2, 3, 2, 8, 9, 9, 2, 2, 2], skipped=bits("...x....."))
    assert (found.recovered, found.judged, found.recovery_rate) == (1, 1, 1.0)
    # With one less 2 it is not told yet.
    found = stability([2, 3, 2, 8, 9, 9, 2, 2], skipped=bits("...x...."))
    assert (found.judged, found.recovery_rate) == (0, None)


def test_a_loss_that_stays_up_has_not_recovered_after_100_attempts() -> None:
    losses = [2.0, 3.0, 2.0, NAN] + [3.1] * 98
    assert stability(losses).judged == 0
    found = stability([*losses, 3.1])
    assert (found.recovered, found.judged, found.recovery_rate) == (0, 1, 0.0)
    assert stability([*losses, *[2.0] * 100]).recovery_rate == 0.0, "too late"


def test_a_run_that_is_nan_to_its_end_has_not_recovered() -> None:
    found = stability([2.0] * 20 + [NAN] * 500)
    assert (found.failures, found.recovered, found.judged) == (1, 0, 1)


def test_only_the_newest_20_sound_losses_make_the_band() -> None:
    assert stability([9.0] + [2.0] * 19 + [NAN] + [8.0] * 5).recovery_rate == 1.0
    assert stability([9.0] + [2.0] * 20 + [NAN] + [8.0] * 99).recovery_rate == 0.0


def test_a_failure_before_any_loss_is_not_judged() -> None:
    found = stability([5.0] * 200, skipped=bits("xx" + "." * 198))
    assert (found.failures, found.judged, found.recovery_rate) == (1, 0, None)


def test_a_rollback_before_the_loss_is_back_is_no_recovery() -> None:
    losses = [2, 3, 2, NAN, 9, 9, 2, 2, 2, 2, 2]
    assert stability(losses).recovery_rate == 1.0
    found = stability(losses, restored=bits("......x...."))
    assert (found.recovered, found.judged, found.recovery_rate) == (0, 1, 0.0)


def test_nothing_is_compared_across_a_rollback() -> None:
    # 9 and 9.5 stand on the abandoned stretch: they make no band for the NaN after it, and no change of 7.5.
    found = stability([2.0, 9.0, 9.5, 2.0, NAN] + [9.0] * 99, restored=bits("...x." + "." * 99))
    assert (found.judged, found.recovery_rate) == (1, 0.0)
    assert stability([9.0, 9.5, 2.0, 2.5, 2.0], restored=bits("..x..")).loss_jitter == 0.5 / 2.5
    found = stability([1.0] * 9, restored=bits("...x....."))
    assert (found.longest_stable_stretch, found.failures, found.mean_steps_at_least) == (6, 0, 9)


def test_abandoned_attempts_count_and_a_failure_on_each_side_is_two() -> None:
    found = stability([1, NAN, NAN, NAN, 1], restored=bits("...x."))
    assert (found.failures, found.steps, found.mean_steps_between_failures) == (2, 5, 1.0)


def test_clip_frequency_is_of_the_steps_of_which_it_is_known() -> None:
    clipped: list[bool | None] = [True, None, False, False, True, None]
    found = stability([1.0] * 6, clipped=clipped)
    assert found.clip_frequency == 0.5
    assert stability([1.0] * 6).clip_frequency is None
    found = stability([1.0] * 1000, clipped=[True] * 900 + [False] * 90 + [True] * 10)
    assert (found.clip_frequency, found.clip_frequency_recent) == (0.91, 0.1)


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="skipped must have one value for each of the 3 losses"):
        stability([1.0, 2.0, 3.0], skipped=[False])
    with pytest.raises(ValueError, match="shape"):
        stability(np.zeros((2, 2)))


# -- against a plain loop ---------------------------------------------------------------------------------------------
ATTEMPT = st.tuples(
    st.sampled_from([None, NAN, INF, -INF, 1.0, 1.5, 2.0, 3.0]),  # loss
    st.sampled_from([None, NAN, 1.0]),  # norm
    st.sampled_from([False, False, False, True]),  # skipped
    st.sampled_from([None, False, True]),  # clipped
    st.sampled_from([False] * 7 + [True]),  # restored
    st.booleans(),  # scaler in use
)


def by_hand(attempts: list[Any], horizon: int, median_of: int, band_of: int, jitter_of: int) -> dict[str, Any]:
    """The definitions, one attempt after the other."""
    known, bad = [], []
    for loss, norm, skipped, _, _, scaler in attempts:
        wrong = skipped or any(value is not None and not math.isfinite(value) for value in (loss, norm))
        bad.append(wrong)
        known.append(wrong or scaler or loss is not None or norm is not None)
    failures, stretch, longest, inside = [], 0, 0, False
    for i, attempt in enumerate(attempts):
        if attempt[4]:
            stretch, inside = 0, False
        if not known[i]:
            continue
        if bad[i] and not inside:
            failures.append(i)
        stretch = 0 if bad[i] else stretch + 1
        longest, inside = max(longest, stretch), bad[i]
    recovered = judged = 0
    for begin in failures:
        band: list[float] = []
        for i in range(begin, -1, -1):
            if i < begin and not bad[i] and attempts[i][0] is not None and len(band) < band_of:
                band.append(attempts[i][0])
            if attempts[i][4]:
                break
        later: list[float] = []
        outcome: bool | None = None
        for i in range(begin + 1, begin + horizon + 1):
            if i == begin + horizon or (i < len(attempts) and attempts[i][4]):
                outcome = False if i <= len(attempts) else None
                break
            if i >= len(attempts):
                break
            if not bad[i] and attempts[i][0] is not None:
                later.append(attempts[i][0])
                if band and len(later) >= median_of and statistics.median(later[-median_of:]) <= max(band):
                    outcome = True
                    break
        if band and outcome is not None:
            judged += 1
            recovered += outcome
    newest = attempts[-jitter_of:]
    finite = [a[0] for a in newest if a[0] is not None and math.isfinite(a[0])]
    changes = [
        abs(b[0] - a[0])
        for a, b in zip(newest, newest[1:])
        if all(v[0] is not None and math.isfinite(v[0]) for v in (a, b)) and not b[4]
    ]
    clips = [a[3] for a in attempts if a[3] is not None]
    sound = sum(known) - sum(bad)
    told = any(known)
    return {
        "steps": sum(known),
        "failures": len(failures) if told else None,
        "mean_steps_between_failures": sound / len(failures) if failures else None,
        "mean_steps_at_least": sound if told and not failures else None,
        "loss_jitter": statistics.median(changes) / statistics.median(finite) if changes else None,
        "recovery_rate": recovered / judged if judged else None,
        "recovered": recovered,
        "judged": judged,
        "longest_stable_stretch": longest if told else None,
        "skips_per_1000_steps": 1000 * sum(a[2] for a in attempts) / sum(known) if told else None,
        "clip_frequency": sum(clips) / len(clips) if clips else None,
    }


@settings(max_examples=300, deadline=None)
@given(st.lists(ATTEMPT, max_size=60), st.lists(st.integers(1, 20), max_size=20))
def test_piece_by_piece_is_what_the_definitions_say(attempts: list[Any], pieces: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("RECOVERY_STEPS", 9), ("RECOVERY_MEDIAN", 3), ("BAND_STEPS", 4)):
            patch.setattr(module, name, value)
        made = Stability(jitter_steps=11)
        rest = attempts
        for size in [*pieces, len(attempts) + 1]:
            piece, rest = rest[:size], rest[size:]
            if piece:
                add(made, piece)
        found = asdict(made.figures())
        found.pop("clip_frequency_recent")
        assert found == by_hand(attempts, horizon=9, median_of=3, band_of=4, jitter_of=11)


def add(made: Stability, attempts: list[Any]) -> None:
    columns = list(zip(*attempts))
    loss = np.array([NAN if v is None else v for v in columns[0]])
    norm = np.array([NAN if v is None else v for v in columns[1]])
    loss_known, norm_known = (np.array([v is not None for v in columns[i]]) for i in (0, 1))
    skipped, restored, scaler = (np.array(columns[i], bool) for i in (2, 4, 5))
    bad = skipped | (loss_known & ~np.isfinite(loss)) | (norm_known & ~np.isfinite(norm))
    made.add(
        loss,
        skipped,
        known=bad | scaler | loss_known | norm_known,
        loss_known=loss_known,
        bad=bad,
        clipped=np.array([bool(v) for v in columns[3]]),
        clip_known=np.array([v is not None for v in columns[3]]),
        restored=restored,
    )


def test_memory_stays_small_whatever_the_length() -> None:
    made = Stability()
    random = np.random.default_rng(1)
    for _ in range(30):
        skipped = random.random(5000) < 0.01
        yes = np.ones(5000, bool)
        add_all = {"known": yes, "loss_known": yes, "bad": skipped, "clipped": ~yes, "clip_known": yes}
        made.add(random.normal(2, 0.1, 5000), skipped, restored=random.random(5000) < 0.001, **add_all)
    kept = [len(value) for value in vars(made._recovery).values() if isinstance(value, np.ndarray)]
    assert max(kept) < 500 and len(made._tail_loss) == 1000 and made._recent_clips.shape == (2, 100)
    assert made.figures().steps == 150_000
