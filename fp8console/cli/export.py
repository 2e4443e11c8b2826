"""``fp8console export``: step records for other programs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from fp8console.cli.arguments import CommandFailed, Parser, add_run, whole

HELP = """\
Columns: everything that was measured a step (step, time, duration, loss, grad_norm, ...), then the flags.
csv: unknown is empty, flags are 0 or 1; jsonl: unknown is null, flags are true or false. Numbers that are
not finite come as NaN, Infinity and -Infinity, in jsonl as strings: "NaN", "Infinity", "-Infinity".
With --layers: step, layer, kind (weight, gradient, activation, activation_gradient), then L2, amax, mean,
counts of non-finite values and elements, shares saturated and underflowed, headroom in bits, and the loss
scale that the values carry. A row for each layer and kind of every step that was sampled.
With --hardware: a row for each hardware sample and card (jsonl: an object a sample), with the balance over
the cards, the share of step time spent waiting for data, and what bounds the step, as of then.
With --stability: name, value and unit of each figure; jsonl: one object. The same that status shows.
"""


def main(words: Sequence[str]) -> int:
    """Writes a run's step records as CSV or JSON lines."""
    parser = Parser("export", "A run's step records, one row a step.", HELP)
    add_run(parser)
    parser.add_argument("--format", choices=("csv", "jsonl"), help="default: by FILE's name, else csv")
    parser.add_argument("-o", "--output", metavar="FILE", help="default: standard output")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--layers", action="store_true", help="the layers' statistics instead of the steps")
    instead.add_argument("--stability", action="store_true", help="the run's stability figures instead of its steps")
    instead.add_argument("--hardware", action="store_true", help="the hardware samples instead of the steps")
    parser.add_argument("--rank", type=whole, default=0, metavar="N", help="whose records (default 0)")
    given = parser.parse(words)
    form = given.format or ("jsonl" if (given.output or "").endswith((".jsonl", ".ndjson")) else "csv")

    from fp8console.protocol import paths
    from fp8console.runs.export import csv_lines, json_lines, layer_lines, stability_lines
    from fp8console.runs.find import resolve
    from fp8console.runs.layers import LayerRecords
    from fp8console.runs.reader import StepRecords

    run_dir = resolve(given.run)
    if given.hardware:
        from fp8console.runs.hardware_export import hardware_lines

        if not (run_dir / paths.HARDWARE).is_file():
            raise CommandFailed(f"export: {run_dir / paths.HARDWARE}: no hardware samples")
        return _write(hardware_lines(run_dir, form), given.output)
    path = (paths.layers_file if given.layers else paths.steps_file)(run_dir, given.rank)
    if not path.is_file():
        what = "statistics of layers" if given.layers else "step records"
        raise CommandFailed(f"export: {path}: no {what} of rank {given.rank}")
    layers = LayerRecords(run_dir, given.rank) if given.layers else None
    records = StepRecords(path)
    problem = records.problem if layers is None else layers.problem
    if problem is not None:
        raise CommandFailed(f"export: {problem}")
    if layers is not None:
        text = layer_lines(layers, form)
    elif given.stability:
        text = stability_lines(records, form)
    else:
        text = csv_lines(records) if form == "csv" else json_lines(records)
    return _write(text, given.output)


def _write(text: Iterable[str], output: str | None) -> int:
    if output is None or output == "-":
        sys.stdout.writelines(text)
        return 0
    try:
        with open(output, "w", encoding="utf-8", newline="") as file:
            file.writelines(text)
    except OSError as error:
        raise CommandFailed(f"export: {output}: {error.strerror}") from None
    return 0
