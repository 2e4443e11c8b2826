"""Two runs of one training compared: loss curves, and the layers' statistics, down to the layer that drifts first.

Errors are relative to the reference run. Loss curves are compared as means over a few steps: single batches differ by
more than precision does. A layer's error is that of its L2 norm, unscaled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8console.runs.layers import LayerRecords
from fp8console.runs.run import Run

#: Steps in a mean are this share of the steps compared, one at least.
WINDOW_SHARE = 0.1
#: A norm under this share of the root mean square over all layers (of that kind, at that step) is compared with that:
#: the gradient of a bias before a normalization is rounding noise, and noise over noise says nothing.
FLOOR_SHARE = 1e-3
#: A loss under this share of the first one counts as that share: relative gaps of a loss near 0 say little.
LOSS_FLOOR = 0.05
#: Gradients are judged in the first samples only, and less strictly: later they follow from where the weights went, and
#: near the end of a training, where they vanish, two runs' have little in common.
GRADIENT_SAMPLES = 3
GRADIENT_FACTOR = 3.0
#: The order in which an error spreads within a step: forward through the layers, then back, where a layer's output
#: gradient comes before the gradient of its weights, then into the weights. (pass, direction, place at a layer).
SPREAD: dict[str, tuple[int, int, int]] = {
    "activation": (0, 1, 0),
    "activation_gradient": (1, -1, 0),
    "gradient": (1, -1, 1),
    "weight": (2, 1, 0),
}

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LossGap:
    """How far apart two loss curves are; None where nothing could be compared.

    Gaps are relative to the reference, but to LOSS_FLOOR of its first loss at least. ``first``: of the first step's
    losses; ``final`` and ``worst``: of the means over ``window`` steps, at the end and where it is largest
    (``worst_step`` is the mean's last step). ``reference_nonfinite`` and ``candidate_nonfinite``: the first step with
    such a loss, or None; these steps are left out of ``steps``, which counts what was compared, of ``common`` steps
    that both runs have.
    """

    steps: int
    common: int
    window: int
    first: float | None
    final: float | None
    final_reference: float | None
    final_candidate: float | None
    worst: float | None
    worst_step: int | None
    reference_nonfinite: int | None
    candidate_nonfinite: int | None


@dataclass(frozen=True)
class LayerError:
    """A layer's largest error in one kind of its tensors, and the first step at which it passed the tolerance."""

    name: str
    kind: str
    worst: float
    worst_step: int
    amax: float | None
    first_step: int | None


@dataclass(frozen=True)
class Drift:
    """Where an error is seen first: layer, kind of its tensors, step, and L2 norms; ``error`` is NaN for non-finite."""

    name: str
    kind: str
    step: int
    error: float
    reference: float
    candidate: float


@dataclass(frozen=True)
class Comparison:
    """All of it.

    ``skipped``: steps that a scaler refused, in the reference and in the candidate. ``drift``: the first error past the
    tolerance; ``fault``: the first that counts, which those of later gradients do not. ``layers``: the largest error of
    each layer and kind, worst first. ``problem``: why layers are not compared.
    """

    loss: LossGap
    skipped: tuple[int, int]
    drift: Drift | None
    fault: Drift | None
    nonfinite: Drift | None
    layers: list[LayerError] = field(default_factory=list)
    layer_steps: int = 0
    problem: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compare_runs(
    reference: Path, candidate: Path, layer_tolerance: float, last: int | None = None, rank: int = 0
) -> Comparison:
    """Compare the runs of two directories, up to step ``last`` where one is given."""
    runs = [Run(path) for path in (reference, candidate)]
    losses = [_losses(run, rank, last) for run in runs]
    gap = loss_gap(*losses[0], *losses[1])
    refused = [_skipped(run, rank, last) for run in runs]
    skipped = (len(refused[0]), len(refused[1]))
    records = [LayerRecords(path, rank) for path in (reference, candidate)]
    problem = records[0].problem or records[1].problem
    if problem is None and not (len(records[0]) and len(records[1])):
        problem = "no statistics of layers were recorded"
    if problem is not None:
        return Comparison(gap, skipped, None, None, None, problem=problem)
    return _with_layers(gap, records, refused, layer_tolerance, last)


def _skipped(run: Run, rank: int, last: int | None) -> NDArray[np.int64]:
    records = run.rank(rank)
    steps = np.array(records.column("step"), np.int64)[records.flag("skipped")]
    return steps if last is None else steps[steps <= last]


def _losses(run: Run, rank: int, last: int | None) -> tuple[NDArray[np.int64], Floats]:
    records = run.rank(rank)
    steps = np.array(records.column("step"), np.int64)
    chosen = records.known("loss") if last is None else records.known("loss") & (steps <= last)
    return steps[chosen], np.array(records.column("loss"), np.float64)[chosen]


def loss_gap(
    reference_steps: NDArray[np.int64], reference: Floats, candidate_steps: NDArray[np.int64], candidate: Floats
) -> LossGap:
    """The gap between two loss curves, (n,) and (m,), over the steps that both have."""
    steps, left, right = np.intersect1d(reference_steps, candidate_steps, return_indices=True)
    ours, theirs = candidate[right], reference[left]
    bad = [_first_step(steps, ~np.isfinite(values)) for values in (theirs, ours)]
    common = len(steps)
    window = max(1, round(common * WINDOW_SHARE))
    finite = np.isfinite(ours) & np.isfinite(theirs)
    first = _relative(ours[0], theirs[0], 0.0) if len(steps) and finite[0] else None
    steps, ours, theirs = steps[finite], ours[finite], theirs[finite]
    count = len(steps)
    if count == 0:
        return LossGap(0, common, window, None, None, None, None, None, None, bad[0], bad[1])
    window = min(window, count)
    means = [np.convolve(values, np.full(window, 1 / window), "valid") for values in (theirs, ours)]
    floor = LOSS_FLOOR * abs(float(theirs[0]))
    gaps = np.array([_relative(ours, theirs, floor) for theirs, ours in zip(*means)])
    worst = int(np.argmax(gaps))
    return LossGap(
        steps=count,
        common=common,
        window=window,
        first=first,
        final=float(gaps[-1]),
        final_reference=float(means[0][-1]),
        final_candidate=float(means[1][-1]),
        worst=float(gaps[worst]),
        worst_step=int(steps[worst + window - 1]),
        reference_nonfinite=bad[0],
        candidate_nonfinite=bad[1],
    )


def _relative(value: float, reference: float, floor: float) -> float:
    if value == reference:
        return 0.0
    against = max(abs(reference), floor)
    return abs(value - reference) / against if against else math.inf


def _first_step(steps: NDArray[np.int64], where: NDArray[np.bool_]) -> int | None:
    found = np.flatnonzero(where)
    return int(steps[found[0]]) if len(found) else None


@dataclass(frozen=True)
class _Kind:
    """One kind of tensor in both runs at the steps that both sampled: (n,) and (n, layers)."""

    kind: str
    steps: NDArray[np.int64]
    reference: Floats
    candidate: Floats
    amax: Floats  # relative errors
    errors: Floats  # of the L2 norm; NaN where unknown
    reference_bad: NDArray[np.bool_]
    candidate_bad: NDArray[np.bool_]


def _with_layers(
    gap: LossGap, sides: list[LayerRecords], refused: list[NDArray[np.int64]], tolerance: float, last: int | None
) -> Comparison:
    reference, candidate = sides
    skipped = (len(refused[0]), len(refused[1]))
    ours, theirs = ([str(layer["name"]) for layer in side.layers] for side in (candidate, reference))
    names = [name for name in theirs if name in ours]
    columns = [[there.index(name) for name in names] for there in (theirs, ours)]
    if not names:
        return Comparison(gap, skipped, None, None, None, problem="the two runs have no layer of the same name")
    kinds = [_kind(reference, candidate, kind, columns, last) for kind in SPREAD]
    layers = [error for which in kinds for error in _layer_errors(which, names, tolerance)]
    layers.sort(key=lambda error: -error.worst)
    steps = max((len(which.steps) for which in kinds), default=0)
    drift = first_place(kinds, names, [which.errors > tolerance for which in kinds])
    nonfinite = first_place(kinds, names, [_new_nonfinite(which, refused[1]) for which in kinds])
    fault = first_place(kinds, names, [_that_count(which, tolerance) for which in kinds])
    return Comparison(gap, skipped, drift, fault, nonfinite, layers, steps)


def _that_count(which: _Kind, tolerance: float) -> NDArray[np.bool_]:
    if "gradient" not in which.kind:
        return which.errors > tolerance
    early = np.arange(len(which.steps)) < GRADIENT_SAMPLES
    return (which.errors > GRADIENT_FACTOR * tolerance) & early[:, None]


def _new_nonfinite(which: _Kind, refused: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Where only the candidate is not finite, but for gradients of steps that its scaler refused: that is its work."""
    bad = which.candidate_bad & ~which.reference_bad
    if "gradient" in which.kind:
        bad = bad & ~np.isin(which.steps, refused)[:, None]
    return bad


def _kind(
    reference: LayerRecords, candidate: LayerRecords, kind: str, columns: Sequence[Sequence[int]], last: int | None
) -> _Kind:
    sides = []
    for records, chosen in zip((reference, candidate), columns):
        steps, l2 = records.samples(kind, "l2")
        figures = {name: records.samples(kind, name)[1][:, chosen] for name in ("amax", "scale", "nonfinite")}
        # Unscaled: two loss scalers need not agree. An unknown scale is none.
        scale = np.where(np.isnan(figures["scale"]), 1.0, figures["scale"]).astype(np.float64)
        norms = l2[:, chosen].astype(np.float64)
        known = ~np.isnan(figures["nonfinite"])
        bad = known & ((figures["nonfinite"] > 0) | ~np.isfinite(norms))
        sides.append((steps, norms / scale, figures["amax"].astype(np.float64) / scale, bad))
    steps, left, right = np.intersect1d(sides[0][0], sides[1][0], return_indices=True)
    if last is not None:
        count = int((steps <= last).sum())
        steps, left, right = steps[:count], left[:count], right[:count]
    before, after = sides[0][1][left], sides[1][1][right]
    amaxes = sides[0][2][left], sides[1][2][right]
    return _Kind(
        kind,
        steps,
        before,
        after,
        relative_errors(*amaxes),
        relative_errors(before, after),
        sides[0][3][left],
        sides[1][3][right],
    )


def relative_errors(reference: Floats, candidate: Floats) -> Floats:
    """|candidate - reference| / reference by sample and layer, (n, layers); NaN where either is unknown or not finite.

    A reference under FLOOR_SHARE of the root mean square over the layers counts as that.
    """
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        finite = np.isfinite(reference) & np.isfinite(candidate)
        squares = np.where(finite, reference, 0.0) ** 2
        count = np.maximum(finite.sum(axis=1, keepdims=True), 1)
        floor = FLOOR_SHARE * np.sqrt(squares.sum(axis=1, keepdims=True) / count)
        difference = np.abs(candidate - reference)
        errors = difference / np.maximum(np.abs(reference), floor)
    errors = np.where(difference == 0, 0.0, errors)
    return np.where(finite, errors, np.nan)


def _layer_errors(which: _Kind, names: Sequence[str], tolerance: float) -> list[LayerError]:
    found = []
    for index, name in enumerate(names):
        errors = which.errors[:, index]
        if not len(errors) or np.isnan(errors).all():
            continue
        worst = int(np.nanargmax(errors))
        amax = float(which.amax[worst, index])
        first = _first_step(which.steps, errors > tolerance)
        step = int(which.steps[worst])
        found.append(
            LayerError(name, which.kind, float(errors[worst]), step, None if math.isnan(amax) else amax, first)
        )
    return found


def first_place(kinds: Sequence[_Kind], names: Sequence[str], marked: Sequence[NDArray[np.bool_]]) -> Drift | None:
    """The first marked place: by step, then in the order in which an error spreads within a step (SPREAD)."""
    best: tuple[int, int, int, int] | None = None
    found: Drift | None = None
    for which, marks in zip(kinds, marked):
        order, direction, last = SPREAD[which.kind]
        for row, index in np.argwhere(marks).tolist():
            place = (int(which.steps[row]), order, direction * index, last)
            if best is None or place < best:
                best = place
                values = float(which.reference[row, index]), float(which.candidate[row, index])
                found = Drift(names[index], which.kind, place[0], float(which.errors[row, index]), *values)
    return found
