"""Every recorded value against what the training itself noted in plain PyTorch and float64."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import running

from fp8console.runs.layers import LayerRecords

TRAININGS = [
    "accumulate",
    "lbfgs",
    "fused_overflow",
    "clip_scaled",
    "by_hand",
    "in_backward",
    "odd_numbers",
    "compiled",
    "disabled_scaler",
]


def compare(recorded: list[dict[str, Any]], truth: list[dict[str, Any]], relative: float = 1e-5) -> None:
    for record, wanted in zip(recorded, truth):
        for name, value in wanted.items():
            if name == "skipped":
                assert bool(record["flags"] & 1) == value, (record["step"], record)
            else:
                assert running.close(record[name], value, relative), (record["step"], name, record[name], value)


@pytest.mark.parametrize("name", TRAININGS)
def test_records_are_true_and_the_result_is_untouched(name: str, tmp_path: Path) -> None:
    """Both ways of reading values: at once, as on a CPU, and a step late, as from a device."""
    plain = running.plain(tmp_path / "plain", running.training(name), "--out", str(tmp_path / "plain.json"))
    assert plain.returncode == 0, plain.stderr
    without = json.loads((tmp_path / "plain.json").read_text())
    for way in ("false", "true"):
        folder = tmp_path / f"late_{way}"
        # Layers are sampled at every step as well: none of these trainings may notice.
        options = ("--set", f"read_late={way}", "--set", "layer_steps=1", "--set", "layer_budget=1")
        run = running.run(folder, running.training(name), "--out", str(folder / "out.json"), options=options)
        assert run.result is not None and run.result.returncode == 0, run.result
        with_probe = json.loads((folder / "out.json").read_text())
        assert with_probe["parameters"] == without["parameters"]
        assert run.output() == plain.stdout + plain.stderr
        recorded = run.records()
        assert [record["step"] for record in recorded] == list(range(1, len(with_probe["truth"]) + 1))
        compare(recorded, with_probe["truth"])
        assert run.events("fault", rank=0) == []


def test_low_precision_and_sparse_gradients(tmp_path: Path) -> None:
    run = running.run(tmp_path, running.training("bf16_sparse"), "--out", str(tmp_path / "out.json"))
    truth = json.loads((tmp_path / "out.json").read_text())["truth"]
    assert len(run.records()) == len(truth)
    compare(run.records(), truth)


def test_two_optimizers_are_one_step(tmp_path: Path) -> None:
    """The first iterations go by while the order is learned; from then on each record is one whole iteration."""
    run = running.run(tmp_path, running.training("two_optimizers"), "--out", str(tmp_path / "out.json"))
    truth = json.loads((tmp_path / "out.json").read_text())["truth"]
    whole = [record for record in run.records() if record["micro_batches"] == 3]
    assert len(whole) >= len(truth) - 2
    compare(whole, truth[len(truth) - len(whole) :])


def test_clip_without_unscale_is_flagged_once(tmp_path: Path) -> None:
    run = running.run(tmp_path, running.training("clip_scaled"))
    notices = [event for event in run.events("notice", rank=0) if "unscale_" in event["text"]]
    assert len(notices) == 1
    assert all(record["flags"] & (1 << 5) for record in run.records())


def test_a_disabled_scaler_is_said_and_shows_no_scale(tmp_path: Path) -> None:
    run = running.run(tmp_path, running.training("disabled_scaler"))
    assert len([event for event in run.events("notice", rank=0) if "disabled" in event["text"]]) == 1
    assert run.status()["scale"] is None


def test_nan_and_inf_reach_json(tmp_path: Path) -> None:
    run = running.run(tmp_path, running.training("odd_numbers"))
    exported = running.fp8console(tmp_path, "export", str(run.run_dir), "--format", "jsonl")
    rows = [
        json.loads(line, parse_constant=lambda text: pytest.fail(f"bare {text}"))
        for line in exported.stdout.splitlines()
    ]
    assert [row["loss"] for row in rows][1] == "NaN"
    assert [row["loss"] for row in rows][2] == "Infinity" or math.isnan(run.records()[2]["loss"])
    kinds = [(event["what"], event["step"]) for event in run.events("nonfinite", rank=0)]
    assert ("loss", 2) in kinds and ("grad_norm", 2) in kinds


def test_the_compiled_graph_stays_whole(tmp_path: Path) -> None:
    plain = running.plain(tmp_path / "plain", running.training("compiled"))
    options = ("--set", "layer_steps=1", "--set", "layer_budget=1")
    run = running.run(tmp_path / "console", running.training("compiled"), options=options)
    assert plain.stdout == run.output() and "graphs [" in plain.stdout
    layers = LayerRecords(run.run_dir)
    for kind in ("weight", "gradient"):
        assert layers.samples(kind, "l2")[0].tolist() == [2, 3, 4, 5, 6]
        assert [row["name"] for row in layers.latest(kind)] == ["0", "3"]
    # A hook of ours would be traced, so what only hooks can see is unknown.
    assert layers.latest("activation") == [] and layers.layers[0]["kinds"] == ["weight", "gradient"]


def test_a_compiled_optimizer_step_is_left_alone_and_still_makes_records(tmp_path: Path) -> None:
    plain = running.plain(tmp_path / "plain", running.training("compiled_step"), "--out", str(tmp_path / "plain.json"))
    assert plain.returncode == 0, plain.stderr
    run = running.run(tmp_path / "console", running.training("compiled_step"), "--out", str(tmp_path / "console.json"))
    assert run.result is not None and run.result.returncode == 0, run.result
    assert (tmp_path / "plain.json").read_text() == (tmp_path / "console.json").read_text()
    assert len(run.records()) > 10
