"""A /sys of garbage, a sampler that prints garbage, a disk that is full: no exception, nothing invented, no orphan."""

from __future__ import annotations

import argparse
import asyncio
import errno
import itertools
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from synthetic_sysfs import BUSY, MI300X, build

from fp8console.cli.arguments import UsageError
from fp8console.cli.options import parse_options
from fp8console.hardware import detect, launcher, sampler
from fp8console.hardware.chain import Chain
from fp8console.hardware.gpu import MEASURED, known
from fp8console.hardware.launcher import Sampler
from fp8console.hardware.sources.sysfs import Sysfs
from fp8console.protocol import hardware
from fp8console.protocol.settings import Settings
from fp8console.supervisor import run_file
from fp8console.supervisor.hardware import HardwareFile
from fp8console.supervisor.main import Supervisor

HUGE = "9" * 4000
GARBAGE = ("", "\n", HUGE, "-" + HUGE, "1e999", "nan", "N/A", "12 34", "0x", "\x1b[31mred\x1b[0m", b"\xff\xfe\x00\x80")


def sweep(root: Path, forced: str | None = "sysfs") -> list[dict[str, Any]]:
    chain = Chain(detect.openers(root, forced), lambda part: None, set(), forced)
    found = chain.sweep(frozenset())
    json.dumps(found, allow_nan=False)
    assert chain.reason(found) is None or "\n" not in str(chain.reason(found))
    chain.close()
    return found


# -- /sys -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("text", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_in_every_file_of_a_card_costs_that_card_alone(tmp_path: Path, text: str | bytes) -> None:
    first, _ = build(tmp_path, MI300X, 2)
    data = text.encode() if isinstance(text, str) else text
    for path in first.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.name not in ("vendor", "dev"):
            path.write_bytes(data)
    for name in ("gpu_id", "properties", "name"):
        (tmp_path / "class/kfd/kfd/topology/nodes/1" / name).write_bytes(data)
    (tmp_path / "class/drm/card0-DP-1/vendor").write_bytes(data)
    one, other = sweep(tmp_path)
    assert {name for name in MEASURED if one[name] is not None} <= {"xcd_busy"}, one
    assert other["busy"] == BUSY + 1 and other["name"] == "MI300X" and other["source"] == "sysfs"
    assert len(one["name"]) <= 100


@pytest.mark.parametrize("text", GARBAGE, ids=range(len(GARBAGE)))
def test_a_vendor_of_garbage_is_no_card(tmp_path: Path, text: str | bytes) -> None:
    first, _ = build(tmp_path, MI300X, 2)
    (first / "vendor").write_bytes(text.encode() if isinstance(text, str) else text)
    assert detect.vendors_of(tmp_path) >= {detect.AMD}
    assert [gpu["bdf"] for gpu in sweep(tmp_path)] == ["0000:23:00.0"]


def test_numbers_beyond_a_double_are_none() -> None:
    assert known(10**400) is None and known(-(10**400)) is None


def test_a_card_that_goes_away_while_it_is_read(tmp_path: Path) -> None:
    first, second = build(tmp_path, MI300X, 2)
    chain = Chain(detect.openers(tmp_path, "sysfs"), lambda part: None, set(), "sysfs")
    assert [gpu["busy"] for gpu in chain.sweep(frozenset())] == [BUSY, BUSY + 1]
    first.rename(tmp_path / "gone")
    gone, there = chain.sweep(frozenset())
    assert gone["busy"] is None and gone["vram_used"] is None and gone["reason"] is not None
    assert there["busy"] == BUSY + 1
    (tmp_path / "gone").rename(first)
    assert chain.sweep(frozenset())[0]["busy"] == BUSY


def test_sensors_that_come_back_under_another_number(tmp_path: Path) -> None:
    """As after the driver was loaded anew: with the next slow reading at the latest."""
    (device,) = build(tmp_path, MI300X, 1)
    source = Sysfs(tmp_path)
    (key,) = (gpu.key for gpu in source.gpus())
    before = source.read(key, True, frozenset()).values
    (folder,) = (device / "hwmon").iterdir()
    (device / "gpu_metrics").unlink()  # which tells power and temperature too
    folder.rename(folder.with_name("hwmon99"))
    assert source.read(key, False, frozenset()).values["power_w"] is None
    after = source.read(key, True, frozenset()).values
    assert after["power_w"] == before["power_w"] and after["temperature_c"] == before["temperature_c"]


