"""The sample trainings, run as anyone would: they learn, a seed decides every bit, an injected fault is one."""

from __future__ import annotations

import importlib
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SAMPLES = REPOSITORY / "sample_models"


def train(sample: str, *arguments: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, str(SAMPLES / f"{sample}.py"), "--device", "cpu", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=300)
    assert not check or done.returncode == 0, done.stderr
    return done


def column(name: str, output: str) -> dict[int, float]:
    """The printed values of one figure, by step."""
    found = re.findall(rf"^step (\d+)/\d+ .*\b{name} (\S+)", output, re.MULTILINE)
    return {int(step): float(value) for step, value in found}


def options(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> Any:
    """What a sample makes of its command line."""
    monkeypatch.syspath_prepend(str(SAMPLES))
    recipe = importlib.import_module("recipe")
    monkeypatch.setattr(sys, "argv", ["sample.py", *arguments])
    return recipe.parse_options("a sample", steps=1, batch_size=1, lr=0.1)


@pytest.mark.parametrize("precision", ["bf16", "fp8-e4m3", "fp8-e4m3-saturating", "fp8-e4m3fnuz"])
def test_char_gpt_learns_in_low_precision(precision: str) -> None:
    losses = column("loss", train("char_gpt", "--precision", precision, "--steps", "40").stdout)
    assert losses[10] < math.log(256)
    assert losses[40] < 3.2


def test_without_a_loss_scale_e4m3_flushes_the_gradients_and_nothing_is_learnt() -> None:
    losses = column("loss", train("char_gpt", "--precision", "fp8-e4m3", "--scaler", "none", "--steps", "30").stdout)
    assert losses[30] == pytest.approx(math.log(256), abs=0.3)


def test_a_saturating_format_ruins_a_summed_loss_unless_the_scaler_sees_it() -> None:
    summed = ("--precision", "fp8-e4m3-saturating", "--loss", "sum", "--steps", "40")
    default, headroom = (train("char_gpt", *summed, "--scaler", name).stdout for name in ("default", "headroom"))
    # Nothing overflows, so the default scale stays where it is, and the model guesses hardly better than by chance.
    assert set(column("scale", default).values()) == {65536.0}
    assert column("loss", default)[40] > 5
    assert column("scale", headroom)[40] < 2**12
    assert column("loss", headroom)[40] < 3.5


MLP = ("--steps", "30", "--label-smoothing", "0.1")


@pytest.fixture(scope="module")
def plain_mlp() -> dict[int, float]:
    """Losses of float8_mlp in float32."""
    return column("loss", train("float8_mlp", *MLP, "--precision", "fp32").stdout)


def test_a_summed_loss_learns_what_a_mean_one_does(plain_mlp: dict[int, float]) -> None:
    summed = column("loss", train("float8_mlp", *MLP, "--precision", "fp32", "--loss", "sum").stdout)
    assert summed.keys() == plain_mlp.keys() == {10, 20, 30}
    for step, loss in plain_mlp.items():
        assert summed[step] == pytest.approx(loss, rel=1e-2)


def test_float8_mlp_learns_in_torchaos_layers(plain_mlp: dict[int, float]) -> None:
    pytest.importorskip("torchao.float8", reason="needs torchao")
    output = train("float8_mlp", *MLP).stdout
    assert "torchao float8 emulated in hidden.0, hidden.3, scaler none, cpu" in output.splitlines()[0]
    losses = column("loss", output)
    assert losses[30] < 3.3
    # The rounding shows, and costs little.
    assert losses[30] != plain_mlp[30] and losses[30] == pytest.approx(plain_mlp[30], rel=0.02)


def test_digits_cnn_reads_digits() -> None:
    output = train("digits_cnn", "--precision", "fp8-e5m2", "--steps", "150").stdout
    match = re.search(r"test: (\S+)% of 297 images right", output)
    assert match and float(match.group(1)) > 88
    assert column("loss", output)[150] < 0.3


@pytest.mark.parametrize(("sample", "steps"), [("char_gpt", "12"), ("digits_cnn", "12")])
def test_a_seed_decides_every_bit(tmp_path: Path, sample: str, steps: str) -> None:
    import torch

    def parameters(name: str, seed: str) -> dict[str, torch.Tensor]:
        path = tmp_path / name
        train(sample, "--precision", "fp8-e4m3", "--steps", steps, "--seed", seed, "--save", str(path))
        saved: dict[str, torch.Tensor] = torch.load(path)
        return saved

    first, again, other = parameters("first", "1"), parameters("again", "1"), parameters("other", "2")
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_a_bad_batch_costs_a_step_with_a_scaler_and_the_weights_without() -> None:
    bad_batch = ("--steps", "30", "--inject", "nan@20")
    kept = train("char_gpt", "--precision", "fp8-e5m2", *bad_batch).stdout
    assert math.isnan(column("loss", kept)[20]) and column("loss", kept)[30] < 4
    assert column("scale", kept) == {10: 65536, 20: 32768, 30: 32768}
    lost = train("char_gpt", "--precision", "fp8-e5m2", "--scaler", "none", *bad_batch).stdout
    assert math.isnan(column("loss", lost)[30])
    assert column("scale", lost) == {}


def test_a_spike_raises_the_loss_and_the_training_recovers() -> None:
    losses = column("loss", train("char_gpt", "--steps", "100", "--inject", "spike@59", "--lr", "2e-3").stdout)
    assert losses[60] > losses[50] + 0.5
    assert losses[100] < losses[60] - 0.5


@pytest.mark.parametrize(
    ("arguments", "scaler"),
    [
        ("", "none"),
        ("--precision bf16", "none"),
        ("--precision fp8-e4m3", "default"),
        ("--precision fp8-e4m3 --scaler none", "none"),
        ("--scaler default", "default"),
        ("--precision fp8-e5m2fnuz --scaler headroom", "headroom"),
        ("--scaler article", "article"),
    ],
)
def test_a_scaler_comes_with_fp8_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, arguments: str, scaler: str
) -> None:
    assert options(monkeypatch, arguments.split()).scaler == scaler


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--inject", "nan"], "must be nan@STEP or spike@STEP with a step from 1 up, not 'nan'"),
        (["--inject", "boom@3"], "must be nan@STEP or spike@STEP"),
        (["--inject", "nan@0"], "must be nan@STEP or spike@STEP"),
        (["--steps", "0"], "must be 1 or more, not 0"),
        (["--lr", "nan"], "must be a finite number over 0, not nan"),
        (["--precision", "fp4"], "invalid choice: 'fp4'"),
        (["--label-smoothing", "1"], "must be from 0 to below 1, not 1"),
        (["--label-smoothing", "nan"], "must be from 0 to below 1, not nan"),
    ],
)
def test_a_bad_option_gets_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        options(monkeypatch, arguments)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_digits_without_scikit_learn_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "sklearn").mkdir()
    (tmp_path / "sklearn" / "__init__.py").write_text("raise ImportError('no scikit-learn here')\n")
    done = train("digits_cnn", check=False, PYTHONPATH=f"{tmp_path}{os.pathsep}{REPOSITORY}")
    assert done.returncode == 1
    assert done.stderr == "digits_cnn.py needs scikit-learn for its images: pip install scikit-learn\n"


def test_float8_mlp_without_torchao_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao" / "__init__.py").write_text("raise ImportError('no torchao here')\n")
    done = train("float8_mlp", check=False, PYTHONPATH=f"{tmp_path}{os.pathsep}{REPOSITORY}")
    assert done.returncode == 1
    assert done.stderr == (
        "--precision torchao: torchao's FP8 layers can't be loaded (no torchao here): "
        "pip install 'fp8console[torchao]'\n"
    )
