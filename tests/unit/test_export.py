"""Exported records and printed charts: nothing measured is lost, nothing unknown is invented."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8console.protocol import records
from fp8console.runs import export
from fp8console.runs.reader import StepRecords
from fp8console.runs.series import envelope, read_series

PATIENT = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
FLAGS = records.FLAGS
STEPS: list[tuple[dict[str, Any], int]] = [
    ({"step": 1, "time": 1.5, "loss": 0.1 + 0.2, "scale": 65536.0, "batch": 0}, 0),
    ({"step": 2, "time": 2.5, "loss": math.nan, "grad_norm": math.inf}, FLAGS["skipped"] | FLAGS["loss_nonfinite"]),
    ({"step": 3, "time": 3.5, "loss": -math.inf}, FLAGS["clipped"]),
]


@pytest.fixture
def reader(tmp_path: Path) -> StepRecords:
    path = tmp_path / "steps.0.rec"
    path.write_bytes(records.header() + b"".join(records.pack_step(*step) for step in STEPS))
    return StepRecords(path)


def test_csv(reader: StepRecords, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "BLOCK", 2)
    rows = list(csv.DictReader("".join(export.csv_lines(reader)).splitlines()))
    assert len(rows) == 3
    assert set(rows[0]) == {f.name for f in records.STEP_FIELDS} - {"flags", "known"} | set(FLAGS)
    assert float(rows[0]["loss"]) == 0.1 + 0.2, "no digit is lost"
    assert rows[0]["grad_norm"] == "" and rows[0]["batch"] == "0", "unknown is empty, and 0 is 0"
    assert (rows[1]["loss"], rows[1]["grad_norm"], rows[2]["loss"]) == ("NaN", "Infinity", "-Infinity")
    assert math.isnan(float(rows[1]["loss"])) and float(rows[2]["loss"]) == -math.inf
    assert [row["skipped"] for row in rows] == ["0", "1", "0"]
    assert [row["clipped"] for row in rows] == ["0", "0", "1"]


def test_json_lines(reader: StepRecords) -> None:
    rows = [json.loads(line, parse_constant=pytest.fail) for line in export.json_lines(reader)]
    assert rows[0]["loss"] == 0.1 + 0.2 and rows[0]["grad_norm"] is None and rows[0]["batch"] == 0
    assert (rows[1]["loss"], rows[1]["grad_norm"], rows[2]["loss"]) == ("NaN", "Infinity", "-Infinity")
    assert rows[1]["skipped"] is True and rows[2]["skipped"] is False


def test_no_steps_is_a_header_alone(tmp_path: Path) -> None:
    empty = StepRecords(tmp_path / "none")
    assert "".join(export.csv_lines(empty)).startswith("step,time,")
    assert list(export.json_lines(empty)) == []


def test_a_series_leaves_unknown_out_and_keeps_nan(reader: StepRecords) -> None:
    series = read_series(reader, "loss")
    assert series.steps.tolist() == [1, 2, 3] and series.unknown == 0
    assert series.where("NaN").tolist() == [2]
    assert series.where("-inf").tolist() == [3] and series.where("inf").tolist() == []
    assert read_series(reader, "scale").unknown == 2
    with pytest.raises(KeyError):
        read_series(reader, "nothing")


_FLOATS = st.floats(allow_nan=True, allow_infinity=True)


@PATIENT
@given(st.lists(st.tuples(st.integers(1, 5), _FLOATS), min_size=1, max_size=80), st.integers(1, 30))
def test_an_envelope_keeps_every_extreme_and_invents_nothing(pairs: list[tuple[int, float]], bins: int) -> None:
    steps = np.cumsum([gap for gap, _ in pairs])
    values = np.array([value for _, value in pairs])
    outline = envelope(steps, values, bins)
    assert len(outline.centres) <= bins
    assert (np.diff(outline.centres) > 0).all()
    finite = values[np.isfinite(values)]
    drawn = np.concatenate([outline.low, outline.high])
    drawn = drawn[~np.isnan(drawn)]
    assert set(drawn.tolist()) <= set(finite.tolist())
    if len(finite):
        assert np.nanmin(outline.low) == finite.min()
        assert np.nanmax(outline.high) == finite.max()
    assert (np.isnan(outline.low) == np.isnan(outline.high)).all()


def test_a_spike_of_one_step_in_a_million_is_drawn() -> None:
    values = np.full(1_000_000, 2.0)
    values[765_432] = 99.0
    values[10] = np.nan
    outline = envelope(np.arange(1, 1_000_001), values, 160)
    assert np.nanmax(outline.high) == 99.0
    assert outline.high.argmax() == 765_432 * 160 // 1_000_000


def test_a_gap_in_the_steps_is_a_gap_in_the_envelope() -> None:
    outline = envelope(np.array([1, 2, 99, 100]), np.array([1.0, 2.0, 3.0, 4.0]), 10)
    assert np.isnan(outline.low[1:9]).all()
    assert (outline.low[0], outline.high[0], outline.low[9], outline.high[9]) == (1, 2, 3, 4)


def test_stability_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "BLOCK", 3)
    path = tmp_path / "steps.0.rec"
    steps = [
        ({"step": i, "loss": 2.0, "clip_coef": 0.5 if i == 4 else 1.0}, FLAGS["clipped"] * (i == 4)) for i in range(8)
    ]
    steps[5] = ({"step": 5, "loss": math.nan}, FLAGS["loss_nonfinite"])
    path.write_bytes(records.header() + b"".join(records.pack_step(*step) for step in steps))
    rows = list(csv.DictReader("".join(export.stability_lines(StepRecords(path), "csv")).splitlines()))
    found = {row["name"]: (row["value"], row["unit"]) for row in rows}
    assert found["failures"] == ("1", "failures") and found["mean_steps_between_failures"] == ("7.0", "steps")
    assert found["mean_steps_at_least"] == ("", "steps"), "unknown is empty"
    assert found["longest_stable_stretch"] == ("5", "steps")
    one = json.loads("".join(export.stability_lines(StepRecords(path), "jsonl")))
    assert one["clip_frequency"] == pytest.approx(1 / 7) and one["recovery_rate"] is None
