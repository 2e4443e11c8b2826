"""What bench/stability.py found, as figures, as Markdown tables and as a picture."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from typing import Any

import scaler_simulation
from training_grid import FORMATS, REDUCTIONS, SAMPLES, SCALERS, SMOOTHING, spikes

Row = dict[str, Any]

#: To reach (part 1): skips over those of the best constant scale at the same distance; under drift; with bad steps.
SKIPS_OVER, SKIPS_PLUS = 1.1, 5e-5
WORST_FALL = 2.0
#: To reach (part 2): final loss over BF16's.
LOSS_OVER = 0.005


def figure(name: str, value: float | None, unit: str, budget: str = "", within: bool | None = None) -> Row:
    return {"name": name, "value": value, "unit": unit, "budget": budget, "within": within}


# -- part 1 -------------------------------------------------------------------------------------------------------
def excess(row: Row) -> float:
    """Skips over those allowed at the distance: ``skipped / (1.1 * oracle + 0.005%)``; within when at most 1."""
    return float(row["skipped"] / (SKIPS_OVER * row["oracle"] + SKIPS_PLUS))


def plane_figures(rows: list[Row]) -> list[Row]:
    figures = []
    for name in scaler_simulation.scalers():
        own = [row for row in rows if row["scaler"] == name]
        still = [row for row in own if row["edge"] != "drift"]
        ours = name.startswith("headroom")
        worst = max(excess(row) for row in still)
        figures.append(
            figure(
                f"{name}: worst skips / (1.1 x oracle + 0.005%), edge standing still",
                worst,
                "ratio",
                "<= 1" if ours else "",
                worst <= 1 if ours else None,
            )
        )
        if not ours:
            continue
        margin = float(name.split()[1])
        drifting = [row for row in own if row["edge"] == "drift"]
        near = min(row["near"] for row in drifting)
        far = max(max(row["highest"] - margin, margin - row["lowest"]) for row in drifting)
        figures.append(figure(f"{name}: least share of steps within 1.5 bits of the margin, drift", near, "share"))
        figures.append(
            figure(f"{name}: furthest from the margin in any step, drift", far, "bits", "<= 1.5", far <= 1.5)
        )
        fall = max(row["highest"] - margin for row in still if row["bad"] == max(scaler_simulation.BAD))
        figures.append(
            figure(f"{name}: furthest fall below the margin, 2% bad steps", fall, "bits", "<= 2", fall <= WORST_FALL)
        )
    return figures


def _mean(values: list[float]) -> float:
    return statistics.fmean(values)


def simulation_table(rows: list[Row], noise: float) -> str:
    """One line for each scaler and edge, means over the seeds, a column group for each share of bad steps."""
    bads = scaler_simulation.BAD
    heads = "".join(f" {share:.1%} bad: skipped / best constant, bits below the edge, final scale |" for share in bads)
    lines = [f"| scaler | edge |{heads}", "|---|---|" + "---|" * len(bads)]
    for name in scaler_simulation.scalers():
        for edge in scaler_simulation.EDGES:
            cells = []
            for bad in bads:
                own = [
                    r
                    for r in rows
                    if r["scaler"] == name and r["edge"] == edge and r["noise"] == noise and r["bad"] == bad
                ]
                cells.append(
                    f"{_mean([r['skipped'] for r in own]):.3%} / {_mean([r['oracle'] for r in own]):.3%}, "
                    f"{_mean([r['distance'] for r in own]):.1f}, 2^{_mean([r['final_scale'] for r in own]):.0f}"
                )
            place = edge if edge == "drift" else f"2^{edge:g}"
            lines.append(f"| {name} | {place} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def between_failures(clean: list[float], between: list[float | None]) -> float | None:
    """Clean steps of all runs over the failures of all; None without a failure.

    ``between``: each run's own figure, None for a run without a failure, whose ``clean`` steps count like all others.
    """
    failures = sum(steps / mean for steps, mean in zip(clean, between) if mean is not None)
    return sum(clean) / failures if failures else None


def failures_table(rows: list[Row]) -> str:
    """Mean steps between failures, over all runs of edges that stand still."""
    bads = scaler_simulation.BAD
    lines = ["| scaler | noise |" + "".join(f" {share:.1%} bad |" for share in bads), "|---|---|" + "---:|" * len(bads)]
    for name in scaler_simulation.scalers():
        for noise in scaler_simulation.NOISES:
            cells = []
            for bad in bads:
                own = [
                    r
                    for r in rows
                    if (r["scaler"], r["noise"], r["bad"]) == (name, noise, bad) and r["edge"] != "drift"
                ]
                # In units of a run's steps, which are the same for all and cancel out.
                mean = between_failures([1 - r["skipped"] for r in own], [r["steps_between_failures"] for r in own])
                cells.append("no failure" if mean is None else f"{mean:,.0f}")
            lines.append(f"| {name} | {noise} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


# -- part 2 -------------------------------------------------------------------------------------------------------
def reference(rows: list[Row], row: Row) -> Row:
    """The BF16 run with the same sample, reduction and seed."""
    return next(
        other
        for other in rows
        if other["precision"] == "bf16" and all(other[k] == row[k] for k in ("sample", "reduction", "seed", "steps"))
    )


def over_reference(rows: list[Row], row: Row) -> float:
    """Final loss over BF16's, as a share; negative when it is lower."""
    return float(row["final_loss"] / reference(rows, row)["final_loss"] - 1)


