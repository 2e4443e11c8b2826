"""Several processes: commands at equal steps on all ranks, spawned children, launchers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import running

TORCHRUN = ("--", sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def test_every_command_is_applied_by_both_ranks_at_the_same_step(tmp_path: Path, started: list[running.Run]) -> None:
    """Twenty commands under torchrun with two gloo ranks that drift: twenty times the same step on both."""
    run = running.start(tmp_path, *TORCHRUN, running.training("ddp"), "--steps", "100000")
    started.append(run)
    run.wait_for_step(20, timeout=120)
    commands: list[tuple[str, ...]] = []
    for round_ in range(5):
        commands += [("set", f"scale={2.0 ** (8 + round_)}"), ("pause",), ("step", "2"), ("resume",)]
    answers = [run.ctl(*words) for words in commands]
    assert [answer["state"] for answer in answers] == ["applied"] * 20
    assert all(answer["detail"]["ranks"] == 2 and "steps" not in answer["detail"] for answer in answers)

    run.wait_until(lambda: len(run.records(1)) > answers[-1]["step"] and len(run.records(0)) > answers[-1]["step"])
    for kind in ("settings", "paused", "resumed"):
        steps = [[event["step"] for event in run.events(kind, rank=rank)] for rank in (0, 1)]
        assert steps[0] == steps[1] and len(steps[0]) >= 5, (kind, steps)
    for answer in answers[::4]:
        # The scale that was set is that of the next step's record, on both ranks.
        wanted = answer["command"]["scale"]
        assert [run.records(rank)[answer["step"]]["scale"] for rank in (0, 1)] == [wanted, wanted]

    point = run.status()["restore_points"][0]["step"]
    back = run.ctl("rollback", str(point))
    assert back["detail"]["digests_equal"] is True and back["detail"]["ranks"] == 2
    sides = [run.events("rolled_back", rank=rank)[-1] for rank in (0, 1)]
    assert sides[0]["step"] == sides[1]["step"] and all(side["digests_equal"] for side in sides)
    stopped = run.ctl("stop")
    assert run.wait_for_end(timeout=60) == 0
    folder = Path(stopped["detail"]["path"]).parent
    assert sorted(entry.name for entry in folder.iterdir()) == ["rank-0", "rank-1"]


def test_spawned_children_are_ranks_and_workers_are_not(tmp_path: Path) -> None:
    plain = running.plain(tmp_path / "plain", running.training("spawn"), "10")
    run = running.run(tmp_path / "console", running.training("spawn"), "10")
    assert run.result is not None and run.result.returncode == 0, run.result
    assert run.output() == plain.stdout
    assert [len(run.records(rank)) for rank in (0, 1, 2)] == [10, 10, 0]
    assert run.records(0)[-1]["epoch_batches"] == 10 and run.records(0)[-1]["batch"] == 10
    assert run.info()["world_size"] == 2
    assert json.dumps(run.status())  # a finished run of two ranks reads like any other
