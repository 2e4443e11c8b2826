"""``fp8console events``: what happened in a run."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from fp8console.cli import wording
from fp8console.cli.arguments import Parser, UsageError, add_run
from fp8console.protocol.events import KINDS
from fp8console.protocol.numbers import dumps

POLL_SECONDS = 0.25
KINDS_HELP = "kinds:\n" + "\n".join(f"  {kind:<14}{text}" for kind, text in KINDS.items())


def main(words: Sequence[str]) -> int:
    """Prints a run's events, oldest first, one a line."""
    parser = Parser("events", "What happened in a run, oldest first.", KINDS_HELP)
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--follow", action="store_true", help="go on until the run ends")
    parser.add_argument("--kind", action="append", metavar="K", help="only this kind; may be given again")
    parser.add_argument("--all-ranks", action="store_true", help="also the other ranks' copies of what rank 0 says")
    given = parser.parse(words)
    for kind in given.kind or []:
        if kind not in KINDS:
            raise UsageError(f"events: unknown kind {kind!r}; known: {', '.join(KINDS)}")

    from fp8console.runs.find import resolve
    from fp8console.runs.reader import is_primary
    from fp8console.runs.run import Run
    from fp8console.runs.status import status

    run = Run(resolve(given.run))
    done = 0
    while True:
        # Asked before the events are read, so that the last ones of a run that ends meanwhile are still printed.
        over = status(run).state in ("finished", "failed", "lost")
        run.refresh()
        for event in run.events.arrived[done:]:
            if (given.all_ranks or is_primary(event)) and (not given.kind or event["kind"] in given.kind):
                print(dumps(event) if given.json else line(event))
        done = len(run.events.arrived)
        sys.stdout.flush()
        if over or not given.follow:
            return 0
        time.sleep(POLL_SECONDS)


def line(event: dict[str, Any]) -> str:
    """One event for people: time of day, step, kind, text."""
    step = wording.count(event["step"]) if event.get("step") is not None else ""
    when = time.strftime("%H:%M:%S", time.localtime(event["time"]))
    rank = f"[rank {event['rank']}] " if event.get("rank") else ""
    return f"{when}  {step:>11}  {event['kind']:<13}  {rank}{wording.printable(event.get('text'))}"
