"""A tuning as a profile: the data that the file holds, and the comments beside them."""

from __future__ import annotations

import time
from typing import Any

from fp8console.protocol.profile import VERSION
from fp8console.runs.baseline import Baseline
from fp8console.runs.profiles import Place, dumps
from fp8console.runs.sensitivity import RULE
from fp8console.runs.tuning import Tuning

KIND_TEXT = {"activation_gradient": "activation gradients", "gradient": "weight gradients (no others were seen)"}


def made_of(info: dict[str, Any], begun: dict[str, Any], baseline: Baseline) -> dict[str, Any]:
    """What a profile says of where it comes from: by run.json and the event of the beginning; None where unknown."""
    versions = info.get("versions") or {}
    return {
        "script": info.get("name"),
        "model": begun.get("model"),
        "parameters": begun.get("parameters"),
        "device": begun.get("device_name"),
        "batch_size": begun.get("batch_size"),
        "world_size": info.get("world_size"),
        "torch": versions.get("torch"),
        "fp8console": versions.get("fp8console"),
        "date": time.strftime("%Y-%m-%d"),
        "steps": begun.get("steps"),
        "usable_steps": len(baseline.steps),
        "lr": begun.get("lr"),
    }


def profile_of(tuning: Tuning, baseline: Baseline, made: dict[str, Any]) -> dict[str, Any]:
    """The profile's data; what is unknown is left out."""
    layers = []
    for verdict in tuning.layers:
        figures = {
            "sensitivity": _rounded(verdict.sensitivity),
            "headroom": _rounded(verdict.headroom),
            "spread": _rounded(verdict.spread),
            "underflow": _rounded(verdict.underflow, 4),
            "error": _rounded(verdict.error, 4),
        }
        known = {name: value for name, value in figures.items() if value is not None}
        layers.append({"name": verdict.name, "precision": verdict.precision, **known, "why": verdict.why})
    clipping: dict[str, Any] = {}
    if tuning.clip_norm is not None:
        clipping["clip_norm"] = tuning.clip_norm
    if tuning.clip_groups:
        clipping["groups"] = dict(tuning.clip_groups)
    return {
        "profile": VERSION,
        "made": {name: value for name, value in made.items() if value is not None},
        "format": {"gradients": tuning.format.name, "forward": baseline.forward.name},
        "scaler": dict(tuning.scaler),
        **({"clipping": clipping} if clipping else {}),
        **({"layers": layers} if layers else {}),
    }


def profile_text(data: dict[str, Any], tuning: Tuning) -> str:
    """The profile as commented TOML."""
    notes: dict[Place, str] = {("scaler", name): text for name, text in tuning.reasons.items() if name != "clip_norm"}
    kind = KIND_TEXT.get(tuning.source, tuning.source)
    notes["scaler",] = (
        f"Largest magnitude of the unscaled {kind}: {tuning.amax:.4g}, typically {tuning.amax_typical:.4g}."
    )
    if "clip_norm" in tuning.reasons:
        notes["clipping", "clip_norm"] = tuning.reasons["clip_norm"]
    notes["clipping", "groups"] = (
        'By group of layers, deeper stacks stricter: GradClipper(model, z=None, groups="stack", max_norm=this table).'
    )
    notes["layers",] = f"The most sensitive first. {RULE}."
    notes["made", "lr"] = "of the baseline"
    for name, meaning in (
        ("batch_size", "examples in a batch, a rank"),
        ("usable_steps", "without skipped steps and those with values that are not finite"),
    ):
        notes["made", name] = meaning
    heading = "Tuning profile of fp8console. Apply it: fp8console --profile THIS_FILE train.py"
    return dumps(data, notes, heading)


def _rounded(value: float | None, digits: int = 2) -> float | None:
    return None if value is None else round(value, digits) + 0.0
