"""The status of a run from its files alone: states, sums, NaN, and what is not known."""

from __future__ import annotations

import json
import math
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fp8console.cli.status import describe
from fp8console.protocol import events, paths, records
from fp8console.protocol.identity import identify
from fp8console.protocol.numbers import dumps
from fp8console.runs import tally
from fp8console.runs.run import Run
from fp8console.runs.stability import StabilityFigures
from fp8console.runs.status import status

FLAGS = records.FLAGS
NOW = 1_000_000.0


class RunDir:
    """A run directory written by hand; its supervisor is this very process."""

    def __init__(self, folder: Path, **info: Any) -> None:
        self.path = folder / "run"
        self.path.mkdir()
        self.info: dict[str, Any] = {"id": "run", "created": NOW, "supervisor": identify(os.getpid()).to_json(), **info}
        self.write_info()
        self.run = Run(self.path)

    def write_info(self, **info: Any) -> None:
        self.info.update(info)
        (self.path / paths.RUN).write_text(json.dumps(self.info))

    def steps(self, *steps: dict[str, Any], flags: int = 0) -> None:
        file = paths.steps_file(self.path, 0)
        if not file.exists():
            file.write_bytes(records.header())
        with file.open("ab") as target:
            for step in steps:
                target.write(records.pack_step({"time": NOW + step["step"] * 0.1, "duration": 0.1, **step}, flags))

    def event(self, kind: str, step: int | None = None, text: str = "", rank: int | None = 0, **fields: Any) -> None:
        events.EventWriter(paths.events_file(self.path, rank)).write(events.make(kind, text or kind, step, **fields))

    def status(self, now: float = NOW) -> Any:
        self.run.refresh()
        return status(self.run, now)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def dead() -> dict[str, Any]:
    child = subprocess.Popen([sys.executable, "-c", ""])
    who = identify(child.pid)
    child.wait()
    return {**who.to_json(), "start": 1}


def test_a_run_goes_from_starting_to_finished(run_dir: RunDir) -> None:
    assert run_dir.status().state == "starting"
    assert run_dir.status().step is None and run_dir.status().skipped is None
    run_dir.event("launched", rank=None, pid=77, command=[])
    run_dir.steps({"step": 1, "loss": 4.0})
    now = run_dir.status()
    assert (now.state, now.step, now.loss, now.pid) == ("running", 1, 4.0, 77)
    assert now.scale is None and now.lr is None and now.clipped_share is None, "unknown is None"
    run_dir.event("paused", 1)
    now = run_dir.status()
    assert (now.state, now.paused_at) == ("paused", 1) and now.paused_since is not None
    run_dir.event("resumed", 1, held=3.0)
    assert run_dir.status().state == "running"
    run_dir.event("stopping", rank=None, how="stop")
    assert run_dir.status().state == "stopping"
    run_dir.event("ended", rank=None, exit_status=143, signal="SIGTERM", error=None)
    now = run_dir.status()
    assert (now.state, now.exit_status, now.signal) == ("finished", 143, "SIGTERM"), "as the operator wished"


@pytest.mark.parametrize(
    ("how", "exit_status", "state"),
    [(None, 0, "finished"), (None, 3, "failed"), ("kill", 137, "failed"), ("stop", 1, "finished")],
)
def test_the_end(run_dir: RunDir, how: str | None, exit_status: int, state: str) -> None:
    if how is not None:
        run_dir.event("stopping", rank=None, how=how)
    run_dir.write_info(exit_status=exit_status, error="RuntimeError: x", ended=NOW + 9, supervisor=dead())
    now = run_dir.status()
    assert (now.state, now.exit_status, now.error, now.ended) == (state, exit_status, "RuntimeError: x", NOW + 9)


def test_lost_and_unsupervised(run_dir: RunDir) -> None:
    run_dir.steps({"step": 1})
    run_dir.write_info(supervisor=dead(), training=identify(os.getpid()).to_json())
    now = run_dir.status()
    assert now.state == "running" and now.supervised is False
    assert any("supervisor is gone" in note for note in now.notes)
    run_dir.write_info(training=dead())
    assert run_dir.status().state == "lost"
    run_dir.write_info(supervisor=None, training=None)
    assert run_dir.status().state == "lost"