def test_cards_that_come_later_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that is loaded while the console is open already."""
    samples: list[dict[str, Any]] = []

    def take(pipe: int, message: dict[str, Any]) -> None:
        if "gpus" in message:
            samples.append(message)
            if len(samples) == 2:
                build(tmp_path / "sys", MI300X, 2)
            if len(samples) == 4:
                raise BrokenPipeError

    monkeypatch.setattr(sampler, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(sampler, "_print", take)
    options = argparse.Namespace(source="sysfs", skip=[], interval=0.0, run_dir=tmp_path, pid=None)
    with pytest.raises(BrokenPipeError):
        sampler._sample_for_ever(1, options, tmp_path / "sys")
    assert samples[1]["source"] == "none" and samples[1]["reason"].startswith("no GPU telemetry")
    assert [gpu["busy"] for gpu in samples[3]["gpus"]] == [BUSY, BUSY + 1]


def test_sixty_four_cards(tmp_path: Path) -> None:
    folder = tmp_path / "class/drm"
    devices = []
    for number in range(64):
        device = tmp_path / "devices" / f"0000:{number:02x}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x1002")
        (device / "gpu_busy_percent").write_text(str(number))
        (folder / f"card{number}").mkdir(parents=True)
        (folder / f"card{number}" / "device").symlink_to(device)
        devices.append(device)
    found = sweep(tmp_path)
    assert [gpu["busy"] for gpu in found] == list(range(64)) and [gpu["index"] for gpu in found] == list(range(64))
    parsed = hardware.parse(hardware.dump({"time": 1.0, "gpus": found, "host": {}}))
    assert parsed is not None and [gpu["busy"] for gpu in parsed["gpus"]] == list(range(64))


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    """A folder in a file's place gives an error as a refusal does, also for root."""
    (device,) = build(tmp_path, MI300X, 1)
    for name in ("gpu_busy_percent", "gpu_metrics", "product_name", "current_compute_partition"):
        (device / name).unlink()
        (device / name).mkdir()
    (gpu,) = sweep(tmp_path)
    assert gpu["busy"] is None and gpu["vram_used"] is not None and gpu["name"] == "MI300X"
    assert "gpu_metrics: Is a directory" in gpu["reason"]


# -- the sampler's output ---------------------------------------------------------------------------------------------
def fake(folder: Path, body: str) -> str:
    """An "interpreter" that prints what it likes in the sampler's place."""
    path = folder / "python"
    path.write_text(f"#!{sys.executable}\nimport json, os, sys, time\nout = sys.stdout.buffer\n{body}\n")
    path.chmod(0o755)
    return str(path)


def run(started: Sampler, samples: list[dict[str, Any]], until: Any, seconds: float = 15) -> None:
    async def go() -> None:
        task = asyncio.ensure_future(started.run())
        deadline = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < deadline, samples[-2:]
            assert not task.done(), task.exception()
            await asyncio.sleep(0.01)
        await started.stop()
        await asyncio.wait_for(task, 5)

    asyncio.run(go())


ODD_LINES = (
    *(b"", b"\xff\xfe\x00", b"[]", b"3", b"null", b'"gpus"', b"{}", b'{"reading": []}', b'{"reading": 5}'),
    *(b'{"gpus": 3}', b'{"time": 1, "gpus": [3, null]}', b'{"time": 1, "gpus": [{"age": "x"}], "host": {}}'),
    *(b'{"time": "now", "gpus": [], "host": {}}', b'{"time": 1, "gpus": [], "host": 3}', b"[" * 5000),
    *(
        b'{"time": 1' + b"0" * 400 + b', "gpus": [], "host": {}}',
        b'{"time": NaN, "gpus": [], "host": {}}',
        b'{"time": 1, "gpus": [{"age": NaN}], "host": {}}',
    ),
    b'{"time": 1, "gpus": [{"processes": 3, "join": 7}], "host": {}}',
)


def test_lines_of_garbage_are_left_out(tmp_path: Path) -> None:
    """And what is whole between them is taken."""
    good = {"time": 5.0, "source": "sysfs", "reason": None, "gpus": [{"index": 0, "busy": 7, "age": 0.0}], "host": {}}
    lines = b"\n".join(ODD_LINES) + b"\n" + json.dumps(good).encode() + b"\n"
    samples: list[dict[str, Any]] = []
    python = fake(tmp_path, f"out.write({lines!r}); out.flush(); time.sleep(60)")
    run(Sampler(tmp_path, samples.append, python=python), samples, lambda: any(one["time"] == 5.0 for one in samples))
    for sample in samples:
        hardware.dump(sample)


def test_garbage_alone_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "START_SILENCE", 0.5)
    monkeypatch.setattr(launcher, "FIRST_BACKOFF", 0.1)
    samples: list[dict[str, Any]] = []
    python = fake(tmp_path, "while True:\n    out.write(b'nonsense\\n'); out.flush(); time.sleep(0.05)")
    run(
        Sampler(tmp_path, samples.append, python=python, interval=0.1),
        samples,
        lambda: {"stalled", "restarting"} <= {one["state"] for one in samples},
    )
    assert "said nothing" in samples[0]["reason"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("out.write(b'x' * (3 << 20)); out.flush(); time.sleep(60)", "a line without an end"),
        ('out.write(b\'{"time": 1, "gp\'); out.flush(); time.sleep(60)', "said nothing"),
        ('out.write(b\'{"time": 1, "gp\'); out.flush(); sys.exit(3)', "exit status 3"),
        ("os.abort()", "exit status -6"),
    ],
)
def test_output_that_breaks_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, words: str) -> None:
    monkeypatch.setattr(launcher, "START_SILENCE", 0.5)
    samples: list[dict[str, Any]] = []
    started = Sampler(tmp_path, samples.append, python=fake(tmp_path, body), interval=0.1)
    run(started, samples, lambda: any(words in str(one["reason"]) for one in samples))
    assert all(one["state"] != "ok" for one in samples)


