"""From a baseline's records to settings: the formula by hand, what is left out, the ranking's stated rule."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from baseline_runs import CREST, ELEMENTS, layer, write_run
from hypothesis import given
from hypothesis import strategies as st

from fp8console.runs.baseline import read_baseline
from fp8console.runs.tuning import NoTuning, initial_scale, stacks, tune


@pytest.mark.parametrize(
    ("amax", "fmt_max", "margin", "wanted"),
    [
        (1.0, 57344.0, 0, 2.0**15),  # 2^15 <= 57344 < 2^16
        (1.0, 57344.0, 2, 2.0**13),
        (57344.0, 57344.0, 0, 1.0),
        (57344.0 * (1 + 2**-52), 57344.0, 0, 0.5),  # just too large for 1
        (448.0 / 2**20, 448.0, 1, 2.0**19),  # an exact power of two
        (2e-3, 57344.0, 1, 2.0**23),  # 57344 / 0.002 = 28,672,000 = 2^24.77
        (3e-7, 448.0, 3, 2.0**27),  # 448 / 3e-7 = 1.493e9 = 2^30.48
        (1e6, 57344.0, 1, 2.0**-6),  # 0.0573 = 2^-4.1: down to 2^-5, and a bit of margin
    ],
)
def test_initial_scale_by_hand(amax: float, fmt_max: float, margin: int, wanted: float) -> None:
    assert initial_scale(amax, fmt_max, margin) == wanted


def test_initial_scale_stays_where_amax_says_nothing_and_within_its_limits() -> None:
    for amax in (0.0, math.nan, math.inf, -1.0):
        assert initial_scale(amax, 448.0, 1, present=512.0) == 512.0
    assert initial_scale(5e-324, 57344.0, 0) == 2.0**126
    assert initial_scale(1e308, 57344.0, 0) == 2.0**-24
    assert initial_scale(1.0, 57344.0, 0, floor=1.0, cap=1024.0) == 1024.0
    assert initial_scale(1e9, 57344.0, 0, floor=1.0, cap=1024.0) == 1.0


@given(
    st.floats(1e-30, 1e30),
    st.sampled_from([448.0, 240.0, 57344.0, 65504.0]),
    st.integers(0, 6),
)
def test_the_scaled_amax_keeps_its_margin_and_no_bit_more(amax: float, fmt_max: float, margin: int) -> None:
    scale = initial_scale(amax, fmt_max, margin, floor=2.0**-126, cap=2.0**126)
    assert math.frexp(scale)[0] == 0.5
    # In whole powers of two both products are exact.
    assert amax * scale * 2.0**margin <= fmt_max
    assert amax * scale * 2.0 ** (margin + 1) > fmt_max


def gradients(size: object, **more: object) -> dict[str, object]:
    return {"weight": 0.02, "activation": 1.0, "gradient": size, "activation_gradient": size, **more}


def test_the_loss_scale_is_taken_out(tmp_path: Path) -> None:
    layers = [layer("a", **gradients(1e-4)), layer("b", **gradients(3e-4))]
    for scale in (1.0, 65536.0):
        baseline = read_baseline(write_run(tmp_path / str(scale), layers, scale=scale))
        tuning = tune(baseline, margin=1)
        assert tuning.amax == pytest.approx(3e-4 * CREST, rel=1e-6)
        # 57344 / 0.0012 = 2^25.5
        assert tuning.scaler["init_scale"] == 2.0**24 and tuning.format.name == "e5m2"
        figures = baseline.of("gradient")
        assert figures is not None
        assert figures.l2[:, 1] == pytest.approx(3e-4 * math.sqrt(ELEMENTS))
        assert figures.rms[:, 1] == pytest.approx(3e-4)


def test_skipped_and_non_finite_steps_are_left_out_and_counted(tmp_path: Path) -> None:
    def spiked(step: int) -> float:
        return 1e3 if step in (3, 7) else 1e-3

    run = write_run(
        tmp_path,
        [layer("a", **gradients(spiked))],
        steps=12,
        flags={3: "skipped", 7: "grad_nonfinite", 9: "loss_nonfinite"},
    )
    baseline = read_baseline(run)
    assert baseline.steps.tolist() == [1, 2, 4, 5, 6, 8, 10, 11, 12]
    assert baseline.left_out == {"skipped": 1, "non-finite gradients": 1, "non-finite loss": 1}
    assert tune(baseline).amax == pytest.approx(1e-3 * CREST, rel=1e-6)
    assert read_baseline(run, last_step=6).steps.tolist() == [1, 2, 4, 5, 6]


def test_too_few_usable_steps_is_one_line(tmp_path: Path) -> None:
    layers = [layer("a", **gradients(1e-3))]
    run = write_run(tmp_path, layers, steps=8, flags=dict.fromkeys(range(1, 5), "skipped"))
    with pytest.raises(NoTuning, match="4 usable steps, at least 5 are needed; left out: 4 skipped"):
        tune(read_baseline(run))
    with pytest.raises(NoTuning, match="the training ended too soon"):
        tune(read_baseline(write_run(tmp_path / "short", layers, steps=2)))
    with pytest.raises(NoTuning, match="no gradient was seen that is not 0"):
        tune(read_baseline(write_run(tmp_path / "zero", [layer("a", **gradients(0.0))], steps=8)))
    with pytest.raises(NoTuning, match="0 usable steps"):
        tune(read_baseline(tmp_path / "nothing"))


def test_margin_follows_how_far_the_largest_magnitude_moves(tmp_path: Path) -> None:
    for name, factor, margin in (("still", 1.0, 2), ("moves", 2.5, 3), ("leaps", 40.0, 3)):
        size = lambda step, factor=factor: 1e-3 * (factor if step == 5 else 1.0)  # noqa: E731
        tuning = tune(read_baseline(write_run(tmp_path / name, [layer("a", **gradients(size))])))
        assert tuning.margin == margin
        assert tuning.amax == pytest.approx(1e-3 * CREST * factor, rel=1e-6)
        # The headroom preset keeps its bits over the typical magnitude: the margin and the move.
        assert tuning.scaler["margin"] == margin + round(math.log2(factor))


def test_a_saturating_format_gets_a_tight_cap(tmp_path: Path) -> None:
    run = write_run(tmp_path, [layer("a", **gradients(1e-3))])
    tight = tune(read_baseline(run, gradient_format="e4m3fn"), margin=2).scaler
    # 448 / 0.004 = 2^16.8: 2^16 fits, 2^14 keeps two bits, the cap one.
    assert (tight["init_scale"], tight["cap"]) == (2.0**14, 2.0**15)
    wide = tune(read_baseline(run), margin=2).scaler
    assert wide["cap"] == wide["init_scale"] * 2**10 and wide["floor"] == wide["init_scale"] / 2**10


def test_clip_thresholds_of_the_whole_and_of_its_groups(tmp_path: Path) -> None:
    names = ["embed", "blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head"]
    layers = [layer(name, **gradients(0.01)) for name in names]
    layers[-1].update(name="Net", type="Net", weights=["head"])  # a parameter of the model itself
    each = 0.01 * math.sqrt(ELEMENTS)
    whole = tune(read_baseline(write_run(tmp_path / "a", layers, steps=21, grad_norm=lambda step: step / 100)))
    assert whole.clip_norm == pytest.approx(0.3)  # the 95% quantile of 0.01 to 0.21 is 0.2
    assert tune(read_baseline(write_run(tmp_path / "b", layers))).clip_norm is None
    # The global norm is 1.25 times that of the six matrices: gradients of biases, which go with them.
    run = write_run(tmp_path / "c", layers, grad_norm=lambda step: 1.25 * each * math.sqrt(6))
    tuning = tune(read_baseline(run), clip_factor=2.0)
    each *= 1.25
    assert tuning.clip_norm == pytest.approx(2 * each * math.sqrt(6), rel=1e-3)
    assert tuning.clip_groups["head"] == pytest.approx(2 * each, rel=1e-3)
    # Two blocks of two layers each: four equal norms, and a stricter factor of 1 + 1 / sqrt(2).
    assert tuning.clip_groups["blocks"] == pytest.approx(2 * each * (1 + 1 / math.sqrt(2)), rel=1e-3)


def test_stacks_are_named_as_the_clippers_groups() -> None:
    from torch import nn

    from fp8console.numerics.clipping import layer_groups

    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(4, 8),
            "blocks": nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3)),
            "head": nn.Linear(8, 4),
        }
    )
    for whole in (model, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))):
        names = [name for name, module in whole.named_modules() if list(module.parameters(recurse=False))]
        found = {name: depth for name, (_, depth) in stacks(names).items()}
        assert found == {group.name: group.layers for group in layer_groups(whole, "stack")}


def test_layers_are_ranked_and_kept_by_the_stated_rule(tmp_path: Path) -> None:
    noise = np.random.default_rng(1).normal(size=40)
    layers = [
        layer("fine", **gradients(1e-3)),
        layer("faint", **gradients(2.0**-42)),  # at a scale of 2^22 at most (57344 / 0.004 = 2^23.8): 2^-20
        layer("restless", **gradients(lambda step: 1e-3 * 2.0 ** (3 * noise[step - 1]))),
        layer("odd", shape=(250, 64), **gradients(1e-3)),
        layer("norm", type="LayerNorm", shape=(64,), **gradients(1e-3)),
        layer("unseen"),
    ]
    baseline = read_baseline(write_run(tmp_path, layers, steps=40))
    tuning = tune(baseline, margin=1)
    by_name = {verdict.name: verdict for verdict in tuning.layers}
    assert tuning.scaler["init_scale"] <= 2.0**22
    faint = by_name["faint"]
    assert tuning.layers[0] is faint and faint.precision == "bf16"
    assert faint.underflow is not None and faint.underflow > 0.9 and "become 0" in faint.why and "lose" in faint.why
    assert faint.error == pytest.approx(1.0, abs=0.01)
    assert by_name["fine"].precision == "fp8" and by_name["fine"].why == "fits"
    assert by_name["fine"].sensitivity == pytest.approx(0.0, abs=0.1)
    assert by_name["restless"].precision == "bf16" and "the next may overflow" in by_name["restless"].why
    assert by_name["odd"].precision == "bf16" and "250 is no multiple of 16" in by_name["odd"].why
    assert by_name["norm"].precision == "uncast" and tuning.layers[-1].precision == "uncast"
    assert by_name["unseen"].precision == "bf16" and by_name["unseen"].sensitivity is None
    headroom = by_name["fine"].headroom
    assert headroom == pytest.approx(math.log2(57344 / (1e-3 * CREST * tuning.scaler["init_scale"])), abs=1e-4)


def test_flushed_share_is_the_measured_one_where_there_is_one(tmp_path: Path) -> None:
    run = write_run(tmp_path, [layer("a", **gradients(1e-3))], scale=2.0**20, underflowed=0.32)
    tuning = tune(read_baseline(run), margin=1)
    assert tuning.scaler["init_scale"] == 2.0**22
    assert tuning.layers[0].underflow == pytest.approx(0.08)  # a quarter of the bound, a quarter of the share
