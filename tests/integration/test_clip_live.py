"""Clipping in real trainings: what is clipped too often is said once, and clipping that follows the norms."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import running


def truth_of(run: running.Run) -> list[dict[str, Any]]:
    return json.loads((run.folder / "out.json").read_text())["truth"]


def test_clipping_too_often_is_said_once_and_when_it_is_over(tmp_path: Path) -> None:
    out = str(tmp_path / "out.json")
    run = running.run(tmp_path, running.training("clipping"), "--out", out, "--limit", "2")
    assert run.result is not None and run.result.returncode == 0
    records, truth = run.records(), truth_of(run)
    for record, true in zip(records, truth, strict=True):
        assert running.close(record["grad_norm"], true["grad_norm"]) and record["clip_limit"] == 2.0
        assert running.close(record["clip_coef"], min(1.0, 2 / (true["grad_norm"] + 1e-6)))
        assert running.close(true["moved"], min(2.0, true["grad_norm"]), 1e-3)
    # Every fifth step from 100 to 245 is clipped: the eleventh of them, at 150, is the first with more than ten in the
    # last hundred steps. They become five again when the newest but five, at 225, is a hundred steps ago: at 320 it
    # holds 225 to 245, five steps.
    said = run.events("clipping", rank=0)
    assert [(event["step"], event["count"], event["limit"]) for event in said] == [(150, 11, 2.0)]
    over = [event for event in run.events("recovered", rank=0) if event["of"] == "clipping"]
    assert [(event["step"], event["since"], event["count"]) for event in over] == [(320, 150, 5)]
    status = run.status()
    assert status["stability"]["clip_frequency"] == 30 / 400
    assert status["stability"]["clip_frequency_recent"] == 0.0
    assert status["stability"]["failures"] == 0 and status["stability"]["mean_steps_at_least"] == 400
    assert status["last_incident"] == "clipped 11 of 100 steps at step 150"


@pytest.mark.parametrize("limit", ["0", "30"])
def test_clipping_that_follows_the_norms(tmp_path: Path, started: list[running.Run], limit: str) -> None:
    """Set on a running training, with a limit of its own or none; each limit is the published rule's."""
    out = str(tmp_path / "out.json")
    go = tmp_path / "go"
    words = ["--steps", "160", "--begin", "40", "--end", "160", "--every", "20", "--wait", str(go)]
    run = running.start(tmp_path, running.training("clipping"), "--out", out, "--limit", limit, *words)
    started.append(run)
    run.wait_for_step(5)
    answer = run.ctl("set", "clip_norm=auto", "clip_z=2.5")
    assert answer["detail"]["now"] == {"clip_norm": "auto", "clip_z": 2.5}
    status = run.status()
    assert (status["clip_norm"], status["clip_z"]) == ("auto", 2.5)
    begin = answer["step"]
    go.touch()
    assert run.wait_for_end() == 0
    assert run.events("fault", rank=0) == []
    norms = [true["grad_norm"] for true in truth_of(run)]
    mean = variance = 0.0
    seen: list[float] = []
    clipped = 0
    for step, (record, true) in enumerate(zip(run.records(), truth_of(run), strict=True), start=1):
        norm, allowed = norms[step - 1], math.inf
        if step > begin and len(seen) >= 25:
            deviation = max(math.sqrt(variance), 0.01 * mean)
            score = (norm - mean) / deviation
            allowed = mean + (2.5 if score <= 2.5 else 2.5**2 / score) * deviation
            assert running.close(record["clip_limit"], allowed, 1e-4)
            clipped += norm > allowed
        elif limit != "0":
            assert record["clip_limit"] == float(limit), "the script's own while it warms up"
        assert running.close(record["grad_norm"], norm)
        assert running.close(true["moved"], min(norm, allowed), 1e-3)
        if step <= begin:
            continue
        taken = min(norm, allowed)
        if len(seen) < 25:
            seen.append(taken)
            mean = sum(seen) / len(seen)
            variance = sum((value - mean) ** 2 for value in seen) / len(seen)
        else:
            mean = 0.97 * mean + 0.03 * taken
            variance = 0.97 * variance + 0.03 * (taken - mean) ** 2
    assert clipped >= 6
    assert running.fp8console(tmp_path, "status", str(run.run_dir)).stdout.count("clipped") >= 1
