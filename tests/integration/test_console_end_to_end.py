"""One command, a real terminal, a real training: launch, watch, steer with keys, detach, attach, stop."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pexpect
import pyte
import running

SCRIPT = str(running.ROOT / "sample_models" / "char_gpt.py")


class Terminal:
    """A command in a pseudo-terminal, seen through a terminal emulator."""

    def __init__(self, folder: Path, *words: str, size: tuple[int, int] = (160, 45)) -> None:
        env = running.environment(folder, TERM="xterm-256color", COLORTERM="truecolor", LANG="C.UTF-8")
        command = ["-m", "fp8console", *words]
        self.child = pexpect.spawn(sys.executable, command, env=env, cwd=str(folder), dimensions=size[::-1], timeout=30)
        self.screen = pyte.Screen(*size)
        self._stream = pyte.ByteStream(self.screen)

    def until(self, pattern: str, seconds: float = 60, true: Callable[[str], bool] = bool) -> re.Match[str]:
        """Read until the screen holds a match of ``pattern``."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                self._stream.feed(self.child.read_nonblocking(1 << 16, timeout=0.2))
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                break
            found = re.search(pattern, "\n".join(self.screen.display))
            if found and true(found[0]):
                return found
        raise AssertionError(f"{pattern!r} did not appear:\n" + "\n".join(self.screen.display))

    def press(self, keys: str) -> None:
        self.child.send(keys)


def test_launch_watch_steer_detach_attach_stop(tmp_path: Path, started: list[running.Run]) -> None:
    words = ("--run-dir", str(tmp_path / "run"), SCRIPT, "--precision", "fp8-e5m2", "--steps", "100000")
    terminal = Terminal(tmp_path, *words)
    terminal.until(r"● running +step [1-9]\d")
    run = running.Run(tmp_path, tmp_path / "run")
    started.append(run)

    terminal.press(" ")
    paused = int(terminal.until(r"paused at step ([\d,]+)")[1].replace(",", ""))
    assert run.status()["state"] == "paused" and run.records()[-1]["step"] == paused
    terminal.press("n")
    terminal.until(rf"paused at step {paused + 1:,}")
    terminal.press("-")
    terminal.until(r"applied at step [\d,]+: set scale=/2")
    terminal.press(" ")
    terminal.until(r"● running")

    terminal.press("r")
    terminal.until(r"enter roll back")
    terminal.press("\r")
    terminal.until(r"rolled back to [\d,]+")
    assert run.events("rolled_back", rank=0)[-1]["digests_equal"] is True

    terminal.press("d")
    terminal.child.expect(pexpect.EOF)
    terminal.child.close()
    assert terminal.child.exitstatus == 0
    step = run.records()[-1]["step"]
    run.wait_for_step(step + 3)  # nobody watches, and it goes on

    again = Terminal(tmp_path, "attach", str(run.run_dir), size=(80, 24))
    again.until(r"● running")
    again.press("q")
    again.until(r"detach +")
    again.press("\x1b[B\r")  # one down: stop
    again.child.expect(pexpect.EOF)
    assert run.wait_for_end() == 0
    assert run.status()["state"] == "finished"
    assert any(point["kind"] == "checkpoint" for point in run.status()["restore_points"])


def test_a_crash_stays_on_the_screen_with_its_traceback(tmp_path: Path, started: list[running.Run]) -> None:
    terminal = Terminal(tmp_path, "--run-dir", str(tmp_path / "run"), running.training("endings"), "raise")
    terminal.until(r"✗ failed, exit 1: RuntimeError: the loss went to the moon")
    terminal.until(r"Traceback \(most recent call last\)")
    started.append(running.Run(tmp_path, tmp_path / "run"))
    terminal.press("q")
    terminal.child.expect(pexpect.EOF)
    terminal.child.close()
    assert terminal.child.exitstatus == 1


def test_a_dumb_terminal_is_refused_and_the_training_runs(tmp_path: Path) -> None:
    env = running.environment(tmp_path, TERM="dumb")
    words = ["-m", "fp8console", "--run-dir", str(tmp_path / "run"), running.training("endings"), "exit3"]
    child = pexpect.spawn(sys.executable, words, env=env, cwd=str(tmp_path), timeout=60)
    child.expect("terminal dumb can't show the console")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 3
    assert json.loads((tmp_path / "run" / "run.json").read_text())["exit_status"] == 3