def over_floor(rows: list[Row], row: Row) -> float:
    """Like over_reference, of what the losses are above the entropy that label smoothing leaves in any case."""
    most, least = 1 - SMOOTHING[row["sample"]] * 0.9, SMOOTHING[row["sample"]] * 0.1  # ten classes
    floor = -(most * math.log(most) + 9 * least * math.log(least))
    return float((row["final_loss"] - floor) / (reference(rows, row)["final_loss"] - floor) - 1)


def training_figures(rows: list[Row]) -> list[Row]:
    figures = []
    for scaler in SCALERS:
        own = [row for row in rows if row["scaler"] == scaler]
        if not own:
            continue
        worst = max(over_reference(rows, row) for row in own)
        skips = max(row["skips"] for row in own)
        injected = len(spikes(own[0]["steps"]))
        ours = scaler == "headroom"
        figures.append(
            figure(
                f"trainings, {scaler}: worst final loss over BF16 of the same seed",
                worst,
                "share",
                "<= 0.005" if ours else "",
                worst <= LOSS_OVER if ours else None,
            )
        )
        figures.append(
            figure(
                f"trainings, {scaler}: most skips in a run ({injected} spikes injected)",
                skips,
                "skips",
                f"<= {injected}" if ours else "",
                skips <= injected if ours else None,
            )
        )
        cells: dict[tuple[Any, ...], list[float]] = defaultdict(list)
        for row in own:
            cells[row["sample"], row["precision"], row["reduction"]].append(over_reference(rows, row))
        floored = [row for row in own if SMOOTHING[row["sample"]]]
        if floored:
            excess = max(over_floor(rows, row) for row in floored)
            name = f"trainings, {scaler}: worst excess of digits_cnn's loss over its smoothing, over BF16's excess"
            figures.append(figure(name, excess, "share"))
        good = sum(max(values) <= LOSS_OVER for values in cells.values())
        figures.append(
            figure(f"trainings, {scaler}: cells of {len(cells)} with every seed within 0.5% of BF16", good, "cells")
        )
    return figures


