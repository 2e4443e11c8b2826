"""Loss scalers against each other, simulated and in real trainings: ``python bench/stability.py [--quick] [--json]``.

Part 1 (scaler_simulation.py) knows each simulated training's edge and judges on the plane of skips and distance from
it. Part 2 (training_grid.py) trains the samples with their gradients in each FP8 format. Part 3 is the failure worth
showing, taken from the rows of part 2. ``--report`` writes the tables of docs/stability.md, ``--picture`` the plane.
Exit status 1 when a figure misses what was to be reached: nothing here depends on the machine's speed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import scaler_simulation
import stability_report
import torch
import training_grid

SEEDS = [11, 12, 13, 14, 15]


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="under a minute: fewer steps, seeds and formats")
    parser.add_argument("--part", type=int, choices=(1, 2), action="append", help="only this part; may be given again")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="trainings at a time")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep rows there, and take up what is there already"
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="put the tables there, as Markdown")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write the plane of part 1, as SVG")
    return parser.parse_args(words)


def say(text: str) -> None:
    if sys.stderr.isatty() or "FP8CONSOLE_BENCH_PROGRESS" in os.environ:
        print(text, file=sys.stderr, flush=True)


def simulated(args: argparse.Namespace) -> list[dict[str, Any]]:
    kept = args.keep / "simulation.jsonl" if args.keep else None
    if kept is not None and kept.exists():
        return [json.loads(line) for line in kept.read_text().splitlines()]
    steps, seeds = (2_000, args.seeds[:1]) if args.quick else (200_000, args.seeds)
    rows = scaler_simulation.simulate(
        steps, seeds, lambda step: say(f"simulation {step}/{steps}") if step % 10_000 == 0 else None
    )
    if kept is not None:
        kept.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def trained(args: argparse.Namespace) -> list[dict[str, Any]]:
    listed = training_grid.cells(args.seeds)
    if args.quick:
        listed = [
            cell
            for cell in training_grid.cells(args.seeds[:1], 60, ("digits_cnn",))
            if cell.reduction == "sum" and cell.precision in ("bf16", "fp8-e5m2", "fp8-e4m3-saturating")
        ]
    kept = args.keep / "trainings.jsonl" if args.keep else None
    return training_grid.run(
        listed,
        kept,
        args.jobs,
        lambda done, row: say(
            f"training {done}/{len(listed)}: {row['sample']} {row['precision']} {row['reduction']} {row['scaler']} "
            f"seed {row['seed']}: loss {row['final_loss']:.4f}, {row['skips']} skips"
        ),
    )


def put_tables(page: Path, tables: str) -> None:
    """Write the tables between the page's two markers, or as a page of their own where there are none."""
    text = page.read_text() if page.exists() else ""
    before, start, rest = text.partition("<!-- tables -->\n")
    _, end, after = rest.partition("<!-- end of tables -->")
    page.write_text(f"{before}{start}\n{tables}\n{end}{after}" if start and end else tables)


def main() -> int:
    args = parse()
    torch.set_num_threads(1)
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
    parts = args.part or [1, 2]
    figures: list[dict[str, Any]] = []
    simulation = simulated(args) if 1 in parts else []
    trainings = trained(args) if 2 in parts else []
    if simulation:
        figures += stability_report.plane_figures(simulation)
    if trainings:
        figures += stability_report.training_figures(trainings)
    machine = (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"
    )
    seeds = args.seeds[:1] if args.quick else args.seeds
    about = {"machine": machine, "date": time.strftime("%Y-%m-%d"), "seeds": seeds}
    if args.report:
        put_tables(args.report, stability_report.tables(simulation, trainings, about))
    if args.picture:
        args.picture.write_text(stability_report.plane(simulation, seeds))
    status = int(any(item["within"] is False for item in figures))
    if args.json:
        print(json.dumps({"figures": figures, **about, "simulation": simulation, "trainings": trainings}))
        return status
    print(f"{machine}; seeds {', '.join(map(str, seeds))}")
    for item in figures:
        mark = {True: "within", False: "OVER", None: ""}[item["within"]]
        value = "unknown" if item["value"] is None else f"{item['value']:.6g}"
        print(f"{item['name']:84} {value:>10} {item['unit']:10} {item['budget']:12} {mark}")
    return status


if __name__ == "__main__":
    sys.exit(main())