def test_a_run_on_another_machine_is_judged_by_its_news(run_dir: RunDir) -> None:
    run_dir.write_info(host=socket.gethostname() + "-not", supervisor=dead())
    run_dir.steps({"step": 1})
    now = run_dir.status(NOW + 10)
    assert now.state == "running" and now.supervised is None and "runs on" in now.notes[0]
    assert run_dir.status(NOW + 1000).state == "lost"


def test_an_unreadable_run_has_a_status(tmp_path: Path) -> None:
    (tmp_path / paths.RUN).write_text("[]")
    (tmp_path / "steps.0.rec").write_bytes(b"\0" * 5000)
    now = status(Run(tmp_path))
    assert now.state == "lost" and now.step is None and len(now.notes) == 2
    run = Run(tmp_path / "nowhere")
    assert status(run).state == "lost"


@pytest.mark.parametrize(
    "info",
    [
        {"command": "x", "versions": [], "settings": 5, "training": 7, "supervisor": "x", "created": "soon"},
        {"exit_status": "0", "host": 5, "world_size": "2", "versions": {"torch": 2}, "name": 3, "id": 5},
    ],
)
def test_strange_fields_in_run_json_are_unknown(run_dir: RunDir, info: dict[str, Any]) -> None:
    run_dir.write_info(**info)
    now = run_dir.status()
    assert now.command is None and now.torch is None and now.exit_status is None
    json.loads(dumps(now.to_json()))


def test_health_counts_from_the_last_trouble(run_dir: RunDir) -> None:
    run_dir.steps({"step": 1, "loss": 3.0}, {"step": 2, "loss": 3.0})
    now = run_dir.status()
    assert (now.healthy_since, now.healthy_steps, now.skipped) == (1, 2, 0)
    run_dir.steps({"step": 3, "grad_norm": math.inf}, flags=FLAGS["skipped"] | FLAGS["grad_nonfinite"])
    now = run_dir.status()
    assert (now.healthy_since, now.healthy_steps, now.skipped) == (3, 0, 1)
    assert now.nan_since == {"loss": None, "grad_norm": 3}
    run_dir.steps({"step": 4, "loss": 2.9, "grad_norm": 1.0})
    now = run_dir.status()
    assert (now.healthy_since, now.healthy_steps, now.skipped) == (3, 1, 1)
    assert now.nan_since["grad_norm"] is None
    run_dir.event("rolled_back", 4, "rolled back to 2", to=2, where="memory", before={}, after={})
    run_dir.steps({"step": 5, "loss": 2.9}, {"step": 6, "loss": 2.8}, flags=FLAGS["restored"])
    now = run_dir.status()
    assert (now.healthy_since, now.healthy_steps) == (4, 2)
    assert now.last_incident == "rolled back to 2 at step 4"


def test_nan_since_is_where_the_streak_began(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally, "BLOCK", 4)
    run_dir.steps(*({"step": step, "loss": 2.0} for step in range(1, 8)))
    run_dir.steps({"step": 8, "loss": math.nan}, {"step": 9, "loss": 2.0})
    assert run_dir.status().nan_since["loss"] is None
    run_dir.steps(*({"step": step, "loss": math.nan} for step in range(10, 25)))
    assert run_dir.status().nan_since["loss"] == 10
    run_dir.steps({"step": 25}, {"step": 26, "loss": math.inf})
    now = run_dir.status()
    assert now.nan_since["loss"] == 10, "an unknown loss ends nothing"
    assert now.loss == math.inf
    assert json.loads(dumps(now.to_json()))["loss"] == "Infinity"
    run_dir.steps({"step": 27, "loss": 1.0})
    assert run_dir.status().nan_since["loss"] is None


def test_looking_often_gives_what_looking_once_gives(run_dir: RunDir) -> None:
    for step in range(1, 60):
        values = {"step": step, "loss": math.nan if step % 7 == 0 else 2.0, "clip_coef": 0.5, "data_wait": 0.01}
        run_dir.steps(values, flags=FLAGS["skipped"] if step % 5 == 0 else FLAGS["clipped"])
        if step % 10 == 0:
            run_dir.event("skipped", step, "step skipped")
        often = run_dir.status()
    assert often == status(Run(run_dir.path), NOW)
    assert often.skipped == 11
    assert often.clipped_share == pytest.approx(48 / 59)
    assert often.data_wait_share == pytest.approx(0.1)


