"""One supervised run of a training for ``fp8console check``: started headless, followed quietly, ended cleanly."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8console.cli import supervised_run
from fp8console.cli.arguments import CommandFailed
from fp8console.cli.launch import say
from fp8console.cli.options import LaunchOptions

#: Seconds between two lines of progress where there is no terminal.
PLAIN_LINES = 10.0
#: Steps beyond the last after which a training that caught its end is ended by signals.
STEPS_BEYOND = 5


@dataclass(frozen=True)
class EndedRun:
    """A run that is over. ``error``: why it does not count, in one line, or None."""

    run_dir: Path
    run: Any
    status: int
    steps: int
    error: str | None


def run_training(what: str, training: list[str], options: LaunchOptions, steps: int) -> EndedRun:
    """Run ``training`` until it has ended or taken ``steps`` steps. Raises UsageError and CommandFailed.

    Ctrl-C reaches the training as an interrupt, its end is waited for, and KeyboardInterrupt goes on.
    """
    from fp8console.runs.run import Run

    run_id, run_dir = supervised_run.launch(training, options)
    say(f"{what}: run {run_id}")
    run = Run(run_dir)
    shown = _Progress(what, steps)
    try:
        status = _follow(run, shown, steps, options.settings.grace_seconds)
    except KeyboardInterrupt:
        shown.end()
        supervised_run.end(run, signal.SIGINT, options.settings.grace_seconds)
        say(f"interrupted; records of the {what}: {run_dir}")
        raise
    run.refresh()
    taken = min(len(run.rank(0)), steps)
    shown.show(taken)
    shown.end()
    return EndedRun(run_dir, run, status, taken, _error(run, status, taken))


def _follow(run: Any, shown: _Progress, steps: int, grace: float) -> int:
    from fp8console.cli.headless import exit_status

    late_since: float | None = None
    while True:
        run.refresh()
        taken = len(run.rank(0))
        status = exit_status(run)
        if status is not None:
            return status
        if supervised_run.is_lost(run.info):
            raise CommandFailed(f"check: the run is lost: its supervisor and its training are gone; {run.run_dir}")
        shown.show(min(taken, steps))
        if taken >= steps:
            late_since = late_since or time.monotonic()
            if taken > steps + STEPS_BEYOND or time.monotonic() - late_since > grace:
                supervised_run.end(run, signal.SIGTERM, grace)  # it caught the end, or hangs in it
        time.sleep(supervised_run.POLL)


def _error(run: Any, status: int, taken: int) -> str | None:
    for event in run.events.events:
        if event["kind"] == "fault" and event.get("part") in ("emulation", "boundary", "records", "probe"):
            return str(event["text"])
    if status != 0 and not taken:
        return _last_words(run, status)
    if status != 0 and not _ended_by_us(run):
        return _last_words(run, status)
    if not taken:
        notices = [str(event["text"]) for event in run.events.events if event["kind"] == "notice"]
        return f"no training step was seen{': ' + notices[-1] if notices else ''}"
    return None


def _ended_by_us(run: Any) -> bool:
    wanted = (run.info.get("settings") or {}).get("stop_after")
    return wanted is not None and len(run.rank(0)) >= wanted


def _last_words(run: Any, status: int) -> str:
    ends = [event for event in run.events.events if event["kind"] == "ended"]
    ended: dict[str, Any] = ends[-1] if ends else {}
    error = ended.get("error")
    return str(ended.get("text") or f"exit status {status}") + (f": {error}" if error else "")


class _Progress:
    """Steps taken, on stderr: one line that is written over on a terminal, else a line now and then."""

    def __init__(self, what: str, steps: int) -> None:
        self._what = what
        self._steps = steps
        self._terminal = sys.stderr.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
        self._next = 0.0
        self._last = -1

    def show(self, taken: int) -> None:
        now = time.monotonic()
        if taken == self._last or (now < self._next and taken < self._steps):
            return
        self._last, self._next = taken, now + (supervised_run.POLL if self._terminal else PLAIN_LINES)
        text = f"{self._what}: step {taken:,} of {self._steps:,}"
        if self._terminal:
            print(f"\r{text}", end="", file=sys.stderr, flush=True)
        else:
            say(text)

    def end(self) -> None:
        """Leave the line."""
        if self._terminal and self._last >= 0:
            print(file=sys.stderr, flush=True)
