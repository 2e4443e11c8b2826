"""Two runs compared, from curves and layer statistics that are written down here."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8console.cli.check_training import final_gap
from fp8console.protocol import paths, records
from fp8console.runs.compare import compare_runs, loss_gap, relative_errors

NAN, INF = math.nan, math.inf


def gap(reference: list[float], candidate: list[float], first: int = 1) -> Any:
    left = np.arange(1, len(reference) + 1), np.array(reference)
    right = np.arange(first, first + len(candidate)), np.array(candidate)
    return loss_gap(*left, *right)


# -- loss curves ------------------------------------------------------------------------------------------------------
def test_equal_curves_have_no_gap() -> None:
    found = gap([3.0, 2.0, 1.0], [3.0, 2.0, 1.0])
    assert (found.first, found.final, found.worst, found.steps, found.window) == (0, 0, 0, 3, 1)


def test_a_small_loss_s_gap_says_what_it_is_a_share_of() -> None:
    """0.01 under a first loss of 4 is judged by a twentieth of that, 0.2: 0.005 more is 2.5% of it."""
    steps = np.arange(1, 3)
    large = loss_gap(steps, np.array([4.0, 2.0]), steps, np.array([4.0, 2.1]))
    assert final_gap(large) == "5%"
    small = loss_gap(steps, np.array([4.0, 0.01]), steps, np.array([4.0, 0.015]))
    assert final_gap(small) == "2.5% of 0.2, a twentieth of the first loss"
    same = loss_gap(steps, np.array([4.0, 0.0]), steps, np.array([4.0, 0.0]))
    assert final_gap(same) == "0%"


def test_gaps_are_relative_and_at_their_steps() -> None:
    found = gap([4.0, 4.0, 2.0, 2.0], [4.0, 5.0, 2.0, 2.1])
    assert found.first == 0 and found.worst == pytest.approx(0.25) and found.worst_step == 2
    assert found.final == pytest.approx(0.05)
    assert (found.final_reference, found.final_candidate) == (2.0, 2.1)


def test_means_over_a_tenth_of_the_steps() -> None:
    reference = [2.0] * 20
    candidate = [2.0] * 17 + [4.0, 2.0, 2.2]
    found = gap(reference, candidate)
    # Windows of two steps: (2.0 + 4.0) / 2 ends at step 18 and (4.0 + 2.0) / 2 at step 19; the last is 2.1.
    assert found.window == 2 and found.worst == pytest.approx(0.5) and found.worst_step == 18
    assert found.final == pytest.approx(0.05)


def test_a_loss_near_zero_counts_as_a_share_of_the_first() -> None:
    found = gap([10.0, 0.001], [10.0, 0.101])
    assert found.final == pytest.approx(0.1 / 0.5)  # a twentieth of 10
    assert gap([0.0, 0.0], [0.0, 0.5]).final == INF


def test_only_steps_that_both_have_are_compared() -> None:
    found = gap([1.0, 2.0, 4.0, 8.0], [4.4, 8.8, 9.0], first=3)
    assert (found.steps, found.common) == (2, 2)
    assert found.first == pytest.approx(0.1) and found.final == pytest.approx(0.1)
    nothing = gap([1.0], [1.0], first=5)
    assert (nothing.steps, nothing.first, nothing.final, nothing.worst, nothing.worst_step) == (
        0,
        None,
        None,
        None,
        None,
    )


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_non_finite_losses_are_named_and_left_out(value: float) -> None:
    found = gap([1.0, 1.0, 1.0, 1.0], [1.0, value, 1.0, 1.1])
    assert (found.reference_nonfinite, found.candidate_nonfinite, found.steps, found.common) == (None, 2, 3, 4)
    assert found.final == pytest.approx(0.1) and found.worst == pytest.approx(0.1)
    found = gap([value, 1.0], [1.0, 1.0])
    assert (found.reference_nonfinite, found.candidate_nonfinite, found.first) == (1, None, None)
    found = gap([1.0, 1.0], [value, value])
    assert (found.candidate_nonfinite, found.steps, found.final) == (1, 0, None)


# -- errors of layers -------------------------------------------------------------------------------------------------
def test_relative_errors_with_what_is_unknown_or_tiny() -> None:
    reference = np.array([[2.0, 0.0, NAN, 4.0, INF]])
    candidate = np.array([[2.5, 0.0, 1.0, 3.0, 1.0]])
    found = relative_errors(reference, candidate)
    assert found[0, :2].tolist() == [0.25, 0.0] and found[0, 3] == 0.25
    assert np.isnan(found[0, [2, 4]]).all()
    # 1e-9 beside a root mean square of 1 (of two layers): its error is taken against a thousandth of that.
    noise = relative_errors(np.array([[math.sqrt(2), 1e-9]]), np.array([[math.sqrt(2), 1e-5]]))
    assert noise[0, 1] == pytest.approx(1e-5 / 1e-3, rel=1e-3)
    assert relative_errors(np.zeros((0, 3)), np.zeros((0, 3))).shape == (0, 3)


LAYERS = ("a", "b", "c")
FIGURES = len(records.LAYER_FIGURES)


def write_run(folder: Path, l2: dict[tuple[int, str, str], float], steps: int = 4, **more: Any) -> Path:
    """A run directory whose layers' L2 norms are 1 but for those given by (step, kind, layer)."""
    folder.mkdir()
    skipped, losses = more.get("skipped", ()), more.get("losses", [1.0] * steps)
    scale, names = more.get("scale", 1.0), more.get("names", LAYERS)
    (folder / paths.RUN).write_text("{}")
    with open(paths.steps_file(folder, 0), "wb") as file:
        file.write(records.header())
        for step in range(1, steps + 1):
            flags = records.FLAGS["skipped"] if step in skipped else 0
            file.write(records.pack_step({"step": step, "time": 0.0, "loss": losses[step - 1]}, flags))
    with open(paths.layers_file(folder, 0), "wb") as file:
        file.write(records.header(records.LAYER_FIELDS))
        for step in range(1, steps + 1):
            for number, kind in enumerate(records.LAYER_KINDS):
                factor = scale if "gradient" in kind else 1.0
                for index, name in enumerate(names):
                    norm = l2.get((step, kind, name), 1.0) * factor
                    bad = 0.0 if math.isfinite(norm) else 1.0
                    figures = {"l2": norm, "amax": 0.5 * factor, "nonfinite": bad, "elements": 4.0, "scale": factor}
                    row = [figures.get(figure) for figure in records.LAYER_FIGURES]
                    file.write(records.pack_layer(step, index, number, row))
    about = [{"name": name, "type": "Linear", "shape": [2, 2], "parameters": 4, "kinds": []} for name in names]
    formats = {"forward": {"name": "e4m3fn"}, "backward": {"name": "e5m2"}}
    paths.layers_about(folder).write_text(json.dumps({"layers": about, "formats": formats}))
    return folder


