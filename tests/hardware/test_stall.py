"""A metrics file that never answers, under a real training: everything goes on, and the record says for how long."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_library import describe
from synthetic_sysfs import BUSY, MI300X, build, change, metrics, never_answer

from fp8console.hardware.sources.sysfs import Sysfs
from fp8console.protocol import identity, paths
from fp8console.runs.reader import HardwareLog

ROOT = Path(__file__).resolve().parents[2]
TRAINING = ROOT / "tests" / "trainings" / "drifting.py"
SECONDS = 60


class Launched:
    """A detached training whose sampler reads a folder of ours."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "run"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("FP8CONSOLE_")}
        library = describe("amdsmi", [], missing=True)
        self.environment = {
            **inherited,
            **library,
            "PYTHONPATH": os.pathsep.join([str(ROOT), library["PYTHONPATH"]]),
            "XDG_STATE_HOME": str(folder / "state"),
            "XDG_CONFIG_HOME": str(folder / "config"),
            "SYSFS_PATH": str(folder / "sys"),
            "OMP_NUM_THREADS": "1",
        }
        self.log = HardwareLog(self.run_dir)
        self.call("--detach", "--run-dir", str(self.run_dir), str(TRAINING), "--steps", "100000000")

    def call(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "fp8console", *words],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def samples(self) -> list[dict[str, Any]]:
        self.log.refresh()
        return list(self.log.history)

    def wait(self, condition: Any) -> dict[str, Any]:
        """The first sample for which the condition holds."""
        deadline = time.monotonic() + SECONDS
        while True:
            for sample in self.samples():
                if condition(sample):
                    return sample
            assert time.monotonic() < deadline, self.samples()[-2:]
            time.sleep(0.05)

    def end(self) -> None:
        info = json.loads((self.run_dir / paths.RUN).read_text())
        for name, group in (("training", True), ("supervisor", False)):
            who = identity.ProcessIdentity.from_json(info.get(name))
            if who is not None:
                identity.send_signal(who, signal.SIGKILL, group=group)
        for left in (paths.socket_path(self.run_dir), paths.spool_file(self.run_dir, 0)):
            left.unlink(missing_ok=True)


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    build(tmp_path / "sys", MI300X, 2)
    run = Launched(tmp_path)
    yield run
    run.end()


def test_a_file_that_never_answers(tmp_path: Path, launched: Launched) -> None:
    second = Sysfs(tmp_path / "sys")
    first_card, stuck_card = (tmp_path / "sys" / "bus" / "pci" / "devices" / gpu.key for gpu in second.gpus())
    good = launched.wait(lambda sample: sample["state"] == "ok" and len(sample["gpus"]) == 2)
    assert [gpu["busy"] for gpu in good["gpus"]] == [BUSY, BUSY + 1]
    assert good["gpus"][0]["xcd_busy"] == [BUSY - xcd for xcd in range(8)]
    step = json.loads(launched.call("status", str(launched.run_dir), "--json"))["step"] or 0

    never_answer(stuck_card.resolve() / "gpu_metrics")
    stalled = launched.wait(lambda sample: sample["state"] == "stalled")
    assert stalled["reason"] == f"reading sysfs {stuck_card.name} has not returned for 3 s"
    assert stalled["silent"] >= 2 and all(gpu["busy"] is None and gpu["age"] >= 2 for gpu in stalled["gpus"])
    # Training, supervisor and readers go on meanwhile.
    held = launched.call("ctl", str(launched.run_dir), "pause")
    assert "applied" in held
    launched.call("ctl", str(launched.run_dir), "resume")
    assert json.loads(launched.call("status", str(launched.run_dir), "--json"))["step"] > step

    # Another sampler has taken its place: one card as before, the other as old as its last answer.
    known = len(launched.samples())
    again = launched.wait(lambda sample: sample["state"] == "ok" and sample["time"] > stalled["time"])
    assert known and again["gpus"][0]["busy"] == BUSY and again["gpus"][1]["busy"] is None
    assert again["gpus"][1]["age"] > stalled["gpus"][1]["age"]
    older = launched.wait(lambda sample: sample["time"] > again["time"] + 1.5)
    assert older["gpus"][1]["age"] > again["gpus"][1]["age"] + 1
    assert older["gpus"][1]["reason"] == (
        "amdsmi: ROCm's library libamd_smi.so was not found; sysfs did not answer and is left out for now"
    )
    # A line a second, whatever the sampler did.
    times = [sample["time"] for sample in launched.samples()]
    assert max(after - before for before, after in zip(times, times[1:])) < 6

    # A second reader works once the file answers again.
    change(stuck_card.resolve() / "gpu_metrics", metrics(MI300X, 1))
    reading = second.read(stuck_card.name, False, frozenset())
    assert reading.values["busy"] == BUSY + 1 and reading.note is None
    assert first_card.exists()
