"""Writes run directories as a tuning baseline leaves them, with figures that a test chooses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fp8console.protocol import events, paths, records

ELEMENTS = 4096.0
#: What an element of a normal distribution's largest of 4096 is about, in units of its root mean square.
CREST = 4.0


def layer(name: str, type: str = "Linear", shape: tuple[int, ...] = (64, 64), **rms: Any) -> dict[str, Any]:
    """One layer; ``rms`` of each kind is a number, or a function of the step; kinds not named are not measured."""
    return {
        "name": name,
        "type": type,
        "shape": list(shape),
        "parameters": math.prod(shape),
        "kinds": [kind for kind in records.LAYER_KINDS if kind in rms],
        "rms": rms,
    }


def write_run(
    run_dir: Path,
    layers: list[dict[str, Any]],
    steps: int = 20,
    scale: float = 1.0,
    flags: dict[int, str] | None = None,
    grad_norm: Callable[[int], float | None] = lambda step: None,
    formats: tuple[str, str] = ("e4m3fn", "e5m2"),
    underflowed: float = 0.0,
) -> Path:
    """A run of rank 0 with ``steps`` measured ones. ``rms`` are unscaled; gradients are written times ``scale``."""
    run_dir.mkdir(parents=True, exist_ok=True)
    rows = [records.header()]
    for step in range(1, steps + 1):
        values = {"step": step, "time": 1e9 + step, "loss": 2.0, "grad_norm": grad_norm(step), "lr": 1e-6}
        bits = records.FLAGS[flags[step]] if flags and step in flags else 0
        rows.append(records.pack_step({**values, "scale": scale, "micro_batches": 1}, bits))
    paths.steps_file(run_dir, 0).write_bytes(b"".join(rows))

    rows = [records.header(records.LAYER_FIELDS)]
    for step in range(1, steps + 1):
        for index, about in enumerate(layers):
            for kind, rms in about["rms"].items():
                carried = scale if "gradient" in kind else 1.0
                size = (rms(step) if callable(rms) else rms) * carried
                figures = [size * math.sqrt(ELEMENTS), size * CREST, 0.0, 0.0, ELEMENTS, 0.0, underflowed, 1.0, carried]
                rows.append(records.pack_layer(step, index, records.LAYER_KINDS.index(kind), figures))
    paths.layers_file(run_dir, 0).write_bytes(b"".join(rows))

    described = [{key: value for key, value in about.items() if key != "rms"} for about in layers]
    named = {"forward": {"name": formats[0]}, "backward": {"name": formats[1]}}
    paths.layers_about(run_dir).write_text(json.dumps({"layers": described, "formats": named}))
    info = {"id": "r", "name": "train.py", "world_size": 1, "exit_status": 0}
    info["versions"] = {"torch": "2.13.0+cpu", "fp8console": "0.2"}
    paths_run = run_dir / paths.RUN
    paths_run.write_text(json.dumps(info))
    writer = events.EventWriter(paths.events_file(run_dir, 0))
    about = {"model": "Net", "parameters": 8192, "device_name": "cpu", "batch_size": 32}
    writer.write(events.make("baseline", "begun", None, what="begun", steps=steps, lr=1e-6, taken="x", **about))
    ended = {"steps": steps, "put_back": True, "digest": "0", "digests_equal": True, "goes_on": False}
    writer.write(events.make("baseline", "over", steps, what="ended", **ended))
    return run_dir
