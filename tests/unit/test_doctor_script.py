"""The doctor's look at scripts: what the probe tells, judged; and real trainings, one for each fault, run under it."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from doctor_places import bad, named, write

from fp8console.cli import doctor
from fp8console.doctor import script
from fp8console.doctor.findings import Finding

ROOT = Path(__file__).resolve().parents[2]
PATIENT = str(ROOT / "tests/trainings/patient.py")


# -- eps --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "limits"), list(script.DTYPES.items()))
def test_limits_of_dtypes_are_torch_s(name: str, limits: tuple[float, float]) -> None:
    dtype = getattr(torch, name)
    assert limits == (torch.finfo(dtype).smallest_normal, torch.tensor([1], dtype=torch.float64).item() * limits[1])
    smallest = torch.tensor(limits[1], dtype=torch.float64).to(dtype)
    half = torch.tensor(limits[1] / 2, dtype=torch.float64).to(dtype)
    assert smallest.item() == limits[1] and half.item() == 0


@pytest.mark.parametrize("eps", [1e-8, 2.98e-8, 3.0e-8, 6e-8, 1e-6, 6.2e-5, 1e-4])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_eps_is_judged_as_torch_rounds_it(eps: float, dtype: str) -> None:
    kept = torch.tensor(eps, dtype=torch.float64).to(getattr(torch, dtype)).item()
    normal = torch.finfo(getattr(torch, dtype)).smallest_normal
    verdict = "fail" if kept == 0 else "warn" if kept < normal else "ok"
    assert script.judge_eps("AdamW", eps, dtype, False).verdict == verdict


def test_eps_in_a_fused_optimizer_is_float32() -> None:
    assert script.judge_eps("AdamW", 1e-8, "float16", True).verdict == "ok"
    assert script.judge_eps("AdamW", 1e-8, "float8_e4m3fn", False).evidence.startswith("not known")
    assert "eps=0.0001" in str(script.judge_eps("AdamW", 1e-6, "float16", False).remedy)


@pytest.mark.parametrize(
    ("sizes", "wrong"),
    [
        ((64, 48, [128]), []),
        ((65, 48, [128]), ["65 inputs"]),
        ((64, 1, [128, 37]), ["1 output", "37 rows a batch"]),
        ((64, 32, [10, 12, 16]), ["10 or 12 rows a batch"]),
    ],
)
def test_shapes_that_fp8_hardware_refuses(sizes: tuple, wrong: list[str]) -> None:
    product = dict(zip(("inputs", "outputs", "rows"), sizes))
    assert script.odd_sizes(product) == wrong


def test_script_that_never_trained_is_judged_by_nothing() -> None:
    found = script.check(script.Trial(0, 1.0, "exit status 1: ValueError: no data", "/runs/x", None, 0))
    assert named(found, "runs").verdict == "fail" and "ValueError: no data" in found[0].evidence
    assert all(f.evidence.startswith("not known") for f in found[1:]) and bad(found) == {"runs"}


# -- real trainings ---------------------------------------------------------------------------------------------------
FAULTS = ("none", "clip", "gone", "half")


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Finding]]:
    """What is found in the training with each fault, or none; two at a time, for most of it is waiting."""
    folder = tmp_path_factory.mktemp("trials")
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        words = [[PATIENT, "--fault", fault] for fault in FAULTS]
        found = pool.map(lambda training: doctor.try_script("script", training, sys.executable, steps=4), words)
        return dict(zip(FAULTS, found))


@pytest.mark.slow
def test_sound_script(trials: dict[str, list[Finding]]) -> None:
    found = trials["none"]
    assert [f.verdict for f in found] == ["ok"] * 6, found
    assert named(found, "runs").evidence.startswith("4 steps in ")
    assert named(found, "FP8 shapes").evidence == "2 linear layers, all sizes multiples of 16"
    assert named(found, "optimizer eps").evidence == "AdamW's eps 1e-08 for float32 parameters"


@pytest.mark.slow
def test_clip_before_unscale_and_odd_shapes(trials: dict[str, list[Finding]]) -> None:
    found = trials["clip"]
    assert bad(found) == {"clipping", "FP8 shapes"}
    assert named(found, "clipping").verdict == "fail"
    assert named(found, "clipping").evidence == "4 steps of 4 clipped gradients that carry the loss scale"
    wanted = "2 of 2 linear layers: 0 has 20 inputs and 10 rows a batch, 2 has 10 rows a batch"
    assert named(found, "FP8 shapes").evidence == wanted


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the default GradScaler works here")
def test_scaler_that_disabled_itself(trials: dict[str, list[Finding]]) -> None:
    found = trials["gone"]
    scaler = named(found, "loss scaler")
    assert scaler.verdict == "fail" and "GradScaler('cuda') disabled itself" in scaler.evidence
    assert "GradScaler('cpu')" in str(scaler.remedy)
    assert bad(found) == {"loss scaler"}


@pytest.mark.slow
def test_fp16_parameters(trials: dict[str, list[Finding]]) -> None:
    """With an eps that is 0 there, and a scaler that refuses to unscale such gradients: the first step raises."""
    found = trials["half"]
    eps = named(found, "optimizer eps")
    assert eps.verdict == "fail" and "1e-08 for float16" in eps.evidence
    half = named(found, "fp16 parameters")
    parameters = (32 + 1) * 48 + (48 + 1) * 16
    assert half.verdict == "fail" and half.evidence.startswith(f"{parameters:,} of the parameters are float16")
    assert named(found, "runs").verdict == "fail" and "Attempting to unscale FP16" in named(found, "runs").evidence
    assert bad(found) == {"optimizer eps", "fp16 parameters", "runs"}


# -- the command ------------------------------------------------------------------------------------------------------
def run(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "LANG": "C.UTF-8", "TERM": "xterm-256color", **environ}
    env.update(PYTHONPATH=str(ROOT), XDG_STATE_HOME=str(folder / "state"), SYSFS_PATH=str(folder / "sys"))
    command = [sys.executable, "-m", "fp8console", "doctor", *words]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=120)


def test_command_without_a_gpu_and_without_torch(tmp_path: Path) -> None:
    bare = write(tmp_path / "python", f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    done = run(tmp_path, "--python", str(bare), "--json")
    assert done.returncode == 1 and done.stderr == ""
    said = json.loads(done.stdout)
    assert not said["passed"] and said["counts"]["fail"] == 1
    assert [f["name"] for f in said["findings"] if f["verdict"] == "fail"] == ["torch"]
    assert {f["group"] for f in said["findings"]} == {"device", "software", "environment", "access"}


def test_command_s_table_and_exit_status(tmp_path: Path) -> None:
    fake = write(
        tmp_path / "modules/torch/__init__.py", "__version__ = '2.9.1'\nclass version:\n    hip = cuda = None\n"
    )
    python = write(tmp_path / "python", f'#!/bin/sh\nPYTHONPATH={fake.parents[1]} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    done = run(tmp_path, "--python", str(python))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stdout and "0 fail" in done.stdout.splitlines()[-1]
    assert max(map(len, done.stdout.splitlines())) < 200


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--steps", "3"), "--steps needs a script"),
        (("--steps", "0", "train.py"), "must be a whole number from 1 up"),
        (("--python", "/nowhere/python"), "no such program"),
        (("--python",), "--python needs a value"),
        (("--frobnicate",), "unknown option --frobnicate"),
    ],
)
def test_words_that_make_no_sense(tmp_path: Path, words: tuple[str, ...], complaint: str, capsys) -> None:
    from fp8console.cli.main import main

    assert main(["doctor", *words]) == 2
    said = capsys.readouterr().err
    assert complaint in said and said.count("\n") == 1


def test_table_at_two_widths() -> None:
    found = [
        Finding("device", "FP8 formats", "warn", "no FP8 matrix hardware on gfx90a: " + "word " * 20, "train in BF16"),
        Finding("access", "groups", "not applicable", "no AMD card"),
    ]
    for width in (40, 80, 160):
        lines = doctor.table(found, width, False)
        assert max(map(len, lines)) <= width
        assert [line.strip() for line in lines].count("-> train in BF16") == 1
    plain = doctor.table(found, None, False)
    assert plain[0] == "device" and plain[1].startswith("  warn  FP8 formats  no FP8") and len(plain) == 6
    assert plain[-1] == "  n/a   groups       no AMD card"
    coloured = doctor.table(found, 160, True)
    assert "\x1b[33mwarn\x1b[0m" in coloured[1] and len(coloured) == len(plain)
