"""The real libraries with tiny random models: same parameters, one record a step, and a rollback that verifies."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import running

CASES = {
    "hf_trainer": ("transformers", (), {"micro_batches": 2, "clipped": True}),
    "accelerated": ("accelerate", (), {"micro_batches": 2, "clipped": True}),
    "lightning_automatic": ("lightning", ("--manual", "0"), {"micro_batches": 1, "clipped": True}),
    "lightning_manual": ("lightning", ("--manual", "1"), {"micro_batches": 1, "clipped": False}),
}


def script(case: str) -> str:
    return running.training("lightning_loops" if case.startswith("lightning") else case)


@pytest.mark.parametrize("case", CASES)
def test_framework(case: str, tmp_path: Path, started: list[running.Run]) -> None:
    library, words, wanted = CASES[case]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install -c constraints.txt '.[frameworks]'")
    plain = running.plain(tmp_path / "plain", script(case), *words, "--out", str(tmp_path / "plain.json"))
    assert plain.returncode == 0, plain.stderr
    run = running.run(tmp_path / "console", script(case), *words, "--out", str(tmp_path / "console.json"))
    assert run.result is not None and run.result.returncode == 0, run.result
    assert (tmp_path / "plain.json").read_text() == (tmp_path / "console.json").read_text()

    records = run.records()
    assert [record["step"] for record in records] == list(range(1, 11))
    assert all(record["loss"] is not None and record["grad_norm"] > 0 and record["lr"] > 0 for record in records)
    assert {record["micro_batches"] for record in records} == {wanted["micro_batches"]}
    assert any(record["flags"] & (1 << 3) for record in records) == wanted["clipped"]
    assert all(record["scale"] is None for record in records)
    assert run.events("fault", rank=0) == []

    folder = tmp_path / "steered"
    steered = running.start(folder, script(case), *words, "--steps", "3000", "--out", str(folder / "out.json"))
    started.append(steered)
    steered.wait_for_step(3, timeout=120)
    steered.ctl("pause")
    point = steered.status()["restore_points"][0]["step"]
    assert steered.ctl("rollback", str(point))["detail"]["digests_equal"] is True
    steered.ctl("resume")
    steered.ctl("stop")
    assert steered.wait_for_end(60) == 0
    assert json.dumps(steered.status()["restore_points"])