def compared(tmp_path: Path, l2: dict[tuple[int, str, str], float], **more: Any) -> Any:
    reference = write_run(tmp_path / "reference", {})
    return compare_runs(reference, write_run(tmp_path / "candidate", l2, **more), 0.1)


def test_runs_that_agree(tmp_path: Path) -> None:
    found = compared(tmp_path, {(2, "activation", "b"): 1.05})
    assert (found.drift, found.fault, found.nonfinite, found.problem) == (None, None, None, None)
    assert found.layers[0].name == "b" and found.layers[0].worst == pytest.approx(0.05, rel=1e-3)
    assert found.layers[0].worst_step == 2 and found.layers[0].first_step is None and found.layer_steps == 4


def test_a_loss_scale_is_taken_out(tmp_path: Path) -> None:
    found = compared(tmp_path, {}, scale=1024.0)
    assert found.drift is None and found.layers[0].worst == 0 and found.layers[0].amax == 0


@pytest.mark.parametrize(
    "wrong, first",
    [
        # Forward: the first layer in depth, though its error reaches every gradient of the step.
        ([(2, "activation", "b"), (2, "activation", "c"), (2, "gradient", "a"), (2, "activation_gradient", "a")], "b"),
        # Backward: the last layer in depth.
        ([(2, "activation_gradient", "a"), (2, "activation_gradient", "b"), (2, "gradient", "a")], "b"),
        # At one layer its output's gradient comes before its weights'.
        ([(3, "gradient", "c"), (3, "activation_gradient", "b"), (3, "gradient", "b")], "c"),
        ([(3, "weight", "a"), (3, "gradient", "a")], "a"),
        # An earlier step before all that.
        ([(1, "weight", "c"), (2, "activation", "a")], "c"),
    ],
)
def test_the_layer_that_drifts_first(tmp_path: Path, wrong: list[tuple[int, str, str]], first: str) -> None:
    found = compared(tmp_path, dict.fromkeys(wrong, 1.5))
    assert found.drift.name == first and found.drift.step == min(step for step, _, _ in wrong)
    assert found.drift.error == pytest.approx(0.5) and (found.drift.reference, found.drift.candidate) == (1.0, 1.5)
    if (3, "weight", "a") in wrong:
        assert found.drift.kind == "gradient"


