"""Checks of a training script, from what the probe told of a few of its steps; nothing is read out of its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp8console.doctor.findings import FAIL, NOT_APPLICABLE, OK, WARN, Finding, not_known, plural

GROUP = "script"
#: Smallest normal and smallest subnormal number of the dtypes that parameters have (IEEE 754, bfloat16's definition).
DTYPES = {
    "float16": (2.0**-14, 2.0**-24),
    "bfloat16": (2.0**-126, 2.0**-133),
    "float32": (2.0**-126, 2.0**-149),
    "float64": (2.0**-1022, 2.0**-1074),
}
#: FP8 products need this many elements, or a multiple, in each dimension that they add over or store.
MULTIPLE = 16
#: Layers named in one line.
MOST_NAMES = 6


@dataclass(frozen=True)
class Trial:
    """A few steps of the script. ``inspected``: the probe's last event of that kind; ``error``: why it ended early."""

    steps: int
    seconds: float
    error: str | None
    run_dir: str | None
    inspected: Mapping[str, Any] | None
    scaled_clips: int


def check(trial: Trial) -> list[Finding]:
    """All of them."""
    found = [_ran(trial)]
    about = trial.inspected
    if about is None:
        why = "the script was not seen to run a backward pass"
        names = ("optimizer eps", "loss scaler", "fp16 parameters", "clipping", "FP8 shapes")
        return found + [not_known(GROUP, name, why) for name in names]
    found += _eps(about)
    found += [_scaler(about), _fp16(about, trial), _clipping(about, trial)]
    return [*found, _shapes(about)]


def _ran(trial: Trial) -> Finding:
    words = f"{plural(trial.steps, 'step')} in {trial.seconds:.1f} s"
    if trial.error is None:
        return Finding(GROUP, "runs", OK, words)
    see = f"see {trial.run_dir}/output.log" if trial.run_dir else None
    return Finding(GROUP, "runs", FAIL, f"{words}: {trial.error}", see)


# -- optimizer --------------------------------------------------------------------------------------------------------
def _eps(about: Mapping[str, Any]) -> list[Finding]:
    name = "optimizer eps"
    found: dict[Finding, None] = {}
    for optimizer in about["optimizers"]:
        for group in optimizer["groups"]:
            if group["eps"] is not None:
                for dtype in group["dtypes"]:
                    found[judge_eps(optimizer["class"], group["eps"], dtype, group["fused"])] = None
    if not found:
        many = len(about["optimizers"])
        why = (
            f"{'the optimizer has' if many == 1 else 'the optimizers have'} no eps"
            if many
            else "no torch optimizer was seen"
        )
        return [Finding(GROUP, name, NOT_APPLICABLE, why)]
    bad = [finding for finding in found if finding.verdict != OK]
    return bad or list(found)


def judge_eps(optimizer: str, eps: float, dtype: str, fused: bool) -> Finding:
    """An optimizer's eps against the dtype of the parameters, and so of the state that it is added to."""
    name = "optimizer eps"
    words = f"{optimizer}'s eps {eps:g} for {dtype} parameters"
    if dtype not in DTYPES:
        return not_known(GROUP, name, f"{words}: a dtype that this check does not know")
    normal, subnormal = DTYPES[dtype]
    if fused and dtype in ("float16", "bfloat16"):
        return Finding(GROUP, name, OK, f"{words}: a fused optimizer adds it in float32")
    if eps <= subnormal / 2:  # half of it, to nearest even, is 0 too
        remedy = f"keep the parameters in float32 (autocast for the rest), or eps={_least(normal):g}"
        return Finding(GROUP, name, FAIL, f"{words} is 0 there: a gradient of 0 gives 0/0, NaN", remedy)
    if eps < normal:
        remedy = f"eps={_least(normal):g} or more, or float32 parameters"
        return Finding(GROUP, name, WARN, f"{words} is below the smallest normal number, {normal:.2g}", remedy)
    return Finding(GROUP, name, OK, words)


def _least(normal: float) -> float:
    """The power of ten from ``normal`` up: 1e-4 for fp16's 6.1e-5."""
    value = 1.0
    while value / 10 >= normal:
        value /= 10
    return value


