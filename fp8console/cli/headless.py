"""Without a terminal: output goes through, a progress line comes every few seconds, signals are handed on."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from fp8console.cli.launch import say
from fp8console.protocol import identity, paths

#: Seconds between two looks at the run directory.
POLL = 0.1


def follow(run_dir: Path) -> int:
    """Stay with a run until it ends; returns the training's exit status (1 when the run is lost)."""
    from fp8console.protocol.settings import from_json
    from fp8console.runs.run import Run

    run = Run(run_dir)
    run.refresh()
    settings = from_json(run.info.get("settings"))
    run_id = run.info.get("id", run_dir.name)
    say(f"run {run_id}; from another terminal: fp8console attach {run_id}")
    signals = _Signals(run)
    people = run.info
    next_line = time.monotonic() + settings.progress_seconds
    with open(run_dir / paths.OUTPUT, "rb") as output:
        while True:
            _pass_on(output)
            run.refresh()
            status = exit_status(run)
            if status is not None:
                _pass_on(output)
                break
            people = run.info or people  # as last read: the run directory may be gone while the training runs on
            if _lost(people):
                say("the run is lost: its supervisor and its training are gone, and no exit status was written")
                return 1
            if time.monotonic() >= next_line:
                next_line = time.monotonic() + settings.progress_seconds
                say(progress_line(run))
            time.sleep(POLL)
    signals.restore()
    say(progress_line(run))
    for event in run.events.events:
        if event.get("kind") == "ended":
            say(str(event["text"]) + (f": {event['error']}" if event.get("error") else ""))
        elif event.get("kind") == "notice" and event.get("part") == "probe":
            say(str(event["text"]))
    return status


def exit_status(run: Any) -> int | None:
    """The training's exit status, from run.json or, where a full disk kept it out of there, from its last event."""
    known = run.info.get("exit_status")
    for event in reversed(run.events.events):
        if known is None and event.get("kind") == "ended":
            known = event.get("exit_status")
    return None if known is None else int(known)


def progress_line(run: Any) -> str:
    """One line: step, loss, gradient norm, loss scale, skips, speed; unknown where unknown."""
    from fp8console.cli.wording import loss_scale
    from fp8console.runs.status import status

    now = status(run)
    if not now.step:
        return f"{now.state}, no step yet"
    total = f"/{now.total_steps:,}" if now.total_steps else ""
    words = [f"{now.state}, step {now.step:,}{total}", f"loss {_number(now.loss)}"]
    words.append(f"gradient norm {_number(now.grad_norm)}")
    if now.scale is not None:
        words.append(f"loss scale {loss_scale(now.scale)}")
    words.append(f"{now.skipped} skipped")
    if now.silent_seconds is not None:
        words.append(f"no step for {now.silent_seconds:.0f} s")
    elif now.steps_per_second:
        words.append(f"{now.steps_per_second:.1f} steps/s")
    return ", ".join(words)


def _number(value: float | None) -> str:
    if value is None:
        return "unknown"
    if math.isnan(value):
        return "NaN"
    return f"{value:.4g}"


def _pass_on(output: Any) -> None:
    while chunk := output.read(1 << 16):
        try:
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            # The reader has left; the training goes on, and so does this process, which owes its exit status.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _lost(info: dict[str, Any]) -> bool:
    people = [identity.ProcessIdentity.from_json(info.get(name)) for name in ("supervisor", "training")]
    return all(who is not None and not identity.is_alive(who) for who in people)


class _Signals:
    """Ctrl-C and SIGTERM reach the training as they would without the console in between."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self._before = {number: signal.signal(number, self._hand_on) for number in (signal.SIGINT, signal.SIGTERM)}

    def _hand_on(self, number: int, frame: Any) -> None:
        who = identity.ProcessIdentity.from_json(self._run.info.get("training"))
        if who is not None:
            identity.send_signal(who, signal.Signals(number), group=True)

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