def test_speed_leaves_the_first_step_and_unknown_durations_out(run_dir: RunDir) -> None:
    run_dir.steps({"step": 1, "duration": 30.0})
    assert run_dir.status().step_seconds == 30.0
    run_dir.steps({"step": 2, "duration": None}, {"step": 3, "duration": 0.5}, {"step": 4, "duration": 0.5})
    run_dir.write_info(settings={"total_steps": 10})
    now = run_dir.status()
    assert (now.step_seconds, now.steps_per_second) == (0.5, 2.0)
    assert now.seconds_left == 3.0


def test_speed_is_that_of_the_last_seconds(run_dir: RunDir) -> None:
    run_dir.steps(*({"step": step, "time": NOW + step, "duration": 1.0} for step in range(1, 100)))
    run_dir.steps(*({"step": 100 + n, "time": NOW + 200 + n * 0.001, "duration": 0.001} for n in range(1, 3000)))
    assert run_dir.status().steps_per_second == pytest.approx(1000)


def test_restore_points_come_and_go(run_dir: RunDir) -> None:
    def point(step: int, **fields: Any) -> dict[str, Any]:
        return {"step": step, "time": NOW, "loss": 2.0, "scale": 1024.0, "verified": None, **fields}

    run_dir.steps({"step": 1})
    run_dir.event("snapshot", 100, point=point(100, loss=math.nan))
    run_dir.event("snapshot", 200, point=point(200))
    run_dir.event("checkpoint", 200, point=point(200, tag="v1"))
    run_dir.event("snapshot", 300, point=point(300))
    run_dir.event("snapshot", 300, point=point(300), rank=1)
    run_dir.event("point_dropped", 300, point_step=100, where="memory", reason="room")
    run_dir.event("verified", 300, point_step=200, where="disk", ok=True, digest="x")
    now = run_dir.status()
    assert [(p["step"], p["where"], p["kind"], p["tag"], p["verified"]) for p in now.restore_points] == [
        (200, "memory", "snapshot", None, None),
        (200, "disk", "checkpoint", "v1", True),
        (300, "memory", "snapshot", None, None),
    ]
    run_dir.event("rolled_back", 310, to=200, where="disk")
    assert [p["abandoned"] for p in run_dir.status().restore_points] == [False, False, True]
    run_dir.write_info(exit_status=0)
    assert [p["where"] for p in run_dir.status().restore_points] == ["disk"], "memory is gone with the process"


def test_nan_in_a_restore_point_stays_nan(run_dir: RunDir) -> None:
    run_dir.event("snapshot", 1, point={"step": 1, "loss": math.nan, "scale": math.inf})
    run_dir.event("snapshot", 1, point={"step": "1"})
    (point,) = run_dir.status().restore_points
    assert math.isnan(point["loss"]) and point["scale"] == math.inf
    assert json.loads(dumps(run_dir.status().to_json()))["restore_points"][0]["loss"] == "NaN"


def test_asked_until_it_is_answered(run_dir: RunDir) -> None:
    run_dir.event("asked", rank=None, id="1", command={"name": "pause"}, text="pause")
    run_dir.event("asked", rank=None, id="2", command={"name": "resume"}, text="resume")
    asked = run_dir.status().asked
    assert asked is not None and asked["text"] == "resume" and asked["command"] == {"name": "resume"}
    run_dir.event("refused", rank=None, id="2", reason="no")
    assert run_dir.status().asked["id"] == "1"
    run_dir.event("applied", 5, rank=None, id="1", detail={})
    assert run_dir.status().asked is None


def test_the_scaler_and_the_operators_settings(run_dir: RunDir) -> None:
    run_dir.event("notice", text="the GradScaler is disabled", part="scaler")
    assert run_dir.status().scaler_note == "the GradScaler is disabled"
    run_dir.event("scaler", class_name="GradScaler", scale=65536.0, growth_factor=2.0, growth_interval=2000)
    run_dir.event("scaler", growth_interval=500)
    run_dir.event("settings", lr_scale=0.5, clip_norm=None, floor=2.0, cap=None)
    now = run_dir.status()
    assert now.scaler == {"class_name": "GradScaler", "scale": 65536.0, "growth_factor": 2.0, "growth_interval": 500}
    assert now.scaler_note is None
    assert (now.lr_scale, now.clip_norm, now.floor, now.cap) == (0.5, None, 2.0, None)


