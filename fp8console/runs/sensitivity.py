"""Which layers FP8 hurts most, by headroom and by what rounding costs; which to keep in BF16, by a stated rule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8console.runs.baseline import Baseline, KindFigures
from fp8console.runs.quantisation import (
    Format,
    fitting_exponent,
    flushed_share,
    least_error,
    relative_error,
    rescaled_share,
)

#: Bits of precision that a kind of tensor may lose beside what the format's mantissa costs anyway.
LOST_BITS = 1.0
#: Share of nonzero activation gradients that may become 0.
FLUSHED = 0.1
#: Share of steps in which a layer may be expected to overflow, and how many standard deviations leave that share.
OVERFLOWS, DEVIATIONS = 0.001, 3.09
#: FP8 matrix products of torch and its libraries need sizes that are multiples of this.
MULTIPLE = 16

RULE = (
    f"BF16 where, at the scale chosen, a layer's gradients overflow or, by how they move between steps, would in over "
    f"{OVERFLOWS:.1%} of the steps; over {FLUSHED:.0%} of them become 0; rounding costs {LOST_BITS:g} bit or more "
    f"beyond the format's own; or a size is no multiple of {MULTIPLE}"
)
KIND_WORDS = {"weight": "weights", "activation": "activations", "activation_gradient": "activation gradients"}


@dataclass
class LayerVerdict:
    """One layer. Bits and shares are of the worst of its cast kinds; None where nothing was measured."""

    name: str
    type: str
    precision: str  # "fp8", "bf16", or "uncast" for a layer without a matrix product
    sensitivity: float | None  # bits: missing headroom plus precision lost
    headroom: float | None  # bits over the largest activation gradients at the scale chosen
    spread: float | None  # bits between the largest and the smallest of their maxima
    underflow: float | None  # share of their nonzero elements that become 0
    error: float | None  # root mean square, as a share of the values' own, of the worst kind
    why: str


def judge_layers(baseline: Baseline, scale: float, fmt: Format) -> list[LayerVerdict]:
    """All layers, the most sensitive first. ``scale``: the loss scale of the activation gradients, cast to ``fmt``.

    Weights and activations are taken as cast with a power-of-two scale of their own that makes their amax fit, as
    torchao and TransformerEngine do.
    """
    verdicts = [_judge(baseline, index, scale, fmt) for index in range(len(baseline.layers))]
    return sorted(verdicts, key=_order)


def _order(verdict: LayerVerdict) -> tuple[bool, float, float, float]:
    worst = math.inf
    return (
        verdict.precision == "uncast",
        # By tenths of a bit, as it is shown; among equals the one with the least room comes first.
        -(round(verdict.sensitivity, 1) if verdict.sensitivity is not None else -worst),
        verdict.headroom if verdict.headroom is not None else worst,
        -(verdict.error or 0.0),
    )


def _judge(baseline: Baseline, index: int, scale: float, fmt: Format) -> LayerVerdict:
    layer = baseline.layers[index]
    name, kind = str(layer["name"]), str(layer.get("type") or "unknown")
    if not has_product(layer):
        return LayerVerdict(name, kind, "uncast", None, None, None, None, None, "no matrix product: nothing to cast")
    reasons: list[tuple[float, str]] = []  # (weight, text)
    lost_most, error_most = None, None
    headroom, spread, underflow = None, None, None
    for tensor in KIND_WORDS:
        figures = baseline.of(tensor)
        column = None if figures is None else _Column(figures, index)
        if column is None or column.highest is None:
            continue
        gradient = tensor == "activation_gradient"
        used = fmt if gradient else baseline.forward
        factor = scale if gradient else _fitting(column.highest, used)
        lost, error = _precision(column, factor, used)
        if lost is not None and (lost_most is None or lost > lost_most):
            lost_most = lost
        if error is not None and (error_most is None or error > error_most):
            error_most = error
        if lost is not None and lost >= LOST_BITS:
            typical = math.log2(column.rms * factor) if column.rms else -math.inf
            reasons.append((lost, f"{KIND_WORDS[tensor]} lose {lost:.1f} bits: typically 2^{typical:.0f} when cast"))
        if not gradient:
            continue
        headroom = math.log2(used.max) - math.log2(column.highest) - math.log2(factor)
        spread = column.spread
        underflow = column.flushed(factor, used)
        if headroom < 0:
            reasons.append((1 - headroom, f"gradients overflow by {-headroom:.1f} bits in the worst step"))
        elif column.deviations(headroom) < DEVIATIONS:
            reasons.append((1.0, f"gradients move by {spread:.1f} bits between steps: the next may overflow"))
        if underflow is not None and underflow > FLUSHED:
            reasons.append((underflow, f"{underflow:.0%} of the gradients become 0"))
    odd = [size for size in layer.get("shape") or [] if int(size) % MULTIPLE] if "Linear" in kind else []
    if odd:
        reasons.append((0.0, f"size {odd[0]} is no multiple of {MULTIPLE}, which FP8 products need"))
    if lost_most is None and headroom is None:
        return LayerVerdict(name, kind, "bf16", None, None, None, None, None, "nothing was measured")
    sensitivity = max(0.0, 1.0 - headroom if headroom is not None else 0.0) + (lost_most or 0.0)
    why = "; ".join(text for _, text in sorted(reasons, key=lambda item: -item[0])) or "fits"
    return LayerVerdict(
        name, kind, "bf16" if reasons else "fp8", sensitivity, headroom, spread, underflow, error_most, why
    )


def has_product(layer: dict[str, Any]) -> bool:
    """Whether a layer multiplies matrices, which is what FP8 speeds up: by its type, or by a weight that is one."""
    kind = str(layer.get("type") or "")
    if "Norm" in kind or "Embedding" in kind:
        return False
    if any(word in kind for word in ("Linear", "Conv", "Attention", "LSTM", "GRU")):
        return True
    names = layer.get("weights") or ["weight"]
    return len(layer.get("shape") or []) >= 2 and any(str(name).endswith("weight") for name in names)


class _Column:
    """One layer's figures over the steps; each None where nothing is known."""

    def __init__(self, figures: KindFigures, index: int) -> None:
        amax, rms = figures.amax[:, index], figures.rms[:, index]
        amax, rms = amax[np.isfinite(amax) & (amax > 0)], rms[np.isfinite(rms) & (rms > 0)]
        self.highest = float(amax.max()) if len(amax) else None
        logs = np.log2(amax)
        self.spread = float(logs.max() - logs.min()) if len(amax) else None
        self._typical, self._moves = (float(np.median(logs)), float(logs.std())) if len(amax) else (0.0, 0.0)
        # A low step, not the median: the scale has to serve the steps with the smallest values too.
        self.rms = float(np.quantile(rms, 0.1)) if len(rms) else None
        self._underflowed, self._scale = figures.underflowed[:, index], figures.scale[:, index]

    def deviations(self, headroom: float) -> float:
        """Standard deviations of log2 amax from its median to the format's maximum, ``headroom`` over the highest."""
        if self.highest is None or self._moves == 0:
            return math.inf
        return (headroom + math.log2(self.highest) - self._typical) / self._moves

    def flushed(self, factor: float, fmt: Format) -> float | None:
        """Median share of nonzero elements that a cast at ``factor`` makes 0."""
        if self.rms is None:
            return None
        modelled = flushed_share(np.full(len(self._scale), self.rms * factor), fmt)
        shares = rescaled_share(self._underflowed, factor / self._scale, modelled)
        shares = shares[np.isfinite(shares)]
        return float(np.median(shares)) if len(shares) else None


def _fitting(amax: float, fmt: Format) -> float:
    """The largest power of two at which ``amax`` fits."""
    return 2.0 ** fitting_exponent(amax, fmt.max)


def _precision(column: _Column, factor: float, fmt: Format) -> tuple[float | None, float | None]:
    """(bits lost beyond what the format's mantissa costs, expected relative error)."""
    if column.rms is None or column.highest is None:
        return None, None
    error = float(relative_error(np.array([column.rms * factor]), fmt, column.highest * factor)[0])
    if math.isnan(error):
        return None, None
    return max(0.0, math.log2(error / least_error(fmt))), error
