"""What tune prints and writes of a run's records: tables, JSON, and what it warns of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from baseline_runs import layer, write_run

from fp8console.cli.arguments import CommandFailed
from fp8console.cli.tune_report import report
from fp8console.cli.tune_words import parse
from fp8console.protocol import events, paths
from fp8console.runs import profiles
from fp8console.runs.run import Run

SIZES = {"weight": 0.02, "activation": 1.0, "gradient": 1e-3, "activation_gradient": 1e-3}


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("COLUMNS", "100")
    layers = [layer("up", **SIZES), layer("down", **{**SIZES, "gradient": 1e-4}), layer("norm", "LayerNorm", **SIZES)]
    return write_run(tmp_path / "run", layers, grad_norm=lambda step: 2.0)


def ended(run_dir: Path) -> dict[str, Any]:
    return next(event for event in Run(run_dir).events.events if event.get("what") == "ended")


def test_the_tables_the_map_and_the_profile(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = report(run_dir, parse(["train.py"]), ended(run_dir))
    shown, said = capsys.readouterr()
    assert said == "" and "all put back, verified by digest" in shown
    assert "2^21: 2**(floor(log2(57344 / 0.004)) - 2); 2^23 would just fit" in shown
    assert "clip_norm      3: 95% of the unscaled norms lie below 2; times 1.5" in shown
    assert "1 layer without a matrix product" in shown and "each column one step" in shown
    assert all(len(line) < 100 for line in shown.splitlines() if "▁" in line)
    (kept,) = profiles.kept(profiles.profiles_root())
    assert kept.name == "Net-cpu-b32-torch2.13.0.toml" and profiles.load(kept) == data
    assert "fp8console --profile Net-cpu-b32-torch2.13.0 train.py" in shown
    # A second one does not take its place.
    report(run_dir, parse(["--layers", "1", "train.py"]), ended(run_dir))
    assert "and 1 layer more, in the profile" in capsys.readouterr().out
    assert len(profiles.kept(profiles.profiles_root())) == 2


def test_json_and_a_format_of_ones_own(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--json", "--format", "fp16", "--margin", "0", "-o", str(tmp_path / "p.toml"), "train.py"]
    report(run_dir, parse(words), ended(run_dir))
    printed = json.loads(capsys.readouterr().out)
    assert printed["put_back"] is True and printed["left_out"] == {} and printed["format"]["gradients"] == "float16"
    assert printed["scaler"]["init_scale"] == 2.0**23  # 65504 / 0.004 = 2^23.96


def test_what_went_otherwise_is_warned_of(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report(run_dir, parse(["--json", "train.py"]), None)
    assert "ended by itself before 20 steps" in capsys.readouterr().err
    writer = events.EventWriter(paths.events_file(run_dir, 1))
    text = "baseline over, not everything was put back: the state's digest is not what it was"
    writer.write(events.make("baseline", text, 20, what="ended", steps=20, put_back=False, digests_equal=False))
    report(run_dir, parse(["train.py"]), ended(run_dir))  # rank 0 is fine, rank 1 is not
    shown, said = capsys.readouterr()
    assert text in said and "not put back" in shown


def test_saturated_gradients_ask_for_a_second_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--format", "e4m3", "-o", str(tmp_path / "p.toml"), "train.py"]
    for scale, wanted in ((2.0**16, False), (2.0**17, True)):  # 0.004 * 2^16 = 262, and 448 is the maximum
        run_dir = write_run(tmp_path / f"at-{scale:g}", [layer("up", **SIZES)], scale=scale)
        report(run_dir, parse(words), ended(run_dir))
        assert ("in 20 steps gradients were beyond e4m3fn" in capsys.readouterr().err) is wanted


def test_a_folder_that_takes_no_profile_is_one_line(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    with pytest.raises(CommandFailed, match="tune: the profile can't be written: "):
        report(run_dir, parse(["train.py"]), ended(run_dir))
