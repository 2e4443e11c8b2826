"""The sampler as a process, and the launcher that replaces it when a read never returns."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_library import describe, mi300x
from synthetic_sysfs import BUSY, MI300X, build, change, never_answer

from fp8console.hardware import launcher
from fp8console.hardware.joins import RankDevice
from fp8console.hardware.launcher import Sampler
from fp8console.protocol.identity import identify, is_alive

NO_LIBRARY = "amdsmi: ROCm's library libamd_smi.so was not found"
REPOSITORY = Path(__file__).resolve().parents[2]


def given(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def start_sampler(run_dir: Path, *arguments: str) -> subprocess.Popen[bytes]:
    rest = os.environ.get("PYTHONPATH", "")
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{rest}".rstrip(os.pathsep)}
    command = [sys.executable, "-m", "fp8console.hardware.sampler", "--run-dir", str(run_dir), *arguments]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )


def samples_of(process: subprocess.Popen[bytes], count: int) -> list[dict[str, Any]]:
    assert process.stdout is not None
    found: list[dict[str, Any]] = []
    while len(found) < count:
        line = process.stdout.readline()
        assert line, "the sampler ended"
        message = json.loads(line)
        if "reading" not in message:
            found.append(message)
    return found


def collect(
    sampler: Sampler, samples: list[dict[str, Any]], until: Callable[[], bool], seconds: float, meanwhile: Any = None
) -> None:
    """Run a sampler until the samples are as wished for; fails after ``seconds``."""

    async def go() -> None:
        task = asyncio.ensure_future(sampler.run())
        deadline = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < deadline, samples[-3:]
            assert not task.done()
            if meanwhile is not None:
                meanwhile()
            await asyncio.sleep(0.02)
        await sampler.stop()
        await asyncio.wait_for(task, 5)

    asyncio.run(go())


def test_prints_samples_of_cards_and_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, describe("amdsmi", [], missing=True))
    build(tmp_path / "sys", MI300X, 8)
    process = start_sampler(tmp_path, "--sysfs", str(tmp_path / "sys"), "--interval", "0.2", "--pid", str(os.getpid()))
    try:
        first, second, third = samples_of(process, 3)
    finally:
        process.kill()
        process.communicate()
    assert first["source"] == "sysfs" and first["reason"] == NO_LIBRARY
    assert [gpu["busy"] for gpu in third["gpus"]] == [BUSY + index for index in range(8)]
    host = third["host"]
    assert 0 <= host["cpu_percent"] <= 100
    assert 0 < host["memory_used"] < host["memory_total"]
    assert 0 < host["run_dir_free"] <= host["run_dir_total"]
    assert host["process_rss"] > 1 << 20 and host["process_cpu_percent"] >= 0
    # What is a difference has no value yet in the first sample, and that is not 0.
    assert first["host"]["cpu_percent"] is None and first["host"]["process_cpu_percent"] is None
    assert 0.1 < second["time"] - first["time"] < 2


def test_without_cards_says_why(tmp_path: Path) -> None:
    process = start_sampler(tmp_path, "--sysfs", str(tmp_path), "--interval", "0.1")
    try:
        (sample,) = samples_of(process, 1)
    finally:
        process.kill()
        process.communicate()
    assert sample["source"] == "none" and sample["gpus"] == []
    assert sample["reason"] == f"no GPU telemetry: no AMD or NVIDIA GPU in {tmp_path}/class/drm"
    assert sample["host"]["process_rss"] is None


def test_without_psutil_the_host_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8console.hardware.sources.host import Host

    monkeypatch.setitem(sys.modules, "psutil", None)
    sample = Host(tmp_path, os.getpid()).read()
    assert sample.pop("run_dir_free") > 0 and sample.pop("run_dir_total") > 0 and sample.pop("load_1m") >= 0
    assert sample and all(value is None for value in sample.values())


def test_a_process_that_ended_has_no_figures(tmp_path: Path) -> None:
    from fp8console.hardware.sources.host import Host

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        host = Host(tmp_path, child.pid)
        assert host.read()["process_rss"] > 0
    sample = host.read()
    assert sample["process_rss"] is None and sample["process_cpu_percent"] is None
    assert sample["memory_used"] > 0


@pytest.mark.parametrize("stuck", [False, True], ids=["sampling", "stuck"])
def test_ends_with_its_stdin(tmp_path: Path, stuck: bool) -> None:
    (device,) = build(tmp_path / "sys", MI300X, 1)
    if stuck:
        never_answer(device / "gpu_busy_percent")
    process = start_sampler(tmp_path, "--sysfs", str(tmp_path / "sys"), "--interval", "0.1")
    assert process.stdin is not None and process.stdout is not None
    process.stdout.readline()
    process.stdin.close()
    assert process.wait(5) == 0
    process.stdout.close()
    assert process.stderr is not None and process.stderr.read() == b""
    process.stderr.close()


def test_ends_when_its_reader_is_gone(tmp_path: Path) -> None:
    process = start_sampler(tmp_path, "--sysfs", str(tmp_path), "--interval", "0.05")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(5) == 0
    process.communicate()


def test_launcher_passes_samples_on_and_stops(tmp_path: Path) -> None:
    first, second = build(tmp_path / "sys", MI300X, 2)
    samples: list[dict[str, Any]] = []
    sampler = Sampler(tmp_path, samples.append, sysfs=tmp_path / "sys", pid=os.getpid(), interval=0.05)

    def change_value() -> None:
        change(first / "gpu_busy_percent", min(99, len(samples)))

    collect(sampler, samples, lambda: bool(samples) and samples[-1]["gpus"][0]["busy"] == 12, 20, change_value)
    assert {sample["state"] for sample in samples} == {"ok"}
    assert samples[-1]["gpus"][1]["busy"] == BUSY + 1
    assert samples[-1]["host"]["process_rss"] > 0
    assert sampler._process is not None and not is_alive(identify(sampler._process.pid))


def test_a_read_that_never_returns_costs_a_sampler_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "SILENCE", 0.5)
    monkeypatch.setattr(launcher, "FIRST_BACKOFF", 0.4)
    first, second = build(tmp_path / "sys", MI300X, 2)
    samples: list[dict[str, Any]] = []
    pids: list[int] = []
    sampler = Sampler(tmp_path, samples.append, sysfs=tmp_path / "sys", interval=0.1)

    def hang_the_second_card() -> None:
        if sampler._process is not None and sampler._process.pid not in pids:
            pids.append(sampler._process.pid)
        if len(samples) == 3 and not (second / "gpu_busy_percent").is_fifo():
            never_answer(second / "gpu_busy_percent")

    def recovered() -> bool:
        states = [sample["state"] for sample in samples]
        return "restarting" in states and states[-5:] == ["ok"] * 5

    collect(sampler, samples, recovered, 30, hang_the_second_card)
    states = [sample["state"] for sample in samples]
    assert states.index("stalled") < states.index("restarting")
    stalled = samples[states.index("stalled")]
    assert stalled["reason"] == f"reading sysfs {second.name} has not returned for 0.6 s"
    # Nothing measured is shown of any card, and for how long; who they are stays.
    assert stalled["silent"] >= 0.5 and [gpu["name"] for gpu in stalled["gpus"]] == ["MI300X", "MI300X"]
    assert [gpu["busy"] for gpu in stalled["gpus"]] == [None, None]
    assert all(gpu["age"] >= 0.5 for gpu in stalled["gpus"])
    assert all(value is None for value in stalled["host"].values())
    # The first card comes back; the one that hung stays unknown, and older by the sample.
    last = samples[-1]
    assert last["silent"] == 0.0
    assert last["gpus"][0]["busy"] == BUSY and last["gpus"][0]["age"] == 0
    assert last["gpus"][1]["busy"] is None and last["gpus"][1]["age"] > stalled["gpus"][1]["age"]
    assert "did not answer" in last["reason"]
    assert len(pids) == 2
    assert not any(is_alive(identify(pid)) for pid in pids)


def test_a_sampler_that_is_killed_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "FIRST_BACKOFF", 0.1)
    samples: list[dict[str, Any]] = []
    sampler = Sampler(tmp_path, samples.append, sysfs=tmp_path, interval=0.1)
    killed: list[int] = []

    def kill_once() -> None:
        if len(samples) == 2 and not killed:
            assert sampler._process is not None
            killed.append(sampler._process.pid)
            os.kill(sampler._process.pid, signal.SIGKILL)

    def recovered() -> bool:
        return bool(killed) and [sample["state"] for sample in samples[-2:]] == ["ok", "ok"] and len(samples) > 4

    collect(sampler, samples, recovered, 30, kill_once)
    reasons = [sample["reason"] for sample in samples if sample["state"] == "restarting"]
    assert reasons and reasons[0] == "the sampler ended with exit status -9"


def test_an_interpreter_that_is_none_is_told_and_nothing_is_raised(tmp_path: Path) -> None:
    samples: list[dict[str, Any]] = []
    sampler = Sampler(tmp_path, samples.append, python=str(tmp_path / "no-python"), interval=0.1)
    collect(sampler, samples, lambda: len(samples) >= 2, 10)
    assert samples[0]["state"] == "restarting"
    assert samples[0]["reason"] == "the sampler could not be started: No such file or directory"
    assert samples[0]["silent"] is None and samples[0]["gpus"] == []


def test_the_real_package_in_the_samplers_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of amdsmi, whatever the library prints; HIP counts this node's cards from the other end."""
    build(tmp_path / "sys", MI300X, 2)
    given(monkeypatch, describe("amdsmi", [mi300x(0), mi300x(1)], prints=True))
    samples: list[dict[str, Any]] = []
    environment = {"ROCR_VISIBLE_DEVICES": "7,6", "HIP_VISIBLE_DEVICES": "1"}
    ranks: dict[int, RankDevice] = {}
    sampler = Sampler(
        tmp_path, samples.append, sysfs=tmp_path / "sys", interval=0.05, environment=environment, ranks=ranks
    )

    def a_rank_joins() -> None:
        if len(samples) == 2:
            ranks[0] = RankDevice(0, "abc0000000000001")

    collect(sampler, samples, lambda: len(samples) > 4, 20, a_rank_joins)
    assert {(sample["source"], sample["reason"], sample["state"]) for sample in samples} == {("amdsmi", None, "ok")}
    first, last = samples[0]["gpus"], samples[-1]["gpus"]
    assert [gpu["power_w"] for gpu in first] == [612.0, 613.0]
    # HIP's device 6 is the second card, and the only one that is not hidden.
    assert [(gpu["torch_index"], gpu["used"]) for gpu in first] == [(None, None), (0, None)]
    assert [(gpu["torch_index"], gpu["used"]) for gpu in last] == [(None, False), (0, True)]
    assert all("join" not in gpu for sample in samples for gpu in sample["gpus"])


