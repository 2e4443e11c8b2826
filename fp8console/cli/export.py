"""``fp8console export``: step records for other programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fp8console.cli.arguments import CommandFailed, Parser, add_run, whole

HELP = """\
Columns: everything that was measured a step (step, time, duration, loss, grad_norm, ...), then the flags.
csv: unknown is empty, flags are 0 or 1; jsonl: unknown is null, flags are true or false. Numbers that are
not finite come as NaN, Infinity and -Infinity, in jsonl as strings: "NaN", "Infinity", "-Infinity".
"""


def main(words: Sequence[str]) -> int:
    """Writes a run's step records as CSV or JSON lines."""
    parser = Parser("export", "A run's step records, one row a step.", HELP)
    add_run(parser)
    parser.add_argument("--format", choices=("csv", "jsonl"), help="default: by FILE's name, else csv")
    parser.add_argument("-o", "--output", metavar="FILE", help="default: standard output")
    parser.add_argument("--rank", type=whole, default=0, metavar="N", help="whose records (default 0)")
    given = parser.parse(words)
    form = given.format or ("jsonl" if (given.output or "").endswith((".jsonl", ".ndjson")) else "csv")

    from fp8console.protocol import paths
    from fp8console.runs.export import csv_lines, json_lines
    from fp8console.runs.find import resolve
    from fp8console.runs.reader import StepRecords

    path = paths.steps_file(resolve(given.run), given.rank)
    if not path.is_file():
        raise CommandFailed(f"export: {path}: no step records of rank {given.rank}")
    records = StepRecords(path)
    if records.problem is not None:
        raise CommandFailed(f"export: {records.problem}")
    text = csv_lines(records) if form == "csv" else json_lines(records)
    if given.output in (None, "-"):
        sys.stdout.writelines(text)
        return 0
    try:
        with open(given.output, "w", encoding="utf-8", newline="") as file:
            file.writelines(text)
    except OSError as error:
        raise CommandFailed(f"export: {given.output}: {error.strerror}") from None
    return 0