def _range(values: list[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def training_table(rows: list[Row], sample: str) -> str:
    """One line a format, reduction and scaler, over the seeds."""
    lines = [
        "| format | loss | scaler | final loss over BF16's | skips | steps between failures | recovered | "
        "longest stable stretch | jitter | saturated | made 0 | scale at the end |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    order = [("bf16", "none"), ("fp32", "none"), *((fmt, scaler) for fmt in FORMATS for scaler in SCALERS)]
    for precision, scaler in order:
        for reduction in REDUCTIONS:
            own = [
                r
                for r in rows
                if (r["sample"], r["precision"], r["scaler"], r["reduction"]) == (sample, precision, scaler, reduction)
            ]
            if not own:
                continue
            over = [100 * over_reference(rows, r) for r in own]
            figures = [r["figures"] for r in own]
            between = [f["mean_steps_between_failures"] for f in figures]
            clean = [
                f["mean_steps_at_least"] if mean is None else mean * f["failures"] for f, mean in zip(figures, between)
            ]
            mean_between = between_failures(clean, between)
            judged, recovered = sum(f["judged"] for f in figures), sum(f["recovered"] for f in figures)
            loss = (
                f"{_range([r['final_loss'] for r in own], '.4f')}"
                if precision == "bf16"
                else f"{_range(over, '+.2f')}%"
            )
            scale = "" if own[0]["final_scale"] is None else _range([r["final_scale"] for r in own], ",.6g")
            shares = [
                "" if own[0][name] is None else f"{_mean([r[name] for r in own]):.2%}"
                for name in ("saturated", "underflowed")
            ]
            lines.append(
                f"| {precision} | {reduction} | {scaler} | {loss} | {_range([r['skips'] for r in own], 'd')} | "
                f"{'no failure' if mean_between is None else f'{mean_between:.0f}'} | "
                f"{f'{recovered} of {judged}' if judged else ''} | "
                f"{_range([f['longest_stable_stretch'] for f in figures], 'd')} | "
                f"{_mean([f['loss_jitter'] for f in figures]):.3f} | {shares[0]} | {shares[1]} | {scale} |"
            )
    return "\n".join(lines)


def failure_table(rows: list[Row]) -> str:
    """Part 3: saturating E4M3, summed losses, each seed."""
    lines = [f"| sample | seed | BF16 | {' | '.join(SCALERS)} |", "|---|---|---|" + "---|" * len(SCALERS)]
    for sample in SAMPLES:
        seeds = sorted({r["seed"] for r in rows})
        for seed in seeds:
            cells = []
            for precision, scaler in (("bf16", "none"), *(("fp8-e4m3-saturating", scaler) for scaler in SCALERS)):
                own = [
                    r
                    for r in rows
                    if (r["sample"], r["precision"], r["scaler"], r["reduction"], r["seed"])
                    == (sample, precision, scaler, "sum", seed)
                ]
                if not own:
                    continue
                saturated = own[0]["saturated"]
                extra = "" if saturated is None else f", {own[0]['skips']} skips, {saturated:.2%} saturated"
                cells.append(f"{own[0]['final_loss']:.4f}{extra}")
            lines.append(f"| {sample} | {seed} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tables(simulation: list[Row], trainings: list[Row], about: Row) -> str:
    """All tables as one Markdown text."""
    parts = [f"{about['machine']}, {about['date']}, seeds {', '.join(map(str, about['seeds']))}."]
    if simulation:
        parts += [_figures_table(plane_figures(simulation))]
        for noise in scaler_simulation.NOISES:
            parts += [f"### Noise {noise}", simulation_table(simulation, noise)]
        parts += ["### Mean steps between failures", failures_table(simulation)]
    if trainings:
        parts += [_figures_table(training_figures(trainings))]
        for sample in SAMPLES:
            parts += [f"### {sample}", training_table(trainings, sample)]
        parts += ["### Saturating E4M3, summed loss", failure_table(trainings)]
    return "\n\n".join(parts) + "\n"


def _figures_table(figures: list[Row]) -> str:
    lines = ["| figure | measured | to reach | |", "|---|---:|---|---|"]
    for item in figures:
        mark = {True: "within", False: "**over**", None: ""}[item["within"]]
        lines.append(f"| {item['name']} | {item['value']:.5g} {item['unit']} | {item['budget']} | {mark} |")
    return "\n".join(lines)


# -- the picture --------------------------------------------------------------------------------------------------
WIDTH, HEIGHT, LEFT, TOP = 900, 520, 80, 40
COLOURS = {"pytorch": "#d55e00", "article": "#cc79a7", "headroom": "#0072b2"}


def plane(rows: list[Row], seeds: list[int]) -> str:
    """SVG: skips over distance from the edge, without bad steps, a panel each noise; constant scales as a line."""
    panels = []
    wide = (WIDTH - LEFT - 90) / 2
    for place, noise in enumerate(scaler_simulation.NOISES):
        panels.append(_panel(rows, noise, seeds, LEFT + place * (wide + 60), wide))
    legend = "".join(
        f'<circle cx="{LEFT + 10 + 100 * i}" cy="{HEIGHT - 14}" r="4" fill="{colour}"/>'
        f'<text x="{LEFT + 20 + 100 * i}" y="{HEIGHT - 10}">{name}</text>'
        for i, (name, colour) in enumerate(COLOURS.items())
    )
    x = LEFT + 20 + 100 * len(COLOURS)
    legend += (
        f'<line x1="{x - 14}" y1="{HEIGHT - 14}" x2="{x + 6}" y2="{HEIGHT - 14}" stroke="#777"/>'
        f'<text x="{x + 12}" y="{HEIGHT - 10}">best constant scale, knowing the edge; squares: the edge drifts</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>{"".join(panels)}{legend}</svg>\n'
    )


def _panel(rows: list[Row], noise: float, seeds: list[int], left: float, wide: float) -> str:
    high, low, reach = -1.0, -6.0, 14.0
    tall = HEIGHT - TOP - 70

    def x(distance: float) -> float:
        return left + wide * min(max(distance, 0.0), reach) / reach

    def y(share: float) -> float:
        log = math.log10(share) if share > 0 else low
        return TOP + tall * (high - min(max(log, low), high)) / (high - low)

    parts = [
        f'<text x="{left + wide / 2}" y="24" text-anchor="middle">share of steps skipped, noise {noise} bits</text>',
        f'<rect x="{left}" y="{TOP}" width="{wide}" height="{tall}" fill="none" stroke="#999"/>',
    ]
    for power in range(int(low), int(high) + 1):
        label = "none" if power == low else f"{10.0 ** (power + 2):g}%"
        parts.append(
            f'<line x1="{left}" x2="{left + wide}" y1="{y(10.0**power)}" y2="{y(10.0**power)}" stroke="#eee"/>'
            f'<text x="{left - 6}" y="{y(10.0**power) + 4}" text-anchor="end">{label}</text>'
        )
    for bits in range(0, int(reach) + 1, 2):
        parts.append(f'<text x="{x(bits)}" y="{TOP + tall + 16}" text-anchor="middle">{bits}</text>')
    parts.append(
        f'<text x="{left + wide / 2}" y="{TOP + tall + 34}" text-anchor="middle">median bits below the edge</text>'
    )
    curve = scaler_simulation.oracle_curve(200_000, noise, seeds, [i / 20 for i in range(int(reach * 20) + 1)])
    path = " ".join(f"{x(point):.1f},{y(share):.1f}" for point, share in curve)
    parts.append(f'<polyline points="{path}" fill="none" stroke="#777"/>')
    for name in scaler_simulation.scalers():
        kind = name.split()[0]
        for edge in scaler_simulation.EDGES:
            own = [r for r in rows if (r["scaler"], r["noise"], r["bad"], r["edge"]) == (name, noise, 0.0, edge)]
            if not own:
                continue
            at, share = _mean([r["distance"] for r in own]), _mean([r["skipped"] for r in own])
            shape = f'<circle cx="{x(at):.1f}" cy="{y(share):.1f}" r="4" fill="{COLOURS[kind]}" fill-opacity="0.7"/>'
            if edge == "drift":
                shape = (
                    f'<rect x="{x(at) - 4:.1f}" y="{y(share) - 4:.1f}" width="8" height="8" fill="none" '
                    f'stroke="{COLOURS[kind]}"/>'
                )
            parts.append(f"<g><title>{name}, edge {edge}: {share:.4%}, {at:.2f} bits</title>{shape}</g>")
    return "".join(parts)
