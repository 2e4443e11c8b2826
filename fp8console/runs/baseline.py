"""The figures of a tuning baseline, read from a run's records: unscaled, of the steps that can be used."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8console.protocol import paths
from fp8console.protocol.records import LAYER_KINDS
from fp8console.runs.layers import LayerRecords
from fp8console.runs.quantisation import FORMATS, Format, Values, format_from
from fp8console.runs.reader import StepRecords

#: Flags of a step whose figures say nothing about the gradients to expect, and how they are called.
UNUSABLE = {"skipped": "skipped", "loss_nonfinite": "non-finite loss", "grad_nonfinite": "non-finite gradients"}


@dataclass
class KindFigures:
    """One kind of tensor: arrays (steps, layers) of float64, the loss scale taken out, NaN where unknown."""

    amax: Values
    l2: Values
    rms: Values
    underflowed: Values  # share of the nonzero elements, counted at ``scale``
    scale: Values


@dataclass
class Baseline:
    """``steps`` (n,) are the usable ones, ascending; ``left_out`` counts the others by reason."""

    layers: list[dict[str, Any]]
    forward: Format
    backward: Format
    steps: NDArray[np.int64]
    left_out: dict[str, int]
    figures: dict[str, KindFigures]
    grad_norm: Values = field(default_factory=lambda: np.empty(0))  # (n,), unscaled, before clipping
    lr: Values = field(default_factory=lambda: np.empty(0))

    def of(self, kind: str) -> KindFigures | None:
        """The figures of one kind, None when no layer has any."""
        found = self.figures.get(kind)
        return found if found is not None and np.isfinite(found.amax).any() else None


def read_baseline(
    run_dir: Path, last_step: int | None = None, world_size: int = 1, gradient_format: str | None = None
) -> Baseline:
    """The baseline in a run directory, up to ``last_step``; figures of rank 0, but amax the largest over the ranks.

    ``gradient_format`` (a name of FORMATS) goes before the one that the run's records are about.
    """
    steps = StepRecords(paths.steps_file(run_dir, 0))
    number = steps.column("step").astype(np.int64)
    usable = np.ones(len(number), np.bool_)
    if last_step is not None:
        usable &= number <= last_step
    left_out: dict[str, int] = {}
    for flag, name in UNUSABLE.items():
        bad = usable & steps.flag(flag)
        if bad.any():
            left_out[name] = int(bad.sum())
        usable &= ~bad
    chosen = number[usable]

    layers = LayerRecords(run_dir)
    ranks = [LayerRecords(run_dir, rank) for rank in range(1, world_size)]
    figures = {kind: _figures(layers, ranks, kind, chosen) for kind in LAYER_KINDS}
    measured = np.zeros(len(chosen), np.bool_)
    for kind in figures.values():
        measured |= np.isfinite(kind.amax).any(axis=1)
    if (~measured).any():
        left_out["without layer statistics"] = int((~measured).sum())
    figures = {
        name: KindFigures(*(part[measured] for part in (kind.amax, kind.l2, kind.rms, kind.underflowed, kind.scale)))
        for name, kind in figures.items()
    }
    return Baseline(
        layers=layers.layers,
        forward=format_from(layers.formats.get("forward"), "e4m3fn"),
        backward=FORMATS[gradient_format] if gradient_format else format_from(layers.formats.get("backward"), "e5m2"),
        steps=chosen[measured],
        left_out=left_out,
        figures=figures,
        **{name: _column(steps, name, usable)[measured] for name in ("grad_norm", "lr")},
    )


def _column(steps: StepRecords, name: str, usable: NDArray[np.bool_]) -> Values:
    values = steps.column(name).astype(np.float64)
    return np.where(steps.known(name), values, np.nan)[usable]


def _figures(layers: LayerRecords, ranks: list[LayerRecords], kind: str, wanted: NDArray[np.int64]) -> KindFigures:
    width = len(layers.layers)

    def taken(source: LayerRecords, name: str) -> Values:
        steps, values = source.samples(kind, name)
        aligned = np.full((len(wanted), width), np.nan)
        places = np.searchsorted(wanted, steps)
        inside = places < len(wanted)
        inside[inside] = wanted[places[inside]] == steps[inside]
        columns = min(width, values.shape[1])
        aligned[places[inside], :columns] = values[inside, :columns]
        return aligned

    scale = taken(layers, "scale")
    with np.errstate(invalid="ignore", divide="ignore"):
        amax = taken(layers, "amax") / scale
        l2 = taken(layers, "l2") / scale
        l2[~np.isfinite(l2)] = np.nan
        rms = l2 / np.sqrt(taken(layers, "elements"))
        for other in ranks:
            amax = np.fmax(amax, taken(other, "amax") / taken(other, "scale"))
    amax[~np.isfinite(amax)] = np.nan
    rms[~np.isfinite(rms)] = np.nan
    return KindFigures(amax, l2, rms, taken(layers, "underflowed"), scale)