def test_a_library_call_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler is killed; the next one reads that card from sysfs, and the other still through the library."""
    monkeypatch.setattr(launcher, "SILENCE", 0.5)
    monkeypatch.setattr(launcher, "FIRST_BACKOFF", 0.1)
    build(tmp_path / "sys", MI300X, 2)
    library = describe("amdsmi", [mi300x(0), mi300x(1)], delays={"amdsmi_get_gpu_metrics_info": {"1": 60}})
    given(monkeypatch, library)
    samples: list[dict[str, Any]] = []
    sampler = Sampler(tmp_path, samples.append, sysfs=tmp_path / "sys", interval=0.1)
    hung = "reading amdsmi 0000:23:00.0 has not returned for 0.6 s"

    def recovered() -> bool:
        return len(samples) > 2 and samples[-1]["state"] == "ok"

    collect(sampler, samples, recovered, 30)
    assert samples[0]["state"] == "stalled" and samples[0]["reason"] == hung
    last = samples[-1]
    assert [gpu["source"] for gpu in last["gpus"]] == ["amdsmi", "sysfs"]
    assert last["source"] == "amdsmi"
    assert last["reason"] == "GPU 1: amdsmi did not answer and is left out for now"


def test_a_library_may_take_longer_to_load_than_to_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "SILENCE", 0.3)
    given(monkeypatch, describe("amdsmi", [mi300x(0)], delays={"amdsmi_init": 1.0}))
    (tmp_path / "sys" / "module" / "amdgpu").mkdir(parents=True)
    samples: list[dict[str, Any]] = []
    sampler = Sampler(tmp_path, samples.append, sysfs=tmp_path / "sys", interval=0.1)
    collect(sampler, samples, lambda: len(samples) >= 2, 20)
    assert {(sample["state"], sample["source"]) for sample in samples} == {("ok", "amdsmi")}


def test_a_slow_library_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer in time, though all of them take longer than a sampler may be silent."""
    monkeypatch.setattr(launcher, "SILENCE", 0.5)
    delays = {"amdsmi_get_gpu_metrics_info": 0.3}
    given(monkeypatch, describe("amdsmi", [mi300x(index) for index in range(4)], delays=delays))
    (tmp_path / "sys" / "module" / "amdgpu").mkdir(parents=True)
    samples: list[dict[str, Any]] = []
    sampler = Sampler(tmp_path, samples.append, sysfs=tmp_path / "sys", interval=0.1)
    collect(sampler, samples, lambda: len(samples) >= 2, 20)
    assert {sample["state"] for sample in samples} == {"ok"}
    # The values are as old as the sweep was long.
    assert all(gpu["busy"] is not None and 1.0 < gpu["age"] < 5 for gpu in samples[-1]["gpus"])


