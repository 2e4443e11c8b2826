"""``fp8console ls``: the runs there are."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fp8console.cli import wording
from fp8console.cli.arguments import Parser, whole
from fp8console.protocol.numbers import dumps


def main(words: Sequence[str]) -> int:
    """Prints a table of runs, newest first, or their status as a JSON array."""
    parser = Parser("ls", "The runs there are, newest first.")
    parser.add_argument("-n", type=whole, default=20, metavar="N", help="at most so many (default 20, 0 for all)")
    parser.add_argument("--root", type=Path, metavar="DIR", help="folder of runs (default: the usual ones)")
    parser.add_argument("--json", action="store_true", help="an array of what `status --json` prints")
    given = parser.parse(words)

    from fp8console.protocol import paths
    from fp8console.runs.find import find_runs
    from fp8console.runs.run import Run
    from fp8console.runs.status import RunStatus, status

    found = find_runs(given.root)
    shown: list[RunStatus] = [status(Run(run_dir)) for run_dir in (found[: given.n] if given.n else found)]
    if given.json:
        print(dumps([one.to_json() for one in shown], indent=1))
        return 0
    if not found:
        print(f"no runs in {given.root or paths.state_root()}")
        return 0
    rows = [["id", "state", "step", "loss", "age", "command"]]
    for one in shown:
        age = wording.duration(time.time() - one.created) if one.created is not None else wording.UNKNOWN
        command = wording.printable(" ".join(one.command)) if one.command is not None else wording.UNKNOWN
        step = wording.count(one.step) if one.step is not None else "-"
        loss = wording.figure(one.loss) if one.step is not None else "-"
        rows.append([one.id, one.state, step, loss, age, command])
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in wording.table(rows, right=frozenset({2, 3, 4})):
        print(line[:width])
    if len(found) > len(shown):
        print(f"and {len(found) - len(shown):,} more: ls -n 0")
    return 0
