"""amd-smi's and rocm-smi's JSON: the real rocm-smi of this machine over a synthetic /sys, and others' output."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from synthetic_sysfs import BUSY, MI210, build, change, hwmon, metrics, never_answer, over_sys

from fp8console.hardware.gpu import Unavailable
from fp8console.hardware.sources import smi_command
from fp8console.hardware.sources.smi_command import SmiCommand, cards, values_of

REPOSITORY = Path(__file__).resolve().parents[2]
NOBODY: frozenset[int] = frozenset()
#: Both sources' values of every card, as one JSON line for each line on stdin.
BOTH = """
import json, pathlib, sys
from fp8console.hardware.sources.smi_command import SmiCommand
from fp8console.hardware.sources.sysfs import Sysfs
for line in sys.stdin:
    found = {}
    for source in (SmiCommand("rocm-smi"), Sysfs(pathlib.Path("/sys"))):
        found[source.name] = [
            {"bdf": gpu.bdf, "uuid": gpu.uuid, **source.read(gpu.key, False, frozenset()).values}
            for gpu in source.gpus()
        ]
    print(json.dumps(found), flush=True)
"""
COMPARED = (
    *("bdf", "uuid", "busy", "memory_busy", "vram_used", "vram_total", "power_w", "power_cap_w"),
    *("temperature_c", "memory_temperature_c", "clock_mhz", "memory_clock_mhz"),
)

needs_rocm_smi = pytest.mark.skipif(shutil.which("rocm-smi") is None, reason="ROCm's rocm-smi is not installed here")


@needs_rocm_smi
@pytest.mark.parametrize("count", [1, 2, 8])
def test_rocms_own_command_and_our_reader_see_the_same(tmp_path: Path, count: int) -> None:
    """ROCm's real rocm-smi and library read the MI210s of a synthetic /sys, while values change."""
    devices = build(tmp_path, MI210, count)
    process = over_sys(
        tmp_path, [sys.executable, "-c", BOTH], env={"PYTHONPATH": str(REPOSITORY)}, stdin=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    seen = []
    for busy, watts in ((BUSY, 310), (7, 120)):
        change(devices[-1] / "gpu_busy_percent", busy)
        change(devices[-1] / "mem_info_vram_used", busy << 28)
        change(hwmon(devices[-1]) / "power1_average", watts * 10**6)
        change(hwmon(devices[-1]) / "temp2_input", (watts // 10 + 30) * 1000)
        process.stdin.write("again\n")
        process.stdin.flush()
        line = process.stdout.readline()
        assert line, process.stderr and process.stderr.read()
        found = json.loads(line)
        theirs = [{name: card[name] for name in COMPARED} for card in found["rocm-smi"]]
        ours = [{name: card[name] for name in COMPARED} for card in found["sysfs"]]
        assert ours == theirs
        assert len(ours) == count
        seen.append(ours[-1])
    process.communicate()
    assert process.returncode == 0
    assert [(card["busy"], card["power_w"], card["temperature_c"]) for card in seen] == [(73, 310, 61), (7, 120, 42)]
    assert seen[0]["vram_used"] == BUSY << 28


@needs_rocm_smi
def test_a_killed_reader_of_rocms_library_does_not_hold_up_the_next_one(tmp_path: Path) -> None:
    """ROCm-SMI locks a mutex in shared memory; a reader stuck under it has to be killed, and another one works."""
    (device,) = build(tmp_path, MI210, 1)
    never_answer(device / "gpu_metrics")
    stuck = over_sys(tmp_path, ["rocm-smi", "--showuse", "--json"])
    time.sleep(1.0)
    assert stuck.poll() is None
    stuck.kill()
    stuck.communicate()
    change(device / "gpu_metrics", metrics(MI210, 0))
    change(device / "gpu_busy_percent", 33)
    output, _ = over_sys(tmp_path, ["rocm-smi", "--showuse", "--json"]).communicate(timeout=20)
    assert values_of(cards(output)["card0"])["busy"] == 33


def amd_smi_metric(**changes: Any) -> list[dict[str, Any]]:
    """As amd-smi 6 and 7 print it, in part."""
    card = {
        "gpu": 0,
        "usage": {"gfx_activity": {"value": 97, "unit": "%"}, "umc_activity": {"value": 43, "unit": "%"}},
        "power": {"socket_power": {"value": 741, "unit": "W"}, "gfx_voltage": "N/A"},
        "clock": {"gfx_0": {"clk": {"value": 2100, "unit": "MHz"}}, "mem_0": {"clk": {"value": 1300, "unit": "MHz"}}},
        "temperature": {"edge": "N/A", "hotspot": {"value": 91, "unit": "C"}, "mem": {"value": 72, "unit": "C"}},
        "mem_usage": {
            "total_vram": {"value": 196592, "unit": "MB"},
            "used_vram": {"value": 65531, "unit": "MB"},
        },
    }
    return [{**card, **changes}]


MI300X_VALUES = {
    "busy": 97,
    "memory_busy": 43,
    "power_w": 741.0,
    "power_cap_w": None,
    "temperature_c": 91.0,
    "memory_temperature_c": 72.0,
    "vram_total": 196592 << 20,
    "vram_used": 65531 << 20,
    "clock_mhz": 2100,
    "memory_clock_mhz": 1300,
}


@pytest.mark.parametrize("wrapped", [False, True], ids=["6", "7"])
def test_amd_smis_output(wrapped: bool) -> None:
    data: Any = {"gpu_data": amd_smi_metric()} if wrapped else amd_smi_metric()
    assert values_of(cards(json.dumps(data))["0"]) == MI300X_VALUES


def test_newer_names_of_rocm_smi() -> None:
    text = json.dumps(
        {
            "card0": {
                "Current Socket Graphics Package Power (W)": "741.0",
                "Temperature (Sensor junction) (C)": "91.0",
                "GPU use (%)": "97",
                "GPU Memory Allocated (VRAM%)": "10",
                "GPU Memory Read/Write Activity (%)": "43",
            },
            "system": {"Driver version": "6.8.5"},
        }
    )
    values = values_of(cards(text)["card0"])
    assert list(cards(text)) == ["card0"]
    assert (values["power_w"], values["busy"], values["memory_busy"]) == (741.0, 97, 43)


@pytest.mark.parametrize("value", ["N/A", "", "101", 65535, 4294967295, None, {"value": "N/A", "unit": "%"}, "-1"])
def test_what_is_no_percentage_is_unknown(value: Any) -> None:
    assert values_of(cards(json.dumps(amd_smi_metric(usage={"gfx_activity": value})))["0"])["busy"] is None
    assert values_of(cards(json.dumps({"card0": {"GPU use (%)": value, "x": 1}}))["card0"])["busy"] is None


@pytest.mark.parametrize(
    "text", ["", "WARNING: no driver\n", "{}", "[]", "{oops", "null", '{"system": {"a": 1}}', "[[1]]"]
)
def test_output_without_a_gpu(text: str) -> None:
    assert cards(text) == {}


def test_warnings_before_the_json_do_not_matter() -> None:
    text = "WARNING: low power state\n{not json\n" + json.dumps({"card0": {"GPU use (%)": "5"}}) + "\nDone\n"
    assert values_of(cards(text)["card0"])["busy"] == 5


def command(folder: Path, name: str, body: str) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_an_answer_stands_until_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smi_command, "SECONDS_BETWEEN", 0.2)
    (tmp_path / "out").write_text(json.dumps({"card0": {"GPU use (%)": "5", "PCI Bus": "0000:03:00.0"}}))
    # Its exit status says nothing: 2 with a complete table.
    source = SmiCommand("rocm-smi", command(tmp_path, "rocm-smi", f"cat {tmp_path}/out; exit 2"))
    (gpu,) = source.gpus()
    assert gpu.bdf == "0000:03:00.0"
    first = source.read("card0", False, NOBODY)
    assert first.values["busy"] == 5 and first.age < 5
    (tmp_path / "out").write_text(json.dumps({"card0": {"GPU use (%)": "6"}}))
    deadline = time.monotonic() + 10
    while source.read("card0", False, NOBODY).values["busy"] == 5:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    # One that hangs is killed, and in the end its last answer is too old.
    monkeypatch.setattr(smi_command, "PATIENCE", 0.3)
    command(tmp_path, "rocm-smi", "exec sleep 60")
    with pytest.raises(Unavailable, match=r"^rocm-smi: no answer in 0.3 s$"):
        while True:
            assert time.monotonic() < deadline + 10
            source.read("card0", False, NOBODY)
            time.sleep(0.05)
    source.close()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("exit 0", "its answer holds no GPU (exit status 0)"),
        ("echo 'ERROR: no driver'; exit 1", "its answer holds no GPU (exit status 1)"),
        ("exec sleep 60", "no answer in 0.3 s"),
    ],
)
def test_why_it_can_not_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, reason: str) -> None:
    monkeypatch.setattr(smi_command, "PATIENCE", 0.3)
    with pytest.raises(Unavailable) as failure:
        SmiCommand("rocm-smi", command(tmp_path, "rocm-smi", body))
    assert str(failure.value) == f"rocm-smi: {reason}"


def test_no_such_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match=r"^amd-smi: no such command$"):
        SmiCommand("amd-smi")


def test_amd_smis_addresses_come_from_its_list(tmp_path: Path) -> None:
    (tmp_path / "metric").write_text(json.dumps({"gpu_data": amd_smi_metric() + amd_smi_metric(gpu=1)}))
    (tmp_path / "list").write_text(json.dumps([{"gpu": 1, "bdf": "0000:25:00.0"}, {"gpu": 0, "bdf": "0000:05:00.0"}]))
    source = SmiCommand("amd-smi", command(tmp_path, "amd-smi", f"cat {tmp_path}/$1"))
    assert [(gpu.key, gpu.bdf) for gpu in source.gpus()] == [("0", "0000:05:00.0"), ("1", "0000:25:00.0")]
    assert source.read("1", False, NOBODY).values == MI300X_VALUES
