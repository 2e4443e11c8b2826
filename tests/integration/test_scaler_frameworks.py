"""Fp8GradScaler where others drive it: ranks, Lightning, accelerate, and the console's operator."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import running

BAD = (3, 4, 7)  # steps of scaler_ranks.py in which rank 1 alone has an inf

# -- ranks ---------------------------------------------------------------------------------------------------------
Case = dict[str, Any]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Case]]:
    """What every case of scaler_ranks.py saw, by rank."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, running.training("scaler_ranks")]
    words = [str(folder / "store"), str(folder / "out")]
    started = [
        subprocess.Popen(
            [*command, str(rank), *words],
            cwd=folder,
            env=running.environment(folder),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in started:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
    finally:
        for process in started:
            process.kill()
    return [json.loads((folder / f"out.{rank}").read_text()) for rank in range(2)]


def both(ranks: list[dict[str, Case]], name: str) -> tuple[Case, Case]:
    if name not in ranks[0]:
        pytest.skip("this torch can't")
    for rank in ranks:
        assert "error" not in rank[name], rank[name]["error"]
    return ranks[0][name], ranks[1][name]


def moved(case: Case) -> list[bool]:
    """For each step whether it changed this rank's parameters."""
    return [now != before for before, now in zip([case["start"], *case["parameters"]], case["parameters"])]


@pytest.mark.parametrize("name", ["ddp", "ddp_counting"])
def test_ddp_ranks_with_different_data_keep_one_scale(ranks: list[dict[str, Case]], name: str) -> None:
    one, other = both(ranks, name)
    assert one["scales"] == other["scales"] and one["parameters"] == other["parameters"]
    assert one["figures"] == other["figures"] and one["figures"]["headroom"] != "None"
    assert one["scales"][-1] != one["scales"][0]


def test_a_gradient_that_is_spread_over_ranks_is_measured(ranks: list[dict[str, Case]]) -> None:
    one, other = both(ranks, "tensor_parallel")
    assert one["figures"] == other["figures"] and one["figures"]["measured"] == "10"


def test_ddp_ranks_that_keep_to_themselves_part(ranks: list[dict[str, Case]]) -> None:
    """What the all-reduce is for: each rank measures its own data, and follows it if nothing is shared."""
    one, other = both(ranks, "ddp_alone")
    assert one["scales"] != other["scales"] and one["figures"]["typical"] != other["figures"]["typical"]


@pytest.mark.parametrize(
    "name", ["fsdp1", "fsdp1_unscales", "fsdp1_fused", "fsdp1_fused_unscales", "fsdp2", "fsdp2_fused"]
)
def test_sharded_ranks_refuse_the_same_steps(ranks: list[dict[str, Case]], name: str) -> None:
    one, other = both(ranks, name)
    steps = [step not in BAD for step in range(len(one["scales"]))]
    assert moved(one) == moved(other) == steps
    assert one["scales"] == other["scales"] and one["figures"] == other["figures"]
    if "fused" in name:  # torch's rule, from 64: a half at each refused step
        assert one["scales"] == [64.0] * 3 + [32.0] + [16.0] * 3 + [8.0] * (len(steps) - 7)


def test_torchs_sharded_scaler_parts_with_a_fused_optimizer(ranks: list[dict[str, Case]]) -> None:
    one, other = both(ranks, "fsdp1_fused_stock")
    assert moved(one) == [True] * len(moved(one)) and one["scales"][-1] == 64.0
    assert moved(other) == [step not in BAD for step in range(len(moved(one)))] and other["scales"][-1] == 8.0


# -- frameworks ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("library", ["lightning", "accelerate"])
def test_in_a_frameworks_loop(library: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install -c constraints.txt '.[frameworks]'")
    done = running.plain(tmp_path, running.training(f"scaler_{library}"), str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    # The sixth step's loss is inf, and patience is 1: that step alone changes no weight, and it halves the scale.
    weights, scales = found["weights"], found["scales"]
    assert [now == before for before, now in zip(weights, weights[1:])] == [
        step == 5 for step in range(len(weights) - 1)
    ]
    assert scales[6] == scales[5] / 2 and max(scales[6:]) == scales[6]
    assert found["state"] == found["loaded"] and "'bad_steps': 1" in found["state"]


# -- the console ---------------------------------------------------------------------------------------------------
def test_an_operator_steers_it(tmp_path: Path, started: list[running.Run]) -> None:
    options = ("--set", "snapshot_budget=0.05")
    out = tmp_path / "run-states"
    run = running.start(tmp_path / "r", running.training("scaler_steered"), "--out", str(out), options=options)
    started.append(run)
    run.wait_for_step(40, timeout=120)

    def lines() -> list[dict[str, str]]:
        return [json.loads(line) for line in out.read_text().splitlines(keepends=True) if line.endswith("\n")]

    before = run.status()["scaler"]
    assert (before["class_name"], before["preset"], before["margin"]) == ("Fp8GradScaler", "headroom", 3.0)
    asked = ["margin=9", "hysteresis=3", "refill=every_clean_step", "floor=0.125", "smoothing=0.25", "patience=3"]
    asked += ["underflow_tolerance=0.02", "saturation_tolerance=off", "cap=1048576", "growth_factor=1.5"]
    answer = run.ctl("set", *asked)
    wanted = {
        "margin": 9.0,
        "hysteresis": 3,
        "refill": "every_clean_step",
        "floor": 0.125,
        "smoothing": 0.25,
        "patience": 3,
        "underflow_tolerance": 0.02,
        "saturation_tolerance": None,
        "cap": 1048576.0,
        "growth_factor": 1.5,
    }
    now = run.status()["scaler"]
    assert {name: now[name] for name in wanted} == wanted
    step = answer["step"]
    # Six bits more of margin: within some steps the scale lies at least four bits lower.
    run.wait_until(lambda: run.records()[-1]["scale"] <= run.records()[step - 1]["scale"] / 16, 60, "a lower scale")

    refused = run.command("set", "growth_factor=1e30", "margin=2")  # the scaler's range is narrower than the command's
    assert refused.returncode == 1 and "growth_factor must be" in refused.stderr
    point = run.status()["restore_points"][-1]["step"]
    run.wait_for_step(run.records()[-1]["step"] + 30)
    back = run.ctl("rollback", str(point))
    assert back["detail"]["digests_equal"] is True and back["detail"]["to"] == point
    run.wait_for_step(back["step"] + 2)
    found = lines()
    # Line n is the state after n steps: all of it is what it was, and it had moved on.
    assert found[back["step"]] == found[point] != found[back["step"] - 1]
    assert {name: run.status()["scaler"][name] for name in wanted} == wanted
    step = run.ctl("set", "floor=1024", "margin=off")["step"]
    run.wait_for_step(step + 2)
    assert run.records()[step]["scale"] == 1024.0
    assert run.events("fault", rank=0) == []
