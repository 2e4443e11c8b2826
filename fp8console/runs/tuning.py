"""From a baseline to settings: initial loss scale, growth policy and cap, clip thresholds. Plain functions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fp8console.protocol.commands import SCALE_MAX, SCALE_MIN
from fp8console.runs.baseline import Baseline
from fp8console.runs.quantisation import Format, Values, fitting_exponent
from fp8console.runs.sensitivity import LayerVerdict, judge_layers

#: Of the baseline's amax this quantile is what the initial scale makes fit; of its norms that one is the typical high.
AMAX_QUANTILE = 0.999
NORM_QUANTILE = 0.95
CLIP_FACTOR = 1.5
#: Fewer usable steps than this say nothing about a quantile.
LEAST_STEPS = 5
#: Bits by which gradients may shrink while a training goes on before the cap holds the scale back.
SHRINKING_BITS = 8
#: Backoffs from the initial scale down to the floor.
FLOOR_BITS = 10
FLOOR_LEAST = 2.0**-24
GROWTH_INTERVAL = 2000


class NoTuning(ValueError):
    """The baseline can't be used; the text is one line."""


@dataclass
class Tuning:
    """What a profile holds, with the reason for each setting."""

    format: Format
    source: str  # the kind of tensor that amax is of
    amax: float  # AMAX_QUANTILE over the steps of the largest over the layers, unscaled
    amax_typical: float  # the median over the steps
    margin: int
    scaler: dict[str, Any]
    clip_norm: float | None
    clip_groups: dict[str, float]
    layers: list[LayerVerdict]
    reasons: dict[str, str] = field(default_factory=dict)


def initial_scale(
    amax: float, fmt_max: float, margin: float, floor: float = FLOOR_LEAST, cap: float = SCALE_MAX, present: float = 1.0
) -> float:
    """``2**(floor(log2(fmt_max / amax)) - margin)`` within ``floor`` and ``cap``; ``present`` when amax tells nothing.

    amax: largest magnitude of the unscaled activation gradients; one that is 0, negative or not finite leaves the
    scale as it is. Never overflows: a tiny amax gives ``cap``.
    """
    if not (math.isfinite(amax) and amax > 0):
        return present
    bits = fitting_exponent(amax, fmt_max) - margin
    return min(max(float(2.0 ** max(-1000.0, min(1000.0, bits))), floor), cap)


def tune(
    baseline: Baseline, margin: int | None = None, clip_factor: float = CLIP_FACTOR, total_steps: int | None = None
) -> Tuning:
    """Settings for a training that began like ``baseline``. Raises NoTuning where it is too short or shows nothing.

    ``margin`` (bits) None: 2, or 3 where the largest magnitude moves by a bit or more from step to step.
    """
    if len(baseline.steps) < LEAST_STEPS:
        others = ", ".join(f"{count} {reason}" for reason, count in baseline.left_out.items())
        raise NoTuning(
            f"{len(baseline.steps)} usable steps, at least {LEAST_STEPS} are needed"
            + (f"; left out: {others}" if others else "; the training ended too soon")
        )
    source, per_step = _largest(baseline)
    amax = float(np.quantile(per_step, AMAX_QUANTILE, method="higher"))
    typical = float(np.median(per_step))
    moves = math.log2(amax / typical)
    chosen = margin if margin is not None else min(3, 2 + math.floor(moves))
    fmt = baseline.backward
    scaler, reasons = _scaler(fmt, amax, typical, chosen, total_steps)
    scale = scaler["init_scale"]
    clip_norm, groups = _clipping(baseline, clip_factor, reasons)
    return Tuning(
        format=fmt,
        source=source,
        amax=amax,
        amax_typical=typical,
        margin=chosen,
        scaler=scaler,
        clip_norm=clip_norm,
        clip_groups=groups,
        layers=judge_layers(baseline, scale, fmt),
        reasons=reasons,
    )


def _largest(baseline: Baseline) -> tuple[str, Values]:
    """The kind whose amax decides the scale, and its largest over the layers in each step where that is over 0."""
    for kind in ("activation_gradient", "gradient"):
        figures = baseline.of(kind)
        if figures is None:
            continue
        per_step = np.fmax.reduce(figures.amax, axis=1)
        per_step = per_step[np.isfinite(per_step) & (per_step > 0)]
        if len(per_step) >= LEAST_STEPS:
            return kind, per_step
    raise NoTuning("no gradient was seen that is not 0: nothing to set a loss scale by")


