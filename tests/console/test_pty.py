"""The console on a real pseudo-terminal, seen through a terminal emulator."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pexpect
import pyte
import pytest
from synthetic import SyntheticRun

Make = Callable[..., SyntheticRun]
ROOT = Path(__file__).parents[2]
CODE = (
    "import pathlib, sys; from fp8console.console.app import run_console; "
    "print('left:', run_console(pathlib.Path(sys.argv[1])))"
)


class Terminal:
    """A console in a terminal of some size."""

    def __init__(self, run_dir: Path, width: int, height: int, **environment: str) -> None:
        settings = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLORTERM": "truecolor"}
        self.child = pexpect.spawn(
            sys.executable,
            ["-c", CODE, str(run_dir)],
            env={**settings, **environment},  # type: ignore[arg-type]
            dimensions=(height, width),
            timeout=20,
        )
        self.screen = pyte.Screen(width, height)
        self.stream = pyte.ByteStream(self.screen)
        self.raw = b""

    def until(self, words: str, true: Callable[[str], bool] = bool, seconds: float = 20.0) -> str:
        """Read until the words are on the screen and ``true`` holds for it; the screen as text."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                data = self.child.read_nonblocking(65536, timeout=0.2)
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                break
            self.raw += data
            self.stream.feed(data)
            seen = "\n".join(self.screen.display)
            if words in seen and true(seen):
                return seen
        raise AssertionError(f"{words!r} did not appear:\n" + "\n".join(self.screen.display))


@pytest.mark.parametrize("size", [(160, 45), (80, 24)])
def test_first_paint_help_detach(make_run: Make, size: tuple[int, int]) -> None:
    run = make_run(800, eventfully=True)
    terminal = Terminal(run.run_dir, *size)
    seen = terminal.until("step 800", lambda seen: any(0x2800 < ord(character) < 0x2900 for character in seen))
    assert "● running" in seen
    terminal.child.send("?")
    terminal.until("space    pause at the next step")
    terminal.child.send("\x1b")
    terminal.until("┌ loss")
    terminal.child.send("d")
    terminal.child.expect("left: detached")
    terminal.child.expect(pexpect.EOF)


def test_told_to_end_it_puts_the_terminal_back(make_run: Make) -> None:
    terminal = Terminal(make_run(800).run_dir, 80, 24)
    terminal.until("step 800")
    terminal.child.kill(signal.SIGTERM)
    terminal.child.expect("left: detached")
    assert b"\x1b[?1049l" in terminal.child.before  # out of the alternate screen


def test_a_plain_locale_gets_plain_characters(make_run: Make) -> None:
    run = make_run(800, eventfully=True)
    terminal = Terminal(run.run_dir, 80, 24, LC_ALL="C")
    seen = terminal.until("step 800")
    assert seen.isascii()
    terminal.child.send("d")
    terminal.child.expect(pexpect.EOF)


def test_no_color_sends_no_colour(make_run: Make) -> None:
    run = make_run(800, eventfully=True)
    terminal = Terminal(run.run_dir, 80, 24, NO_COLOR="1")
    terminal.until("step 800")
    assert b"\x1b[38;" not in terminal.raw
    assert b";38;" not in terminal.raw
    terminal.child.send("d")
    terminal.child.expect(pexpect.EOF)


def test_a_closed_terminal_ends_the_console(make_run: Make) -> None:
    run = make_run(100)
    terminal = Terminal(run.run_dir, 80, 24)
    terminal.until("step 100")
    terminal.child.kill(signal.SIGHUP)
    terminal.child.expect(pexpect.EOF)
    terminal.child.wait()
    assert terminal.child.signalstatus == signal.SIGHUP
