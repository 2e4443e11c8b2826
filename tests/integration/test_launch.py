"""Launching: as under plain python, and one clear line where something is in the way."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import running


@pytest.mark.parametrize("how, status", [("ok", 0), ("exit3", 3), ("raise", 1), ("kill", 137)])
def test_endings_are_as_under_plain_python(how: str, status: int, tmp_path: Path) -> None:
    plain = running.plain(tmp_path / "plain", running.training("endings"), how)
    run = running.run(tmp_path / "console", running.training("endings"), how)
    assert run.result is not None and run.result.returncode == status
    assert plain.returncode == (status if how != "kill" else -9)
    # One file holds both streams; in which order they were written is the only difference.
    assert sorted(run.output().splitlines()) == sorted((plain.stdout + plain.stderr).splitlines())
    assert run.result.stdout == run.output()
    assert len(run.records()) == 5  # the kill comes right after the fifth step: nothing is lost
    if how == "raise":
        assert run.info()["error"] == "RuntimeError: the loss went to the moon"
        assert run.status()["state"] == "failed"


def test_module_and_other_launchers(tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(Path(running.training("endings")).read_text())
    module = running.fp8console(tmp_path, "--run-dir", str(tmp_path / "m"), "-m", "pkg.train", "exit3")
    assert module.returncode == 3, module.stderr
    shell = ["--", "sh", "-c", f'exec "{sys.executable}" "{running.training("endings")}" exit3']
    other = running.fp8console(tmp_path, "--run-dir", str(tmp_path / "s"), *shell)
    assert other.returncode == 3, other.stderr
    assert len(running.Run(tmp_path, tmp_path / "s").records()) == 5


def test_an_existing_sitecustomize_still_runs(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text(
        "import sys\nprint('their sitecustomize', sys.modules[__name__].__file__)\n"
    )
    path = os.pathsep.join([str(theirs), str(running.ROOT)])
    run = running.run(tmp_path / "run", running.training("endings"), "ok", PYTHONPATH=path)
    assert f"their sitecustomize {theirs}" in run.output()
    assert len(run.records()) == 5


def test_detach_prints_an_id_that_finds_the_run(tmp_path: Path, started: list[running.Run]) -> None:
    done = running.fp8console(tmp_path, "--detach", running.training("endings"), "ok")
    assert done.returncode == 0 and len(done.stdout.split()) == 1
    run_id = done.stdout.strip()
    run = running.Run(tmp_path, tmp_path / "state" / "fp8console" / "runs" / run_id)
    started.append(run)
    assert run.wait_for_end() == 0
    for word in (run_id, run_id[-6:], "newest"):
        status = json.loads(running.fp8console(tmp_path, "status", word, "--json").stdout)
        assert status["id"] == run_id and status["exit_status"] == 0 and status["state"] == "finished"


def one_line(text: str) -> str:
    lines = text.strip().splitlines()
    assert len(lines) == 1, text
    return lines[0]


def test_clear_lines_before_anything_starts(tmp_path: Path) -> None:
    missing = running.fp8console(tmp_path, "nowhere.py")
    assert missing.returncode == 2 and "nowhere.py" in one_line(missing.stderr)
    (tmp_path / "broken.py").write_text("x = 1\nif x\n    pass\n")
    broken = running.fp8console(tmp_path, "broken.py")
    assert broken.returncode == 1 and "line 2" in one_line(broken.stderr)
    no_python = running.fp8console(tmp_path, "--python", "/nowhere/python", running.training("endings"), "ok")
    assert no_python.returncode == 2 and "/nowhere/python" in one_line(no_python.stderr)
    no_program = running.fp8console(tmp_path, "--", "no-such-launcher", "train.py")
    assert no_program.returncode == 127 and "no-such-launcher" in one_line(no_program.stderr)
    file = tmp_path / "file"
    file.write_text("")
    bad_dir = running.fp8console(tmp_path, "--run-dir", str(file / "run"), running.training("endings"), "ok")
    assert bad_dir.returncode == 2 and "--run-dir" in one_line(bad_dir.stderr)


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write anywhere")
def test_an_unwritable_home_falls_back_and_says_so(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
    done = running.fp8console(tmp_path, running.training("endings"), "ok", TMPDIR=str(tmp_path))
    assert done.returncode == 0 and "using" in done.stderr


def test_a_state_folder_that_is_a_file_falls_back_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("in the way")
    done = running.fp8console(tmp_path, running.training("endings"), "ok", TMPDIR=str(tmp_path))
    assert done.returncode == 0 and "using" in done.stderr, done.stderr


def test_a_script_without_torch_runs_and_is_said_to_be_unmeasured(tmp_path: Path) -> None:
    run = running.run(tmp_path, running.training("no_torch"))
    assert run.result is not None and run.result.returncode == 0
    assert run.output() == "no torch here\n"
    assert "imported torch" in run.result.stderr
    assert run.status()["step"] is None


def test_a_script_that_never_steps_is_said_so(tmp_path: Path) -> None:
    run = running.run(tmp_path, running.training("never_steps"))
    assert run.result is not None and run.result.returncode == 0
    assert [event["part"] for event in run.events("notice", rank=0)] == ["boundary"]


def test_a_torch_too_old_runs_unharmed_and_is_said_so(tmp_path: Path) -> None:
    fake = tmp_path / "old"
    (fake / "torch").mkdir(parents=True)
    (fake / "torch" / "__init__.py").write_text("__version__ = '2.1.0'\n")
    (tmp_path / "script.py").write_text("import torch\nprint(torch.__version__)\n")
    path = os.pathsep.join([str(fake), str(running.ROOT)])
    run = running.run(tmp_path / "r", str(tmp_path / "script.py"), PYTHONPATH=path)
    assert run.result is not None and run.result.returncode == 0 and run.output() == "2.1.0\n"
    assert any("too old" in event["text"] for event in run.events("notice"))


def test_an_interpreter_without_torch_is_said_so(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    python = tmp_path / "bare" / "bin" / "python"
    run = running.run(
        tmp_path / "r", running.training("no_torch"), options=("--python", str(python)), PYTHONPATH=str(running.ROOT)
    )
    assert run.result is not None and run.result.returncode == 0, run.result.stderr
    assert "no torch in" in run.result.stderr and "--python" in run.result.stderr


def test_a_talkative_script_is_neither_slowed_nor_cut(tmp_path: Path) -> None:
    """Its output goes to a file: every line arrives, however many a second, and no reader can hold it up."""
    run = running.run(tmp_path, running.training("chatty"), "3")
    assert run.result is not None and run.result.returncode == 0
    lines = run.output().splitlines()
    printed, steps = (int(word) for word in lines[-1].split() if word.isdigit())
    assert len(lines) == printed + 1 and printed > 10_000
    assert len(run.records()) == steps
    assert run.result.stdout == run.output()


def test_headless_hands_sigterm_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fp8console", "--run-dir", str(tmp_path / "run"), running.training("chatty"), "60"]
    process = subprocess.Popen(
        command, env=running.environment(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    run = running.Run(tmp_path, tmp_path / "run")
    run.wait_until(lambda: (tmp_path / "run" / "steps.0.rec").exists() and len(run.records()) > 3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143
    assert run.info()["signal"] == "SIGTERM"


def test_a_pipe_on_stdin_reaches_the_training(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fp8console", "--run-dir", str(tmp_path / "run"), "--"]
    command += [sys.executable, "-c", "import sys; print('read', sys.stdin.read())"]
    done = subprocess.run(
        command, env=running.environment(tmp_path), input="hello", capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and done.stdout == "read hello\n", done.stderr


def test_a_full_disk_costs_records_and_output_and_not_the_training(tmp_path: Path) -> None:
    """A run directory on a small file system that fills up while the script prints and steps."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("needs to mount a small file system, which this user may not")
    try:
        command = ["--run-dir", str(disk / "run"), "--checkpoint-minutes", "0", running.training("chatty"), "6"]
        done = running.fp8console(tmp_path, *command)
        run = running.Run(tmp_path, disk / "run")
        assert done.returncode == 0, done.stderr
        assert "exit status 0" in done.stderr
        ended = run.events("ended") or [run.info()]
        assert ended[-1]["exit_status"] == 0
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


def test_a_training_that_hangs_is_not_shown_at_full_speed(tmp_path: Path, started: list[running.Run]) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(
        "import time, torch\nw = torch.nn.Parameter(torch.ones(2)); o = torch.optim.SGD([w], lr=0.1)\n"
        "for _ in range(30):\n    o.zero_grad(); w.sum().backward(); o.step(); time.sleep(0.01)\ntime.sleep(600)\n"
    )
    run = running.start(tmp_path / "r", str(script))
    started.append(run)
    run.wait_for_step(30)
    assert run.status()["silent_seconds"] is None and run.status()["steps_per_second"] > 1
    run.wait_until(lambda: run.status()["silent_seconds"], 40, "the silence")
    now = run.status()
    assert now["state"] == "running" and now["steps_per_second"] is None and now["silent_seconds"] >= 10
    assert any("no step for" in note for note in now["notes"])