def test_late_gradients_are_named_and_do_not_count(tmp_path: Path) -> None:
    late = compared(tmp_path, {(4, "gradient", "a"): 9.0})
    assert late.drift.name == "a" and late.fault is None


def test_early_gradients_count_from_three_times_the_tolerance(tmp_path: Path) -> None:
    little = compared(tmp_path, {(2, "gradient", "a"): 1.2, (3, "activation_gradient", "b"): 1.35})
    assert little.drift.name == "a" and (little.fault.name, little.fault.step) == ("b", 3)


def test_weights_and_activations_count_always(tmp_path: Path) -> None:
    found = compared(tmp_path, {(4, "weight", "c"): 0.8})
    assert found.fault.name == "c" and found.fault.kind == "weight" and found.fault.error == pytest.approx(0.2)


@pytest.mark.parametrize("value", [NAN, INF])
def test_non_finite_values_are_placed(tmp_path: Path, value: float) -> None:
    wrong = dict.fromkeys([(3, "activation", "c"), (3, "gradient", "a"), (3, "activation", "b")], value)
    found = compared(tmp_path, wrong)
    assert (found.nonfinite.name, found.nonfinite.kind, found.nonfinite.step) == ("b", "activation", 3)
    assert math.isnan(found.nonfinite.error) and found.drift is None


def test_what_a_scaler_refused_is_its_work_and_no_fault(tmp_path: Path) -> None:
    found = compared(tmp_path, {(2, "gradient", "a"): INF, (2, "activation_gradient", "b"): INF}, skipped=(2,))
    assert found.nonfinite is None and found.skipped == (0, 1)


def test_non_finite_in_both_is_no_news(tmp_path: Path) -> None:
    bad = {(2, "activation", "a"): NAN}
    reference = write_run(tmp_path / "reference", bad)
    assert compare_runs(reference, write_run(tmp_path / "candidate", bad), 0.1).nonfinite is None


def test_layers_are_matched_by_name(tmp_path: Path) -> None:
    found = compared(tmp_path, {(2, "activation", "c"): 1.5}, names=("c", "new", "a"))
    assert found.drift.name == "c" and {error.name for error in found.layers} == {"a", "c"}
    none = compare_runs(tmp_path / "reference", write_run(tmp_path / "other", {}, names=("x",)), 0.1)
    assert none.problem == "the two runs have no layer of the same name" and none.loss.final == 0


def test_what_lies_behind_the_last_step_is_left_out(tmp_path: Path) -> None:
    reference = write_run(tmp_path / "reference", {})
    wrong = {(4, "weight", "a"): 2.0}
    candidate = write_run(tmp_path / "candidate", wrong, losses=[1.0, 1.0, 1.0, NAN], skipped=(4,))
    found = compare_runs(reference, candidate, 0.1, last=3)
    assert (found.loss.steps, found.loss.candidate_nonfinite, found.drift, found.skipped) == (3, None, None, (0, 0))
    assert found.layer_steps == 3 and compare_runs(reference, candidate, 0.1, last=4).drift is not None


def test_without_statistics_the_curves_are_compared_all_the_same(tmp_path: Path) -> None:
    candidate = write_run(tmp_path / "candidate", {}, losses=[1.0, 1.0, 1.0, 1.1])
    paths.layers_file(candidate, 0).unlink()
    found = compare_runs(write_run(tmp_path / "reference", {}), candidate, 0.1)
    assert found.problem == "no statistics of layers were recorded" and found.loss.final == pytest.approx(0.1)
    json.dumps(found.to_json())
