"""The script's own API: nothing outside the console; inside it, boundaries, registered state and data that rewinds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fp8console as fc
from fp8console.probe.api import Run
from fp8console.protocol import events, identity, paths, records

ROOT = Path(fc.__file__).parents[1]


# -- outside the console ------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_outside_the_console_everything_does_nothing() -> None:
    model = torch.nn.Linear(2, 2)
    run = fc.attach(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), total_steps=5)
    assert run.active is False
    run.register("model", model)
    assert list(run.steps([1, 2, 3])) == [1, 2, 3]
    assert list(run.steps(iter("ab"))) == ["a", "b"]
    run.step(loss=1.0)

    def function(step: int) -> int:
        return step

    assert run.on_restore(function) is function


def test_what_has_no_state_can_not_be_registered() -> None:
    with pytest.raises(TypeError, match=r"register\('x', \.\.\.\): a int has no state_dict"):
        fc.attach().register("x", 3)


# -- with a probe -------------------------------------------------------------------------------------------------
class Loader:
    """Gives numbers; a new iterator goes on from where the state says."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        at, self.at = self.at, 0
        self.given = at
        while self.given < self.count:
            self.given += 1
            yield self.given - 1

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, loaded: dict[str, int]) -> None:
        self.at = loaded["given"]


def with_probe() -> tuple[Run, Any]:
    probe = SimpleNamespace(registered={}, restore_callbacks=[], models=[], data=None)
    return Run(probe), probe


def test_after_a_restart_the_batches_after_the_restored_one_come() -> None:
    run, probe = with_probe()
    loader = Loader(6)
    seen = []
    for batch in run.steps(loader):
        seen.append(batch)
        if len(seen) == 4:
            probe.registered["loader"].load_state_dict({"given": 2})
            probe.data.restart = True
    assert seen == [0, 1, 2, 3, 2, 3, 4, 5]
    assert probe.data is None


def test_a_restart_at_the_last_batch_goes_on_too() -> None:
    run, probe = with_probe()
    seen = []
    for batch in run.steps(loader := Loader(3)):
        seen.append(batch)
        if len(seen) == 3:
            loader.load_state_dict({"given": 1})
            probe.data.restart = True
    assert seen == [0, 1, 2, 1, 2]


def test_a_loop_that_is_left_early_rewinds_nothing_any_more() -> None:
    run, probe = with_probe()
    for batch in run.steps(Loader(10)):
        if batch == 2:
            break
    import gc

    gc.collect()
    assert probe.data is None


def test_a_second_loop_inside_the_first_does_not_end_with_it() -> None:
    run, probe = with_probe()
    outer = run.steps(Loader(5))
    next(outer)
    first = probe.data
    inner = run.steps(Loader(5))
    next(inner)
    second = probe.data
    outer.close()  # type: ignore[attr-defined]
    assert first is not second and probe.data is second
    inner.close()  # type: ignore[attr-defined]
    assert probe.data is None


def test_a_loader_without_state_is_iterated_as_it_is() -> None:
    run, probe = with_probe()
    assert list(run.steps([1, 2])) == [1, 2] and probe.registered == {} and probe.data is None


# -- inside the console -------------------------------------------------------------------------------------------
SCRIPT = """
import sys, time
import torch
import fp8console as fc

class Loader:
    def __init__(self):
        self.at = self.given = 0
    def __iter__(self):
        self.given, self.at = self.at, 0
        while True:
            self.given += 1
            yield self.given
    def state_dict(self):
        return {"given": self.given}
    def load_state_dict(self, loaded):
        self.at = loaded["given"]

class Counter:
    value = 0
    def state_dict(self):
        return {"value": self.value}
    def load_state_dict(self, loaded):
        self.value = loaded["value"]

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
counter = Counter()
run = fc.attach(model=model, optimizer=optimizer, total_steps=1000000)
run.register("counter", counter)

@run.on_restore
def broken(step):
    raise ValueError("the script's own mistake")

@run.on_restore
def restored(step):
    print("restored", step, counter.value, flush=True)

print("active", run.active, flush=True)
for batch in run.steps(Loader()):
    counter.value += 1
    loss = model(torch.ones(1, 2)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("batch", batch, counter.value, flush=True)
    run.step(loss=batch + 0.5)
    time.sleep(0.005)
"""


class Console:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.env.update(XDG_STATE_HOME=str(folder / "state"), XDG_CONFIG_HOME=str(folder / "config"))

    def __call__(self, *words: str) -> str:
        command = [sys.executable, "-m", "fp8console", *words]
        done = subprocess.run(
            command, env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    def steps(self) -> list[dict[str, Any]]:
        file = paths.steps_file(self.run_dir, 0)
        body = file.read_bytes()[records.HEADER_BYTES :] if file.exists() else b""
        width = records.STEP_STRUCT.size
        return [records.unpack_step(body[at : at + width]) for at in range(0, len(body) - width + 1, width)]

    def wait(self, condition: Any) -> None:
        end = time.monotonic() + 40
        while not condition():
            assert time.monotonic() < end, (self.run_dir / "output.log").read_text()[-2000:]
            time.sleep(0.02)


@pytest.fixture
def console(tmp_path: Path) -> Iterator[Console]:
    made = Console(tmp_path)
    yield made
    import signal

    info = json.loads((made.run_dir / paths.RUN).read_text())
    for name, group in (("training", True), ("supervisor", False)):
        who = identity.ProcessIdentity.from_json(info.get(name))
        if who is not None:
            identity.send_signal(who, signal.SIGKILL, group=group)


@pytest.mark.slow
def test_a_rollback_takes_data_and_registered_state_along(console: Console) -> None:
    (console.folder / "train.py").write_text(SCRIPT)
    console("--detach", "--run-dir", str(console.run_dir), "train.py")
    console.wait(lambda: len(console.steps()) >= 30)
    answer = json.loads(console("ctl", str(console.run_dir), "rollback", "1", "--json").strip().splitlines()[-1])
    assert answer["detail"]["digests_equal"] and answer["detail"]["data_rewound"]
    assert answer["detail"]["note"] == "weights and data rolled back"
    at = answer["step"]
    console.wait(lambda: len(console.steps()) >= at + 10)
    again = json.loads(console("ctl", str(console.run_dir), "rollback", "1", "--json").strip().splitlines()[-1])
    assert again["state"] == "applied"  # a callback's mistake has switched nothing off
    status = json.loads(console("status", str(console.run_dir), "--json"))
    assert status["total_steps"] == 1_000_000
    output = (console.run_dir / "output.log").read_text().splitlines()
    assert output[0] == "active True"
    where = next(index for index, line in enumerate(output) if line.startswith("restored"))
    first = int(output[where].split()[2])
    assert output[where].split()[1] == "1"
    batches = [tuple(map(int, line.split()[1:])) for line in output[:where] if line.startswith("batch")]
    assert batches == [(number, number) for number in range(1, len(batches) + 1)]
    # The restore point was taken at the first boundary; the batch after it comes next, with the counter of then.
    after = [tuple(map(int, line.split()[1:])) for line in output[where + 1 :] if line.startswith("batch")]
    assert after[0] == (first + 1, first + 1) and after[1] == (first + 2, first + 2)
    steps = console.steps()
    assert [record["step"] for record in steps] == list(range(1, len(steps) + 1))
    assert steps[5]["loss"] == batches[5][0] + 0.5  # run.step(loss=...), and one boundary a step only
    lines = paths.events_file(console.run_dir, 0).read_bytes().splitlines()
    notices = [event for line in lines if (event := events.parse_line(line))]
    assert any("on_restore function broken failed: ValueError" in event["text"] for event in notices)
