"""``tune`` on unedited trainings: measured, put back bit by bit, ended; and its profile applied to the next run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import running

from fp8console.runs import profiles

SAMPLES = running.ROOT / "sample_models"


def tune(folder: Path, *words: str) -> tuple[running.Run, str, str, int]:
    folder.mkdir(exist_ok=True)
    run_dir = folder / "run"
    done = running.fp8console(folder, "tune", "--run-dir", str(run_dir), *words)
    return running.Run(folder, run_dir, done), done.stdout, done.stderr, done.returncode


def test_the_state_from_before_the_first_forward_is_put_back(tmp_path: Path) -> None:
    out = tmp_path / "state.json"
    profile = tmp_path / "p.toml"
    training = [running.training("put_back"), "--out", str(out), "--scaler"]
    run, shown, said, status = tune(tmp_path, "--steps", "9", "-o", str(profile), *training)
    assert status == 0, said
    state = json.loads(out.read_text())
    assert state["done"] == 9
    after = state["after"]
    # The scheduler's own step of the last iteration, and the drawing of its batch, come after and before.
    for part in ("model", "optimizer", "scaler", "random"):
        assert after[part] == state["before"][part], part
    begun, ended = run.events("baseline", rank=0)
    assert begun["taken"] == "before the first forward" and begun["model"] == "Sequential"
    assert begun["parameters"] == 8 * 32 + 32 + 64 + 32 * 4 + 4 and begun["device_name"] == "cpu"
    assert ended["put_back"] and ended["digests_equal"] and ended["step"] == 9
    records = run.records()
    assert [record["step"] for record in records] == list(range(1, 10))
    assert all(math.isclose(record["lr"], 1e-6, rel_tol=1e-6) for record in records)
    assert run.info()["exit_status"] == 0

    data = profiles.load(profile)
    assert data["made"]["steps"] == 9 and data["made"]["model"] == "Sequential"
    assert {layer["name"] for layer in data["layers"]} == {"0", "1", "4"}
    assert [layer["precision"] for layer in data["layers"] if layer["name"] == "1"] == ["uncast"]
    assert "keep in" in shown and "gradient magnitudes" in shown and str(profile) in shown
    assert "\x1b" not in shown and "9/9 steps" in said


def test_a_samples_profile_starts_the_next_run(tmp_path: Path) -> None:
    script = [str(SAMPLES / "char_gpt.py"), "--precision", "fp8-e4m3", "--batch-size", "4", "--steps"]
    run, shown, said, status = tune(tmp_path, "--steps", "7", *script, "40")
    assert status == 0, said
    kept = profiles.kept(tmp_path / "config" / "fp8console" / "profiles")
    assert [path.stem for path in kept] == ["CharGPT-cpu-b4-torch" + run.info()["versions"]["torch"].split("+")[0]]
    data = profiles.load(kept[0])
    assert data["made"]["batch_size"] == 4 and data["format"]["gradients"] == "e4m3fn"
    scaler = data["scaler"]
    assert math.frexp(scaler["init_scale"])[0] == 0.5 and scaler["init_scale"] != 65536.0

    second = running.run(tmp_path / "second", *script, "3", options=("--profile", str(kept[0])))
    assert second.result is not None and second.result.returncode == 0, second.result.stderr
    records = second.records()
    assert [record["scale"] for record in records] == [scaler["init_scale"]] * 3
    assert all(record["flags"] & 1 == 0 for record in records)
    (event,) = second.events("profile", rank=0)
    assert event["applied"]["init_scale"] == scaler["init_scale"] and event["applied"]["clip_norm"] > 0
    assert event["not_applied"] == ["preset headroom: GradScaler has none"]


def test_trainings_that_give_no_baseline_end_with_one_line(tmp_path: Path) -> None:
    training = [running.training("put_back"), "--out", str(tmp_path / "state.json")]
    _, shown, said, status = tune(tmp_path / "a", *training, "--raise-at", "3")
    assert status == 1 and shown == "" and "ValueError: no more data" in said
    assert said.splitlines()[-1].startswith("fp8console: tune: the training ")
    _, shown, said, status = tune(tmp_path / "b", "--steps", "8", *training, "--scaler", "--overflow")
    assert status == 1 and shown == "" and said.splitlines()[-1].startswith("fp8console: tune: 0 usable steps")
    assert "8 skipped" in said.splitlines()[-1]
    assert not (tmp_path / "a" / "config").exists() and not (tmp_path / "b" / "config").exists()