def test_a_user_forces_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, describe("nvml", [], missing=True))
    build(tmp_path / "sys", MI300X, 1)
    found = []
    for source in ("sysfs", "nvml"):
        samples: list[dict[str, Any]] = []
        sampler = Sampler(tmp_path, samples.append, sysfs=tmp_path / "sys", interval=0.1, source=source)
        collect(sampler, samples, lambda samples=samples: len(samples) >= 1, 20)
        found.append((samples[0]["source"], samples[0]["reason"]))
    assert found == [("sysfs", None), ("none", "no GPU telemetry: nvml: NVML Shared Library Not Found")]


def test_a_commands_process_ends_with_the_sampler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """rocm-smi stuck under its mutex would hold up others for ever."""
    (tmp_path / "rocm-smi").write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    (tmp_path / "rocm-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sampler = Sampler(tmp_path, lambda sample: None, sysfs=tmp_path, interval=0.1, source="rocm-smi")
    pid = tmp_path / "pid"
    collect(sampler, [], lambda: pid.exists() and pid.read_text().strip() != "", 20)
    who = int(pid.read_text())
    deadline = time.monotonic() + 5
    while Path(f"/proc/{who}").exists() and "State:\tZ" not in Path(f"/proc/{who}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_launcher_needs_only_the_standard_library() -> None:
    code = (
        "import sys, fp8console.hardware.launcher\n"
        "found = {'psutil', 'numpy', 'torch', 'textual'} & {name.split('.')[0] for name in sys.modules}\n"
        "assert not found, found"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
