"""Part 1 of bench/stability.py: loss scalers alone, on simulated trainings of which the edge is known.

A step's largest gradient magnitude is ``edge**-1 * 2**(noise * z)`` in units of the format's maximum, z normal (0, 1),
times 64 in a spike; it overflows when that times the scale is over 1. A bad step is refused whatever the scale. The
rule under test is numerics/scaling_rules.advance itself, on vectors of simulated trainings.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from fp8console.numerics.scaling_rules import ScalerSettings, Seen, advance, initial, preset

#: log2 of the edge. The fourth lies between powers of two: there such a scale can't keep the margin exactly.
EDGES: tuple[float | str, ...] = (10.0, 14.0, 18.0, 14.6, "drift")
NOISES = (0.1, 0.5)
BAD = (0.0, 0.001, 0.01, 0.02)
MARGINS = (1.0, 2.0, 4.0, 6.0, 8.0)
SPIKE_BITS, SPIKES = 6.0, 0.001
DRIFT_BITS, DRIFT_STEPS, DRIFT_AROUND = 4.0, 20_000, 14.0
#: Steps at the start whose distance from the edge is not judged: the scale is on its way from its initial value.
WARM_UP = 100
#: Bits from the margin within which the distance is to stay under drift.
NEAR = 1.5


@dataclass(frozen=True)
class Case:
    """One simulated training: edge (log2, or "drift"), noise (bits), share of bad steps, seed."""

    edge: float | str
    noise: float
    bad: float
    seed: int


def cases(seeds: Iterable[int]) -> list[Case]:
    return [Case(e, n, b, s) for s, e, n, b in itertools.product(seeds, EDGES, NOISES, BAD)]


def scalers() -> dict[str, ScalerSettings]:
    """The settings under test, by the name in the tables."""
    tried = {"pytorch": preset("pytorch"), "article": preset("article")}
    for margin in MARGINS:
        tried[f"headroom {margin:g}"] = preset("headroom", margin=margin)
    return tried


def simulate(steps: int, seeds: list[int], progress: Callable[[int], None] = lambda step: None) -> list[dict[str, Any]]:
    """One row for each scaler and case: skips, distance from the edge, and what constant scales would have skipped.

    Rows hold ``skipped`` (share), ``steps_between_failures`` (None without one), ``distance`` (median, bits below the
    edge), ``lowest`` and ``highest`` distance and ``near`` (share of steps within 1.5 bits of the margin) after the
    warm-up, ``final_scale`` (log2), and ``oracle``: the share that the best constant scale at the same distance skips
    on the same draws. Memory: 1.1 GB for 200,000 steps and five seeds.
    """
    tried, all_cases = scalers(), cases(seeds)
    n = len(all_cases)
    drifts = torch.tensor([case.edge == "drift" for case in all_cases])
    base = torch.tensor([DRIFT_AROUND if case.edge == "drift" else float(case.edge) for case in all_cases])
    noise = torch.tensor([case.noise for case in all_cases])
    bad_share = torch.tensor([case.bad for case in all_cases])
    # The cases of one seed see the same draws, so that they differ by what is varied alone.
    generators = {seed: torch.Generator().manual_seed(seed) for seed in seeds}
    column = torch.tensor([seeds.index(case.seed) for case in all_cases])

    states = {name: initial(settings, base) for name, settings in tried.items()}
    skips = {name: torch.zeros(n) for name in tried}
    failures = {name: torch.zeros(n) for name in tried}
    failed_before = {name: torch.zeros(n, dtype=torch.bool) for name in tried}
    distances = {name: torch.empty(steps, n) for name in tried}
    needed = torch.empty(steps, n)  # the distance below which each step is refused; inf for a bad one

    for step in range(steps):
        draws = torch.stack([torch.randn(3, generator=generators[seed]) for seed in seeds])
        uniform = torch.special.ndtr(draws[:, 1:])
        above = noise * draws[column, 0] + SPIKE_BITS * (uniform[column, 0] < SPIKES)
        bad = uniform[column, 1] < bad_share
        edge = base + torch.where(drifts, DRIFT_BITS * math.sin(2 * math.pi * step / DRIFT_STEPS), 0.0)
        needed[step] = torch.where(bad, math.inf, above)
        for name, settings in tried.items():
            state = states[name]
            distance = edge - state.scale.log2()
            overflow = above > distance
            refused = overflow | bad
            peak = torch.exp2(above - distance)
            # Underflow asks for growth at every step: the harder case, for only growth leads to an overflow.
            seen = Seen(refused.float(), peak, overflow.float() * 0.01, torch.ones_like(peak))
            states[name] = advance(state, seen, settings)
            skips[name] += refused
            failures[name] += refused & ~failed_before[name]
            failed_before[name] = refused
            distances[name][step] = distance
        if (step + 1) % 1000 == 0 or step + 1 == steps:
            progress(step + 1)

    rows = []
    warm = min(WARM_UP, steps - 1)
    for name, index in itertools.product(tried, range(n)):
        case, clean = all_cases[index], steps - float(skips[name][index])
        taken = distances[name][:, index]
        distance, judged = float(taken.median()), taken[warm:]
        failed, margin = float(failures[name][index]), tried[name].margin
        rows.append(
            {
                "scaler": name,
                "edge": case.edge,
                "noise": case.noise,
                "bad": case.bad,
                "seed": case.seed,
                "skipped": float(skips[name][index]) / steps,
                "steps_between_failures": clean / failed if failed else None,
                "distance": distance,
                "lowest": float(judged.min()),
                "highest": float(judged.max()),
                "near": None if margin is None else float(((judged - margin).abs() <= NEAR).float().mean()),
                "final_scale": float(states[name].scale[index].log2()),
                "oracle": float((needed[:, index] > distance).float().mean()),
            }
        )
    return rows


def oracle_curve(steps: int, noise: float, seeds: list[int], points: list[float]) -> list[tuple[float, float]]:
    """(distance, share skipped) of constant scales, bad steps aside: the plane's best, for the picture."""
    above = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        draws = torch.randn(steps, 2, generator=generator)
        above.append(noise * draws[:, 0] + SPIKE_BITS * (torch.special.ndtr(draws[:, 1]) < SPIKES))
    joined = torch.cat(above)
    return [(point, float((joined > point).float().mean())) for point in points]
