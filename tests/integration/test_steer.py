"""Commands to a running training: each is asked, agreed, applied at a step, and seen in what is recorded after it."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

import pytest
import running

CHAR_GPT = str(running.ROOT / "sample_models" / "char_gpt.py")


@pytest.fixture
def run(tmp_path: Path, started: list[running.Run]) -> running.Run:
    """char_gpt in FP8, running, past its tenth step."""
    options = ("--set", "snapshot_budget=0.05")
    made = running.start(tmp_path, CHAR_GPT, "--precision", "fp8-e5m2", "--steps", "5000", options=options)
    started.append(made)
    made.wait_for_step(10, timeout=120)
    return made


def test_pause_holds_the_step_until_resume(run: running.Run) -> None:
    step = run.ctl("pause")["step"]
    assert run.status()["state"] == "paused" and run.status()["step"] == step
    time.sleep(1.0)
    assert run.records()[-1]["step"] == step == run.status()["step"]
    assert run.ctl("step", "3")["step"] == step + 3
    time.sleep(0.5)
    assert run.records()[-1]["step"] == step + 3 and run.status()["state"] == "paused"
    run.ctl("resume")
    run.wait_for_step(step + 6)
    assert run.status()["state"] == "running"
    held = run.records()[step + 3]  # the first step after the pauses: their time is not the step's
    assert held["duration"] < 1.0


def test_rollback_verifies_and_says_what_went_back(run: running.Run) -> None:
    points = [point["step"] for point in run.status()["restore_points"]]
    answer = run.ctl("rollback", str(points[0]), "--lr-scale", "0.5", "--scale", "2048")
    detail = answer["detail"]
    assert detail["digests_equal"] is True and detail["to"] == points[0]
    assert detail["before"]["step"] == answer["step"] and detail["after"]["step"] == points[0]
    assert detail["after"]["scale"] == 2048.0 and detail["note"] == "weights rolled back, data not"
    run.wait_for_step(answer["step"] + 2)
    after = run.records()[answer["step"]]
    assert after["step"] == answer["step"] + 1 and after["scale"] == 2048.0
    assert after["flags"] & (1 << 4)
    assert run.status()["lr_scale"] == 0.5


def test_scale_set_is_the_next_steps_scale(run: running.Run) -> None:
    step = run.ctl("set", "scale=1024")["step"]
    run.wait_for_step(step + 1)
    assert run.records()[step - 1]["scale"] != 1024.0
    assert run.records()[step]["scale"] == 1024.0
    step = run.ctl("set", "scale=/2")["step"]
    run.wait_for_step(step + 1)
    assert run.records()[step]["scale"] == 512.0


def test_floor_cap_and_growth_hold_at_the_boundary(run: running.Run) -> None:
    step = run.ctl("set", "growth_interval=1", "growth_factor=2", "scale=256", "cap=1024")["step"]
    run.wait_for_step(step + 8)
    scales = [record["scale"] for record in run.records()[step : step + 8]]
    assert scales[:4] == [256.0, 512.0, 1024.0, 1024.0] and max(scales) == 1024.0
    refused = run.command("set", "scale=4096")
    assert refused.returncode == 1 and "cap" in refused.stderr
    step = run.ctl("set", "cap=off", "growth_interval=1000000", "floor=8192")["step"]
    run.wait_for_step(step + 1)
    assert run.records()[step]["scale"] == 8192.0


def test_learning_rate_factor_wins_without_compounding(run: running.Run) -> None:
    before = run.records()[-1]
    step = run.ctl("set", "lr_scale=0.1")["step"]
    run.wait_for_step(step + 4)
    records = run.records()
    # The script's schedule moves the rate by under 5% over these few steps; a compounding factor would give 1e-4.
    for record in records[step : step + 4]:
        assert 0.05 * before["lr"] < record["lr"] < 0.2 * before["lr"] * (1 + step / before["step"])
    step = run.ctl("set", "lr_scale=1")["step"]
    run.wait_for_step(step + 1)
    assert run.records()[step]["lr"] > 5 * records[-1]["lr"]


def test_clip_norm_overrides_the_scripts(run: running.Run) -> None:
    step = run.ctl("set", "clip_norm=0.001")["step"]
    run.wait_for_step(step + 2)
    record = run.records()[step]
    assert running.close(record["clip_coef"], 0.001 / (record["grad_norm"] + 1e-6), 1e-4)


@pytest.mark.parametrize(
    "words, says",
    [
        (["set", "scale=0"], "over 0"),
        (["set", "scale=-1"], "over 0"),
        (["set", "scale=nan"], "finite"),
        (["set", "scale=inf"], "finite"),
        (["set", "growth_factor=1"], "over 1"),
        (["set", "hysteresis=2"], "hysteresis"),
        (["set", "colour=3"], "unknown setting"),
        (["rollback", "123456"], "no restore point"),
        (["explode"], "explode"),
    ],
)
def test_bad_commands_get_a_line_and_change_nothing(run: running.Run, words: list[str], says: str) -> None:
    done = run.command(*words)
    assert done.returncode != 0 and says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert run.events("applied") == []


def test_checkpoint_rollback_from_disk_and_stop(run: running.Run) -> None:
    made = run.ctl("checkpoint", "--tag", "keep")
    folder = Path(made["detail"]["path"])
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["tag"] == "keep" and manifest["step"] == made["step"]
    for name, about in manifest["files"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == about["sha256"]
    back = run.ctl("rollback", str(made["step"]))
    assert back["detail"]["digests_equal"] is True and back["detail"]["digest"] == made["detail"]["digest"]
    stopped = run.ctl("stop")
    assert run.wait_for_end() == 0
    assert Path(stopped["detail"]["path"]).is_dir()
    assert run.status()["state"] == "finished"
    late = run.command("pause")
    assert late.returncode == 1 and len(late.stderr.strip().splitlines()) == 1


def test_a_damaged_checkpoint_is_refused_and_nothing_changes(tmp_path: Path, started: list[running.Run]) -> None:
    options = ("--set", "snapshot_budget=0")  # no snapshot that could stand in for the checkpoint
    run = running.start(tmp_path, CHAR_GPT, "--steps", "5000", options=options)
    started.append(run)
    run.wait_for_step(3, timeout=120)
    made = run.ctl("checkpoint", "--tag", "bad")
    state = Path(made["detail"]["path"]) / "state.pt"
    data = bytearray(state.read_bytes())
    data[len(data) // 2] ^= 1
    state.write_bytes(bytes(data))
    done = run.command("rollback", str(made["step"]))
    assert done.returncode == 1 and "damaged" in done.stderr
    assert run.events("rolled_back", rank=0) == []
    assert run.events("fault", rank=0) == []
    assert run.ctl("pause")["step"] > made["step"]


def test_kill_ends_it(run: running.Run) -> None:
    run.ctl("kill")
    assert run.wait_for_end() == 128 + 15
    assert run.info()["signal"] == "SIGTERM"
