"""``fp8console check``: real processes, real trainings, and faults that it has to find."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import running

from fp8console.protocol import identity

CHAR_GPT = str(running.ROOT / "sample_models" / "char_gpt.py")
STEPS = 6


def check(folder: Path, *words: str, **more: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, the JSON object, and stderr."""
    done = running.fp8console(folder, "check", "--json", *words, **more)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def verdicts(found: dict[str, Any]) -> dict[str, str]:
    return {f"{case['group']}: {case['name']}": case["verdict"] for case in found["cases"]}


# -- the device -------------------------------------------------------------------------------------------------------
def test_the_cpu_passes_and_a_junit_file_says_so(tmp_path: Path) -> None:
    junit = tmp_path / "out.xml"
    done = running.fp8console(tmp_path, "check", "--device", "cpu", "--format", "e5m2", "--junit", str(junit))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CPU (cpu), torch" in done.stdout and "all 8 checks passed" in done.stdout
    assert done.stdout.count(" passed ") + done.stdout.count(" passed\n") >= 8
    suite = ElementTree.parse(junit).getroot().find("testsuite")
    assert suite is not None and suite.get("tests") == "8" and suite.get("failures") == suite.get("errors") == "0"


def python_with(folder: Path, patch: str) -> str:
    """An interpreter whose torch is spoilt by a sitecustomize of its own."""
    site = folder / "spoilt"
    site.mkdir()
    (site / "sitecustomize.py").write_text(patch)
    wrapper = folder / "python-spoilt"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" "$@"\n')
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    return str(wrapper)


SPOILT_PRODUCT = """
import torch
original = torch._scaled_mm
def spoilt(a, b, **how):
    result = original(a, b, **how)
    if result.shape == (32, 48):
        result[5, 7] = float("nan")
    return result
torch._scaled_mm = spoilt
"""


def test_a_library_that_returns_nan_is_found(tmp_path: Path) -> None:
    words = ("--python", python_with(tmp_path, SPOILT_PRODUCT), "--device", "cpu", "--format", "e4m3")
    status, found, _ = check(tmp_path, *words)
    bad = {each["name"]: each for each in found["checks"] if each["verdict"] != "passed"}
    # (32, 48) is the weight gradient of one shape, (outputs, inputs) = (16, 48) and (32, 16) of the others are not.
    assert status == 1 and not found["passed"] and bad
    assert {each["verdict"] for each in bad.values()} == {"nonfinite"}
    assert all("non-finite for finite inputs" in each["detail"] and "[5, 7]" in each["detail"] for each in bad.values())


def test_a_library_that_crashes_is_a_case_of_its_own(tmp_path: Path) -> None:
    patch = "import os, torch\ndef crash(*words, **how):\n    os.abort()\ntorch._scaled_mm = crash\n"
    junit = tmp_path / "out.xml"
    words = ("--python", python_with(tmp_path, patch), "--device", "cpu", "--format", "e5m2", "--junit", str(junit))
    done = running.fp8console(tmp_path, "check", *words)
    assert done.returncode == 1 and "SIGABRT" in done.stdout and "1 of " in done.stdout, done.stdout
    suite = ElementTree.parse(junit).getroot().find("testsuite")
    assert suite is not None and suite.get("errors") == "1"


def test_a_library_that_hangs_is_ended(tmp_path: Path) -> None:
    patch = "import time, torch\ntorch._scaled_mm = lambda *words, **how: time.sleep(600)\n"
    words = ("--python", python_with(tmp_path, patch), "--device", "cpu", "--format", "e5m2", "--timeout", "3")
    status, found, _ = check(tmp_path, *words)
    assert status == 1 and [each["verdict"] for each in found["checks"]] == ["passed"] * 3 + ["crashed"]
    assert (found["checks"][-1]["group"], found["checks"][-1]["name"]) == ("products", "start")
    assert "no result within 3 s" in found["checks"][-1]["detail"]