def _scaler(
    fmt: Format, amax: float, typical: float, margin: int, total_steps: int | None
) -> tuple[dict[str, Any], dict[str, str]]:
    scale = initial_scale(amax, fmt.max, margin)
    fits = initial_scale(amax, fmt.max, 0, floor=SCALE_MIN)
    cap_bits = max(0, margin - 1) if fmt.saturates else margin + SHRINKING_BITS
    cap = min(scale * 2.0**cap_bits, SCALE_MAX)
    floor = max(FLOOR_LEAST, scale * 2.0**-FLOOR_BITS)
    ours = max(1, margin + round(math.log2(amax / typical)))
    interval = GROWTH_INTERVAL if total_steps is None else max(100, min(GROWTH_INTERVAL, total_steps // 20))
    values = {
        "preset": "headroom",
        "margin": ours,
        "init_scale": scale,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": interval,
        "floor": min(floor, scale),
        "cap": cap,
    }
    reasons = {
        "preset": "for Fp8GradScaler: grows by measured headroom; a stock scaler takes what follows",
        "margin": f"bits kept over the typical largest magnitude: {margin} over the {AMAX_QUANTILE:.1%} quantile",
        "init_scale": f"2**(floor(log2({fmt.max:g} / {amax:.4g})) - {margin}); {_power(fits)} would just fit",
        "growth_factor": "powers of two change no mantissa",
        "backoff_factor": "one bit back at an overflow",
        "growth_interval": f"each growth past the edge costs one step: 1 in {interval:,}",
        "floor": f"{FLOOR_BITS} bits under the start: bad data can't take the scale further, and never to 0",
        "cap": f"{fmt.name} saturates, so a stock scaler sees no overflow: one bit under the edge"
        if fmt.saturates
        else f"room for gradients that shrink by {SHRINKING_BITS} bits as the training goes on",
    }
    return values, reasons


def _clipping(baseline: Baseline, factor: float, reasons: dict[str, str]) -> tuple[float | None, dict[str, float]]:
    """(global threshold, that of each group): NORM_QUANTILE of the unscaled norms before clipping, times ``factor``."""
    norms = baseline.grad_norm[np.isfinite(baseline.grad_norm)]
    clip_norm = None
    if len(norms) >= LEAST_STEPS and np.quantile(norms, NORM_QUANTILE) > 0:
        high = float(np.quantile(norms, NORM_QUANTILE))
        clip_norm = _digits(high * factor)
        reasons["clip_norm"] = f"{NORM_QUANTILE:.0%} of the unscaled norms lie below {high:.4g}; times {factor:g}"
    groups: dict[str, float] = {}
    figures = baseline.of("gradient")
    if figures is not None:
        squares = np.square(figures.l2)
        whole = _whole(baseline.grad_norm, squares)
        for name, (members, layers) in stacks([_place(layer) for layer in baseline.layers]).items():
            known = np.isfinite(squares[:, members]).any(axis=1)
            norm = np.sqrt(np.nansum(squares[:, members], axis=1))[known] * whole
            if len(norm) >= LEAST_STEPS and np.quantile(norm, NORM_QUANTILE) > 0:
                # The deeper a stack the less its norm spreads, and the more the same excess means.
                margin = 1 + (factor - 1) / math.sqrt(layers)
                groups[name] = _digits(float(np.quantile(norm, NORM_QUANTILE)) * margin)
    return clip_norm, groups


def _whole(grad_norm: Values, squares: Values) -> float:
    """The global norm over that of all layers' matrices, median, 1 at least: biases and the like have gradients too."""
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = grad_norm / np.sqrt(np.nansum(squares, axis=1))
    ratio = ratio[np.isfinite(ratio)]
    return max(1.0, float(np.median(ratio))) if len(ratio) else 1.0


def stacks(names: list[str]) -> dict[str, tuple[list[int], int]]:
    """Layers in groups, named as ``numerics.clipping.layer_groups(model, "stack")`` names them.

    Each numbered sequence of layers is a group, everything else goes by its top-level module: name -> (the indices of
    its members, how many numbered layers deep it is; 1 without numbers).
    """
    found: dict[str, tuple[list[int], set[str]]] = {}
    for index, name in enumerate(names):
        parts = name.split(".")
        place = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        group = parts[0] if place is None else ".".join(parts[:place]) or "model"
        members, numbers = found.setdefault(group, ([], set()))
        members.append(index)
        if place is not None:
            numbers.add(parts[place])
    return {name: (members, max(1, len(numbers))) for name, (members, numbers) in found.items()}


def _place(layer: dict[str, Any]) -> str:
    """Where a layer's parameters are: its name, but for the model's own parameters, which go by theirs."""
    weights = layer.get("weights")
    return str(weights[0] if weights and layer["name"] == layer.get("type") else layer["name"])


def _digits(value: float) -> float:
    """Four digits: more would be noise."""
    return float(f"{value:.4g}")


def _power(value: float) -> str:
    return f"2^{math.frexp(value)[1] - 1}"