def test_the_operators_clipping(run_dir: RunDir) -> None:
    run_dir.event("settings", lr_scale=1.0, clip_norm="auto", clip_z=2.5, floor=None, cap=None)
    assert (run_dir.status().clip_norm, run_dir.status().clip_z) == ("auto", 2.5)
    run_dir.event("settings", lr_scale=1.0, clip_norm=0.5, clip_z=None, floor=None, cap=None)
    assert (run_dir.status().clip_norm, run_dir.status().clip_z) == (0.5, None)
    run_dir.steps({"step": 1, "clip_limit": 0.5})
    run_dir.event("clipping", 1, "clipped 30 of the last 100 steps to norm 0.5: ...", count=30, window=100, limit=0.5)
    assert run_dir.status().clip_limit == 0.5
    assert run_dir.status().last_incident == "clipped 30 of 100 steps at step 1"


def test_a_profiles_clipping_is_in_effect_until_the_operator_sets_another(run_dir: RunDir) -> None:
    run_dir.event("profile", 1, "profile x.toml: applied clip_norm 0.36", applied={"clip_norm": 0.36}, not_applied=[])
    assert run_dir.status().clip_norm == 0.36
    run_dir.steps({"step": 1, "clip_limit": 0.1})
    assert run_dir.status().clip_norm is None, "the script clips to less itself"
    run_dir.steps({"step": 2, "clip_limit": 0.36})
    assert run_dir.status().clip_norm == 0.36
    run_dir.event("settings", lr_scale=1.0, clip_norm=None, clip_z=None, floor=None, cap=None)
    assert run_dir.status().clip_norm is None


def test_stability_in_status_and_its_json(run_dir: RunDir) -> None:
    assert run_dir.status().stability == StabilityFigures()
    run_dir.steps(*({"step": step, "loss": 2.0, "clip_coef": 1.0} for step in range(1, 31)))
    run_dir.steps({"step": 31, "loss": math.nan}, flags=FLAGS["loss_nonfinite"])
    run_dir.steps({"step": 32, "loss": 9.0, "clip_coef": 0.1}, flags=FLAGS["clipped"] | FLAGS["restored"])
    found = run_dir.status()
    assert found.stability == StabilityFigures(
        steps=32,
        failures=1,
        mean_steps_between_failures=31.0,
        loss_jitter=0.0,
        recovery_rate=0.0,
        recovered=0,
        judged=1,
        longest_stable_stretch=30,
        skips_per_1000_steps=0.0,
        clip_frequency=1 / 31,
        clip_frequency_recent=1 / 31,
    ), "rolled back from: not recovered by itself"
    data = json.loads(dumps(found.to_json()))["stability"]
    assert data["mean_steps_between_failures"] == 31 and data["mean_steps_at_least"] is None
    lines = "\n".join(describe(found, NOW))
    assert "1 failure, 31 steps between them, recovered from 0 of 1, longest stable stretch 30" in lines
    assert "skips per 1,000 steps 0, loss jitter 0%, clipped 3.23% of all steps and 3.23% of the last 100" in lines


def test_a_run_without_failures_has_a_lower_bound_and_one_of_which_nothing_is_known_has_none(run_dir: RunDir) -> None:
    run_dir.steps({"step": 1}, {"step": 2})
    found = run_dir.status()
    assert (found.stability.steps, found.stability.failures, found.stability.mean_steps_at_least) == (0, None, None)
    assert "steps between failures unknown, longest stable stretch unknown" in "\n".join(describe(found, NOW))
    run_dir.steps({"step": 3, "scale": 1024.0}, {"step": 4, "loss": 2.0}, {"step": 5, "grad_norm": 2.0})
    found = run_dir.status()
    assert (found.stability.steps, found.stability.failures, found.stability.mean_steps_at_least) == (3, 0, 3)
    assert "no failure in 3 steps, longest stable stretch 3" in "\n".join(describe(found, NOW))


def test_stability_of_an_old_layout(run_dir: RunDir) -> None:
    """Columns that a run's layout lacks are unknown; what it has is read by its own header."""
    old = tuple(field for field in records.STEP_FIELDS if field.name not in ("clip_limit", "clip_coef"))
    layout = struct.Struct("<" + "".join(field.code for field in old))
    known = 1 << [field.name for field in old].index("loss")
    rows = [[{"step": i, "loss": 2.0, "known": known}.get(field.name, 0) for field in old] for i in (1, 2, 3)]
    data = b"".join(layout.pack(*row) for row in rows)
    paths.steps_file(run_dir.path, 0).write_bytes(records.header(old) + data)
    found = run_dir.status()
    assert (found.step, found.clip_limit, found.stability.mean_steps_at_least) == (None, None, 3)
    assert found.stability.clip_frequency is None and found.loss == 2.0