@pytest.mark.parametrize(
    "words, says",
    [
        (["--device", "cuda"], "sees no GPU"),
        (["--device", "gpu"], "--device must be cpu, cuda or cuda:N, not 'gpu'"),
        (["--python", "nowhere/python"], "no such program"),
        (["--junit", "nowhere/out.xml"], "no such folder"),
    ],
)
def test_what_cannot_be_checked_gets_one_line(words: list[str], says: str, tmp_path: Path) -> None:
    done = running.fp8console(tmp_path, "check", *words, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and says in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


# -- trainings --------------------------------------------------------------------------------------------------------
def test_char_gpt_in_fp8_stays_with_itself(tmp_path: Path) -> None:
    junit = tmp_path / "out.xml"
    words = ("--steps", str(STEPS), "--keep", "head", "--junit", str(junit), CHAR_GPT, "--batch-size", "4")
    status, found, stderr = check(tmp_path, *words)
    assert status == 0 and found["passed"], found["cases"]
    assert set(verdicts(found).values()) == {"passed"} and len(found["cases"]) == 10
    assert [run["steps"] for run in found["runs"]] == [STEPS, STEPS]
    loss = found["comparison"]["loss"]
    # Rounded, so not equal; FP8's rounding of a layer averages out in a loss.
    assert 0 < loss["final"] < 0.01 and 0 < loss["first"] < 0.01
    events = running.Run(tmp_path, Path(found["runs"][1]["run_dir"])).events("emulation", 0)
    assert len(events[0]["layers"]) == 12 and events[0]["left"] == ["head"]
    names = {error["name"] for error in found["comparison"]["layers"]}
    assert "blocks.0.expand" in names and found["comparison"]["layer_steps"] >= STEPS - 1
    for run in found["runs"]:
        info = running.Run(tmp_path, Path(run["run_dir"])).info()
        assert info["exit_status"] == 0 and len(running.Run(tmp_path, Path(run["run_dir"])).records()) == STEPS
    suite = ElementTree.parse(junit).getroot().find("testsuite")
    assert suite is not None and suite.get("tests") == "10" and suite.get("failures") == "0"


def test_the_layer_that_is_wrong_is_named_and_scripts_that_catch_their_end_are_ended(tmp_path: Path) -> None:
    words = ("--steps", str(STEPS), "--candidate-args", "--wrong-forward third", running.training("drifting"))
    status, found, _ = check(tmp_path, *words, "--catch-exit", "--steps", "100000000")
    assert status == 1 and verdicts(found)["layers: errors"] == "failed"
    drift, fault = found["comparison"]["drift"], found["comparison"]["fault"]
    assert drift == fault and (drift["name"], drift["kind"]) == ("third", "activation")
    assert drift["error"] == pytest.approx(0.5, abs=1e-3)
    assert verdicts(found)["sameness: weights at the start"] == "passed"
    assert verdicts(found)["sameness: inputs of the first steps"] == "passed"
    assert [run["steps"] for run in found["runs"]] == [STEPS, STEPS]
    assert found["comparison"]["loss"]["steps"] == STEPS


def test_nan_in_the_candidate_is_placed_and_other_data_is_told_from_drift(tmp_path: Path) -> None:
    fault = "--nan-in second --nan-at 4 --unseeded-data"
    words = ("--steps", str(STEPS), "--candidate-args", fault, running.training("drifting"))
    done = running.fp8console(tmp_path, "check", *words)
    assert done.returncode == 1, done.stderr
    assert "the candidate's loss is not finite at step 4; first in layer second, activation, at step 4" in done.stdout
    assert "weights at the start       passed" in done.stdout
    assert "not the same from step 1: the script draws from a generator that no seed reaches" in done.stdout
    assert "\nnot within the limits: sameness: inputs of the first steps, " in done.stdout
    run_dirs = list((tmp_path / "state" / "fp8console" / "runs").iterdir())
    assert len(run_dirs) == 2 and all(str(run_dir) in done.stdout for run_dir in run_dirs)


def test_a_script_that_fails_is_not_compared(tmp_path: Path) -> None:
    status, found, _ = check(tmp_path, "--steps", "50", running.training("endings"), "raise")
    assert status == 1 and len(found["runs"]) == 1 and found["comparison"] is None
    assert verdicts(found) == {"training: reference runs": "crashed"}
    assert "RuntimeError: the loss went to the moon" in found["cases"][0]["detail"]


def test_ctrl_c_ends_the_run_and_says_where_it_is(tmp_path: Path) -> None:
    words = ["check", "--steps", "100000", running.training("drifting"), "--steps", "1000000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "fp8console", *words],
        env=running.environment(tmp_path),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    runs = tmp_path / "state" / "fp8console" / "runs"
    try:
        end = time.monotonic() + 60
        while not any(running.Run(tmp_path, path).records() for path in runs.glob("*")):
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
    (run_dir,) = runs.glob("*")
    assert process.returncode == 130 and f"records of the reference: {run_dir}" in err and "Traceback" not in err
    info = running.Run(tmp_path, run_dir).info()
    assert info["exit_status"] is not None
    who = identity.ProcessIdentity.from_json(info["training"])
    assert who is not None and not identity.is_alive(who)