# -- scaler and clipping ----------------------------------------------------------------------------------------------
def _scaler(about: Mapping[str, Any]) -> Finding:
    name = "loss scaler"
    scalers = about["scalers"]
    if not scalers:
        return Finding(GROUP, name, NOT_APPLICABLE, "the script makes no GradScaler")
    by_itself = [s for s in scalers if not s["enabled"] and s["asked"]]
    if by_itself:
        words = f"{by_itself[0]['class']}({by_itself[0]['device']!r}) disabled itself: there is no such device"
        remedy = f"name the training's device: torch.amp.GradScaler({str(about['device']).split(':')[0]!r})"
        return Finding(GROUP, name, FAIL, f"{words}, and no loss is scaled", remedy)
    off = [s for s in scalers if not s["enabled"]]
    if len(off) == len(scalers):
        return Finding(GROUP, name, NOT_APPLICABLE, f"{off[0]['class']} made with enabled=False: no loss is scaled")
    on = next(s for s in scalers if s["enabled"])
    return Finding(GROUP, name, OK, f"{on['class']} is enabled" + ("" if on["used"] else ", not used so far"))


def _fp16(about: Mapping[str, Any], trial: Trial) -> Finding:
    name = "fp16 parameters"
    half = int(about["parameters"].get("float16", 0))
    on = any(s["enabled"] for s in about["scalers"])
    if not half:
        kinds = ", ".join(about["parameters"]) or "none found"
        return Finding(GROUP, name, OK if about["parameters"] else NOT_APPLICABLE, f"none (parameters: {kinds})")
    words = f"{half:,} of the parameters are float16"
    if not on:
        return Finding(GROUP, name, NOT_APPLICABLE, f"{words}, without an enabled GradScaler")
    evidence = f"{words}, with a GradScaler, which refuses to unscale fp16 gradients"
    return Finding(GROUP, name, FAIL, evidence, "keep the model in float32 (no model.half()) and use torch.autocast")


def _clipping(about: Mapping[str, Any], trial: Trial) -> Finding:
    name = "clipping"
    if not any(s["enabled"] for s in about["scalers"]):
        return Finding(GROUP, name, NOT_APPLICABLE, "no enabled GradScaler: gradients carry no scale to clip with")
    if trial.scaled_clips:
        evidence = f"{plural(trial.scaled_clips, 'step')} of {trial.steps} clipped gradients that carry the loss scale"
        return Finding(GROUP, name, FAIL, evidence, "call scaler.unscale_(optimizer) before clip_grad_norm_")
    if not trial.steps:
        return not_known(GROUP, name, "no step was seen")
    return Finding(GROUP, name, OK, f"none before unscale_ in {plural(trial.steps, 'step')}")


# -- shapes -----------------------------------------------------------------------------------------------------------
def _shapes(about: Mapping[str, Any]) -> Finding:
    """A linear layer's three products: x W^T adds over inputs, its gradients over outputs and over rows."""
    name = "FP8 shapes"
    products = about["products"]
    if not products:
        return Finding(GROUP, name, NOT_APPLICABLE, "no linear layer was seen in a forward pass")
    bad = {str(product["name"]): wrong for product in products if (wrong := odd_sizes(product))}
    if not bad:
        evidence = f"{plural(len(products), 'linear layer')}, all sizes multiples of {MULTIPLE}"
        return Finding(GROUP, name, OK, evidence)
    words = [f"{layer} has {' and '.join(wrong)}" for layer, wrong in bad.items()]
    more = f", and {len(words) - MOST_NAMES} more" if len(words) > MOST_NAMES else ""
    evidence = f"{len(bad)} of {plural(len(products), 'linear layer')}: {', '.join(words[:MOST_NAMES])}{more}"
    remedy = f"FP8 hardware takes multiples of {MULTIPLE}: pad these sizes, or leave those layers out of FP8"
    return Finding(GROUP, name, WARN, evidence, remedy)


def odd_sizes(product: Mapping[str, Any]) -> list[str]:
    """What of a layer is no multiple of 16: "65 outputs", "37 rows a batch"."""
    sizes = (("input", product["inputs"]), ("output", product["outputs"]))
    wrong = [plural(size, word) for word, size in sizes if size % MULTIPLE]
    rows = [str(many) for many in product["rows"] if many % MULTIPLE]
    return wrong + ([f"{' or '.join(rows)} rows a batch"] if rows else [])