def test_a_record_file_that_starts_again_is_counted_again(run_dir: RunDir) -> None:
    run_dir.steps({"step": 1}, {"step": 2}, flags=FLAGS["skipped"])
    assert run_dir.status().skipped == 2
    paths.steps_file(run_dir.path, 0).write_bytes(records.header() + records.pack_step({"step": 1}, 0))
    now = run_dir.status()
    assert (now.skipped, now.step) == (0, 1)


def test_a_long_run_is_cheap_to_look_at_again(tmp_path: Path) -> None:
    import time

    run_dir = RunDir(tmp_path)
    steps = ({"step": step, "time": NOW + step, "duration": 0.1, "loss": 2.0} for step in range(1, 1001))
    packed = b"".join(records.pack_step(step, 0) for step in steps)
    paths.steps_file(run_dir.path, 0).write_bytes(records.header() + packed * 300)
    start = time.process_time()
    run_dir.status()
    first = time.process_time() - start
    start = time.process_time()
    for _ in range(10):
        run_dir.steps({"step": 1001, "loss": 2.0})
        run_dir.status()
    assert time.process_time() - start < max(10 * first, 0.5)


# hardware


def with_hardware(folder: Path, gpus: list[dict[str, Any]], seconds: int = 12) -> None:
    samples = [{"time": 1000.0 + second, "source": "sysfs", "gpus": gpus, "host": {}} for second in range(seconds)]
    (folder / paths.HARDWARE).write_text("".join(json.dumps(sample) + "\n" for sample in samples))


def test_hardware_in_words_and_in_json(tmp_path: Path) -> None:
    me = identify(os.getpid()).to_json()
    step = {"step": 1, "time": 1010.0, "duration": 1.0, "data_wait": 0.0}
    paths.steps_file(tmp_path, 0).write_bytes(records.header() + records.pack_step(step, 0))
    (tmp_path / paths.RUN).write_text(json.dumps({"id": "r", "supervisor": me, "training": me}))
    fields = {"episode": 1, "what": "memory", "gpus": [1], "since": 1003.0, "evidence": [{"share": 0.98}]}
    begun = {"time": 1009.0, "step": 1, "kind": "hardware", "text": "GPU 1: memory is 98% full (x)", **fields}
    (tmp_path / "events.jsonl").write_text(dumps(begun) + "\n")
    with_hardware(tmp_path, [{"index": 0, "bdf": "a", "busy": 80}, {"index": 1, "bdf": "b", "busy": 20}])
    now = status(Run(tmp_path), 1012.0)
    assert now.balance == 0.25 and now.last_incident == "GPU 1: memory is 98% full"
    shown = json.loads(dumps(now.to_json()))
    assert [bound["what"] for bound in shown["bounds"]] == ["imbalance"]
    assert shown["hardware_alerts"][0]["evidence"] == [{"share": 0.98}]
    words = "\n".join(describe(now, 1012.0))
    assert "2 GPUs by sysfs, busy 20 to 80%, balance 0.25, 1 s ago" in words
    assert "step bound by  imbalance: GPU 1 is busy 20%, GPU 0 80%" in words and "alert          GPU 1: memory" in words
    later = status(Run(tmp_path), 1040.0)
    assert later.balance is None and later.bounds is None, "nothing is known of now by samples of half a minute ago"
    over = {"time": 1011.0, "step": 1, "kind": "recovered", "text": "over", "of": "memory", "episode": 1}
    (tmp_path / "events.jsonl").write_text(dumps(begun) + "\n" + dumps(over) + "\n")
    assert status(Run(tmp_path), 1012.0).hardware_alerts == []


def test_no_gpu_is_said_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / paths.RUN).write_text("{}")
    (tmp_path / paths.HARDWARE).write_text('{"time": 1.0, "source": "none", "reason": "no AMD GPU", "gpus": []}\n')
    words = "\n".join(describe(status(Run(tmp_path)), 2.0))
    assert "none seen: no AMD GPU" in words and "cpu unknown" in words and "step bound by" not in words
