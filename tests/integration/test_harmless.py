"""The probe leaves a training as it is: same bits at the end, no wait for a device."""

from __future__ import annotations

from pathlib import Path

import pytest
import running
import torch

from fp8console.protocol.records import LAYER_KINDS
from fp8console.runs.layers import LayerRecords

SAMPLES = {
    "char_gpt": ("--precision", "fp8-e5m2", "--steps", "30", "--inject", "spike@12"),
    "digits_cnn": ("--precision", "fp8-e4m3", "--steps", "60", "--inject", "nan@20"),
}


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def same_bits(first: Path, second: Path) -> bool:
    a, b = (torch.load(path, weights_only=True) for path in (first, second))
    assert a.keys() == b.keys() and len(a) > 0
    return all(torch.equal(raw(a[name]), raw(b[name])) for name in a)


@pytest.mark.parametrize("name", SAMPLES)
def test_final_parameters_are_bit_identical(name: str, tmp_path: Path, started: list[running.Run]) -> None:
    """Without the probe; with layers sampled at every step, read at once and late; with snapshots and pauses."""
    script = str(running.ROOT / "sample_models" / f"{name}.py")
    words = (script, *SAMPLES[name], "--seed", "3")
    plain = running.plain(tmp_path / "plain", *words, "--save", str(tmp_path / "plain.pt"))
    assert plain.returncode == 0, plain.stderr
    every_step = ("--set", "layer_steps=1", "--set", "layer_budget=1")
    variants = {
        "probe": ("--set", "snapshot_budget=0", *every_step),
        "late": ("--set", "read_late=true", *every_step),
    }
    for variant, options in variants.items():
        run = running.run(tmp_path / variant, *words, "--save", str(tmp_path / f"{variant}.pt"), options=options)
        assert run.result is not None and run.result.returncode == 0, run.result
        assert same_bits(tmp_path / "plain.pt", tmp_path / f"{variant}.pt"), variant
        assert run.events("fault", rank=0) == []
        layers = LayerRecords(run.run_dir)
        for kind in LAYER_KINDS:  # from the second step on: the first finds out what the layers are
            assert layers.samples(kind, "l2")[0].tolist() == list(range(2, len(run.records()) + 1)), (variant, kind)

    folder = tmp_path / "steered"
    options = ("--set", "snapshot_budget=1")
    run = running.start(folder, *words, "--save", str(tmp_path / "steered.pt"), options=options)
    started.append(run)
    run.wait_for_step(3, timeout=120)
    run.ctl("pause")
    run.ctl("step", "2")
    run.ctl("checkpoint")
    run.ctl("resume")
    assert run.wait_for_end(120) == 0
    assert same_bits(tmp_path / "plain.pt", tmp_path / "steered.pt")
    assert run.events("snapshot", rank=0) and run.events("checkpoint", rank=0) and run.events("paused", rank=0)


def test_no_boundary_waits_for_a_device(tmp_path: Path) -> None:
    """Every torch call of the probe, on the way that a device's values take, under a dispatch mode that watches."""
    options = ("--set", "read_late=true", "--set", "layer_steps=5", "--set", "layer_budget=1")
    run = running.run(tmp_path, running.training("no_sync"), options=options)
    assert run.result is not None and run.result.returncode == 0, run.output()
    assert run.output() == "no sync True\n"
    assert len(run.records()) == 230 and run.events("snapshot", rank=0)
    assert [record["step"] for record in run.records() if record["flags"] & 1] == [8]
    assert LayerRecords(run.run_dir).samples("activation_gradient", "amax")[0].tolist() == list(range(5, 231, 5))


def test_the_watch_itself_sees_a_wait(tmp_path: Path) -> None:
    """The same training with values read at once: the watch must end it, else the test above could not fail."""
    run = running.run(tmp_path, running.training("no_sync"))
    assert run.result is not None and run.result.returncode == 9 and "SYNC" in run.output()
