"""``fp8console attach``: open the console on a run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fp8console.cli.arguments import Parser, UsageError, add_run
from fp8console.cli.settings import gather
from fp8console.protocol import paths


def check_terminal() -> None:
    """Raises UsageError, one line, where the console can't draw."""
    term = os.environ.get("TERM", "")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("the console needs a terminal; without one: fp8console status, events, plot, ctl")
    if term in ("", "dumb", "unknown"):
        raise UsageError(
            f"the console can't draw on a terminal of type {term or 'unknown'!r} (TERM); "
            "set TERM, or use: fp8console status, events, plot, ctl"
        )


def main(words: Sequence[str]) -> int:
    """Opens the console on a run, which may have ended. Exit status 0 however it was left, 2 without a terminal."""
    parser = Parser("attach", "Open the console on a run, running or ended.")
    add_run(parser)
    parser.add_argument("--theme", help="name of a theme (default: the setting's)")
    given = parser.parse(words)
    settings = gather([("--theme", "theme", given.theme)] if given.theme is not None else [])

    from fp8console.runs.find import resolve

    run_dir = resolve(given.run)
    check_terminal()

    from fp8console.console.app import run_console

    left = run_console(run_dir, theme=settings.theme, refresh_hz=settings.refresh_hz)
    print(farewell(left, run_id(run_dir)))
    return 0


def run_id(run_dir: Path) -> str:
    """The id in run.json, which finds the run from anywhere; its folder's name when that can't be read."""
    try:
        return str(json.loads((run_dir / paths.RUN).read_text())["id"])
    except (OSError, ValueError, KeyError):
        return run_dir.name


def farewell(left: str, run_id: str) -> str:
    """The line printed after the console was left: ``left`` is what console.app.run_console returned."""
    if left == "stopped":
        return f"{run_id}: told to stop after a checkpoint; see: fp8console status {run_id}"
    if left == "killed":
        return f"{run_id}: told to end now; see: fp8console status {run_id}"
    if left == "ended":
        return f"{run_id} has ended; see: fp8console status {run_id}"
    return f"{run_id} goes on; come back with: fp8console attach {run_id}"