def test_the_host_s_clock_may_go_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ages and silences are by a clock that does not."""
    hour = itertools.count(10_000, -600)
    monkeypatch.setattr(time, "time", lambda: float(next(hour)))
    build(tmp_path / "sys", MI300X, 1)
    samples: list[dict[str, Any]] = []
    run(
        Sampler(tmp_path, samples.append, sysfs=tmp_path / "sys", source="sysfs", interval=0.1),
        samples,
        lambda: len(samples) >= 4,
    )
    assert all(one["state"] == "ok" and one["gpus"][0]["age"] < 5 and one["silent"] == 0 for one in samples)


# -- the supervisor ---------------------------------------------------------------------------------------------------
ONE = {"time": 1.0, "source": "none", "reason": None, "gpus": [], "host": {}, "state": "ok"}


def read(path: Path) -> list[float]:
    return [sample["time"] for line in path.read_bytes().splitlines() if (sample := hardware.parse(line)) is not None]


def test_a_disk_that_is_full_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that was cut off spoils none of those after it."""
    file = HardwareFile(tmp_path / "hardware.jsonl")
    real = os.write
    room = itertools.chain([200, 5, 0, 0], itertools.repeat(1 << 20))

    def write(fd: int, data: bytes) -> int:
        left = next(room)
        if left == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data[:left])

    monkeypatch.setattr(os, "write", write)
    for second in range(6):
        file.write({**ONE, "time": float(second)})
    monkeypatch.undo()
    file.close()
    assert read(tmp_path / "hardware.jsonl") == [0.0, 4.0, 5.0]


def test_events_go_on_after_the_disk_was_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An alert of the night must not be lost for a minute without room the evening before."""
    run_file.write(tmp_path, run_file.describe("r", "r", ["x"], "/", sys.executable, Settings()))
    supervisor = Supervisor(tmp_path)
    supervisor.event("notice", "first", part="x")

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    supervisor.event("notice", "second", part="x")
    monkeypatch.undo()
    supervisor.event("notice", "third", part="x")
    texts = [json.loads(line)["text"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert texts == ["first", "third"]


def test_a_file_that_can_not_be_made_at_first(tmp_path: Path) -> None:
    file = HardwareFile(tmp_path / "later" / "hardware.jsonl")
    file.write({**ONE, "time": 1.0})
    (tmp_path / "later").mkdir()
    file.write({**ONE, "time": 2.0})
    file.close()
    assert read(tmp_path / "later" / "hardware.jsonl") == [2.0]
    assert stat.S_IMODE((tmp_path / "later" / "hardware.jsonl").stat().st_mode) == 0o600


def test_a_killed_supervisor_leaves_no_sampler(tmp_path: Path) -> None:
    """Not even one that stands still in a read."""
    (device,) = build(tmp_path / "sys", MI300X, 1)
    code = (
        "import asyncio, sys\nfrom pathlib import Path\nfrom fp8console.hardware.launcher import Sampler\n"
        "sampler = Sampler(Path(sys.argv[1]), lambda sample: print(sampler._process.pid, flush=True),"
        " sysfs=Path(sys.argv[1], 'sys'), source='sysfs', interval=0.1)\nasyncio.run(sampler.run())"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        (device / "gpu_busy_percent").unlink()
        os.mkfifo(device / "gpu_busy_percent")
        time.sleep(0.3)
        supervisor.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 5
    while _runs(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def test_the_source_that_a_user_forces_is_the_samplers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = parse_options(["--gpu-source", "rocm-smi"], "script").settings
    run_file.write(tmp_path, run_file.describe("r", "r", ["x"], "/", sys.executable, settings))
    given: dict[str, Any] = {}

    class Noted:
        def __init__(self, *arguments: Any, **named: Any) -> None:
            given.update(named)

        async def run(self) -> None:
            raise RuntimeError("odd")

    monkeypatch.setattr(launcher, "Sampler", Noted)
    supervisor = Supervisor(tmp_path)
    asyncio.run(supervisor._sample())
    assert given["source"] == "rocm-smi"
    # And what ends the sampling is an event, not silence.
    assert "hardware samples have ended: RuntimeError: odd" in (tmp_path / "events.jsonl").read_text()
    with pytest.raises(UsageError, match="amdsmi, sysfs, amd-smi, rocm-smi"):
        parse_options(["--gpu-source", "nvtop"], "script")
