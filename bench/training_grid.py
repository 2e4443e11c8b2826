"""Parts 2 and 3 of bench/stability.py: real trainings with their gradients in FP8, one scaler against another.

Each run is one of the samples with one format, loss reduction, scaler and seed. Runs of one seed see the same batches
in the same order from the same start, so final losses are compared pair by pair with the BF16 run of the seed.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "sample_models"))
import char_gpt
import digits_cnn
import recipe

from fp8console.numerics.counts import cast_counts
from fp8console.runs.stability import stability

SAMPLES = ("digits_cnn", "char_gpt")
FORMATS = ("fp8-e5m2", "fp8-e4m3", "fp8-e4m3-saturating", "fp8-e5m2fnuz", "fp8-e4m3fnuz")
REDUCTIONS = ("mean", "sum")
SCALERS = ("headroom", "default", "article")
STEPS = 240
#: The loss, and with it every gradient, is as many times larger in a spike: 6 bits.
SPIKE_FACTOR = 64.0
#: Steps whose mean loss is the final one.
FINAL = 50
#: Of digits_cnn's targets: without it the loss goes to 0, and half a percent of nothing is no yardstick.
SMOOTHING = {"char_gpt": 0.0, "digits_cnn": 0.1}


@dataclass(frozen=True)
class Cell:
    """One training: everything that decides its result."""

    sample: str
    precision: str
    reduction: str
    scaler: str
    seed: int
    steps: int = STEPS


def cells(seeds: Iterable[int], steps: int = STEPS, samples: Iterable[str] = SAMPLES) -> list[Cell]:
    """The references first (BF16, and FP32 to show how far two sound runs are apart), then the grid."""
    seeds, samples = list(seeds), list(samples)
    listed = [
        Cell(sample, precision, reduction, "none", seed, steps)
        for sample, precision, reduction, seed in itertools.product(samples, ("bf16", "fp32"), REDUCTIONS, seeds)
    ]
    listed += [
        Cell(sample, fmt, reduction, scaler, seed, steps)
        for sample, scaler, fmt, reduction, seed in itertools.product(samples, SCALERS, FORMATS, REDUCTIONS, seeds)
    ]
    return listed


def spikes(steps: int) -> tuple[int, int]:
    """The steps with a spike: in the middle, and after three quarters."""
    return steps // 2, steps * 3 // 4


def train(cell: Cell) -> dict[str, Any]:
    """Run one cell; its row for the report. Losses are per target, whatever the reduction."""
    model, loader, options = _build(cell)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: recipe.lr_factor(step, cell.steps))
    scaler = recipe.gradient_scaler(options, model)
    counts = cast_counts(model)
    losses: list[float] = []
    skipped: list[bool] = []
    norms: list[float] = []
    scales: list[float] = []
    totals = torch.zeros(6, dtype=torch.float64)

    step = 0
    while step < cell.steps:
        for inputs, targets in loader:
            step += 1
            with torch.autocast("cpu", torch.bfloat16, enabled=cell.precision == "bf16"):
                logits = model(inputs)
                loss = nn.functional.cross_entropy(
                    logits.flatten(0, -2).float(),
                    targets.flatten(),
                    reduction=cell.reduction,
                    label_smoothing=options.label_smoothing,
                )
            terms = targets.numel() if cell.reduction == "sum" else 1
            losses.append(loss.item() / terms)
            if step in spikes(cell.steps):
                loss = loss * SPIKE_FACTOR
            optimizer.zero_grad()
            (loss if scaler is None else scaler.scale(loss)).backward()
            for count in counts:
                if count.values is not None:
                    totals += count.values.double()
                    if cell.scaler == "default":
                        count.clear()  # torch's scaler doesn't know of them
            if scaler is None:
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), recipe.MAX_GRAD_NORM * terms)))
                optimizer.step()
                skipped.append(False)
            else:
                scales.append(scaler.get_scale())
                scaler.unscale_(optimizer)
                norm = nn.utils.clip_grad_norm_(model.parameters(), recipe.MAX_GRAD_NORM * terms)
                found = scaler._found_inf_per_device(optimizer)
                skipped.append(any(value.item() > 0 for value in found.values()))
                norms.append(float(norm))
                scaler.step(optimizer)
                scaler.update()
            schedule.step()
            if step == cell.steps:
                break
    figures = stability(losses, skipped if scaler is not None else None, norms, jitter_steps=None)
    nonzero = float(totals[2])
    return {
        **asdict(cell),
        "final_loss": sum(losses[-FINAL:]) / len(losses[-FINAL:]),
        "skips": sum(skipped),
        "first_skips": [index + 1 for index, skip in enumerate(skipped) if skip][:40],
        "final_scale": scales[-1] if scales else None,
        "lowest_scale": min(scales) if scales else None,
        "highest_scale": max(scales) if scales else None,
        "saturated": float(totals[4]) / nonzero if nonzero else None,
        "underflowed": float(totals[5]) / nonzero if nonzero else None,
        "figures": asdict(figures),
    }


def _build(cell: Cell) -> tuple[nn.Module, Any, recipe.Options]:
    batch_size, lr = {"char_gpt": (8, 1e-3), "digits_cnn": (64, 2e-3)}[cell.sample]
    options = recipe.Options(
        precision=cell.precision,
        scaler=cell.scaler,
        steps=cell.steps,
        seed=cell.seed,
        batch_size=batch_size,
        lr=lr,
        device=torch.device("cpu"),
        save=None,
        loss=cell.reduction,
        label_smoothing=SMOOTHING[cell.sample],
    )
    torch.manual_seed(cell.seed)
    cast = recipe.gradient_cast(cell.precision)
    if cell.sample == "char_gpt":
        model: nn.Module = char_gpt.CharGPT(cast)
        return model, recipe.shuffled(char_gpt.Windows(char_gpt.standard_library_text()), options), options
    images, labels = digits_cnn.digits()
    last = digits_cnn.TRAINING_IMAGES
    return digits_cnn.DigitsCNN(cast), recipe.shuffled(TensorDataset(images[:last], labels[:last]), options), options


def run(
    listed: list[Cell], kept: Path | None, jobs: int, said: Callable[[int, dict[str, Any]], None]
) -> list[dict[str, Any]]:
    """The rows of all cells, in their order; rows that ``kept`` (JSON lines) has already are not trained again."""
    done: dict[Cell, dict[str, Any]] = {}
    if kept is not None and kept.exists():
        for line in kept.read_text().splitlines():
            row = json.loads(line)
            done[Cell(**{name: row[name] for name in Cell.__dataclass_fields__})] = row
    left = [cell for cell in listed if cell not in done]
    context = torch.multiprocessing.get_context("spawn")
    with context.Pool(jobs, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for cell, row in zip(left, pool.imap(train, left)):
            done[cell] = row
            said(len(done), row)
            if kept is not None:
                with kept.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    return [done[cell] for cell in listed]
