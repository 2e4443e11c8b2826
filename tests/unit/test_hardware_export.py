"""Exported hardware samples: every card a row, unknown empty, and what follows from samples and steps together."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from fp8console.cli import export as command
from fp8console.protocol import paths, records
from fp8console.runs.hardware_export import GPU_FIELDS, HOST_FIELDS, SAMPLE_FIELDS, hardware_lines


def gpu(index: int, **values: Any) -> dict[str, Any]:
    return {"index": index, "bdf": f"0000:0{index}:00.0", "age": 0.1, **values}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Twelve samples of two cards at 80 and 40%, then one without cards, among steps that wait for data at first."""
    about = {"throttle": {"power": 0.5, "thermal": None, "hbm": 0.0}, "xcd_busy": [81, None, 79.5], "used": True}
    about |= {"partition": {"compute": "SPX", "memory": "NPS1"}, "processes": [{"pid": 1, "vram": 2}]}
    samples = [
        {"time": 100.0 + second, "source": "amdsmi", "state": "ok", "reason": None, "silent": 0.2,
         "gpus": [gpu(0, busy=80, **about), gpu(1, busy=40, used=True)], "host": {"cpu_percent": 21.5}}
        for second in range(12)
    ]  # fmt: skip
    lines = [json.dumps(sample) for sample in samples] + ["torn", '{"time": 200.0, "source": "none"}', '{"time"']
    (tmp_path / paths.HARDWARE).write_text("\n".join(lines))
    steps = [{"step": i, "time": 95.0 + i, "duration": 1.0, "data_wait": 0.5 if i < 10 else 0.1} for i in range(20)]
    path = paths.steps_file(tmp_path, 0)
    path.write_bytes(records.header() + b"".join(records.pack_step(step, 0) for step in steps))
    return tmp_path


def test_csv_has_a_row_for_each_card(run_dir: Path) -> None:
    rows = list(csv.DictReader("".join(hardware_lines(run_dir, "csv")).splitlines()))
    assert len(rows) == 12 * 2 + 1
    prefixes = (("", SAMPLE_FIELDS), ("gpu_", GPU_FIELDS), ("host_", HOST_FIELDS))
    assert list(rows[0]) == [prefix + name for prefix, names in prefixes for name in names]
    first, second = rows[22:24]  # of the twelfth sample
    assert (first["time"], first["gpu_index"], second["gpu_index"]) == ("111.0", "0", "1")
    assert first["gpu_xcd_busy"] == "81  79.5" and first["gpu_processes"] == "1" and first["gpu_used"] == "1"
    assert (first["gpu_throttle_power"], first["gpu_throttle_thermal"]) == ("0.5", "")
    assert (first["gpu_partition_compute"], second["gpu_partition_compute"]) == ("SPX", "")
    assert first["host_cpu_percent"] == second["host_cpu_percent"] == "21.5"
    assert first["balance"] == "0.5"
    # The steps that ended after 101 and until 111: numbers 7 to 16, three with half a second and seven with a tenth.
    assert float(first["data_wait_share"]) == pytest.approx((3 * 0.5 + 7 * 0.1) / 10)
    assert first["bounds"] == "data wait;throttling;imbalance"
    last = rows[-1]
    assert last["source"] == "none" and {value for key, value in last.items() if key not in ("time", "source")} == {""}


def test_json_lines_are_the_samples_and_what_follows(run_dir: Path) -> None:
    found = [json.loads(line, parse_constant=pytest.fail) for line in hardware_lines(run_dir, "jsonl")]
    assert len(found) == 13
    assert found[0]["balance"] is None and found[0]["bounds"][0]["what"] == "data wait", "no ten seconds of cards yet"
    assert found[11]["gpus"][0]["throttle"] == {"power": 0.5, "thermal": None, "hbm": 0.0}
    assert [bound["what"] for bound in found[11]["bounds"]] == ["data wait", "throttling", "imbalance"]
    assert found[12]["bounds"] is None and found[12]["data_wait_share"] is None


def test_without_steps_and_without_samples(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths.steps_file(run_dir, 0).unlink()
    (run_dir / paths.RUN).write_text("{}")
    assert command.main([str(run_dir), "--hardware", "--format", "jsonl"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 13 and json.loads(lines[11])["data_wait_share"] is None
    (run_dir / paths.HARDWARE).unlink()
    with pytest.raises(command.CommandFailed, match="no hardware samples"):
        command.main([str(run_dir), "--hardware"])
