"""Events: one JSON object a line, append-only, one file a writer.

Every event has ``time`` (seconds since the epoch), ``kind``, ``step`` (None when none applies) and ``text`` (one line
for people), and the fields that its kind lists here. Numbers that are not finite go by name (numbers.py).
"""

from __future__ import annotations

import json
import time as clock
from pathlib import Path
from typing import Any

from fp8console.protocol.line_file import LineFile
from fp8console.protocol.numbers import dumps

#: kind -> what it says, and its own fields.
KINDS: dict[str, str] = {
    # supervisor
    "launched": "the training process was started: pid, command",
    "rank_joined": "a rank's probe said hello: rank, world_size, pid, torch, device, gpu (its uuid, slot (PCI "
    "address without function), name, arch, visible (variables that hide GPUs); None off a GPU)",
    "rank_left": "a rank's connection ended: rank",
    "asked": "an operator gave a command: id, command (dict), by",
    "applied": "every rank applied it at `step`: id, command, detail",
    "refused": "it was not applied: id, command, reason",
    "stopping": "the training was told to end: how",
    "ended": "the training process ended: exit_status, signal (name or None), error (last line of a traceback or None)",
    "notice": "something worth knowing that is not a fault: part",
    "fault": "something of ours does not work and was switched off: part, reason",
    "hardware": "an episode of trouble with cards or the host began: episode (number), what ('throttling_power' | "
    "'throttling_thermal' | 'throttling_hbm' | 'ecc_uncorrectable' | 'ecc_correctable' | 'memory' | 'host_memory' | "
    "'disk'), gpus [index], since (seconds since the epoch), evidence [the figures, one for each card]",
    # probe
    "scaler": "an enabled GradScaler was found or changed: class_name, scale, growth_factor, backoff_factor, "
    "growth_interval, floor, cap",
    "settings": "settings in effect by the operator's wish: lr_scale, clip_norm (a norm or 'auto'), clip_z, floor, cap",
    "skipped": "the first skipped step of an episode, its 16th, and one at a scale of 0: scale (that overflowed)",
    "nonfinite": "the first step of an episode with a non-finite loss or gradient norm: what ('loss' | 'grad_norm'), "
    "value",
    "clipping": "over a tenth of the last steps were clipped: count, window (steps), limit (norm, None where unknown)",
    "recovered": "an episode ended: of ('skipped' | 'loss' | 'grad_norm' | 'clipping'), since, count; or of (what a "
    "'hardware' event said), episode, gpus, since, until (seconds since the epoch), worst (share, count or bytes)",
    "snapshot": "a restore point in memory: point (see POINT_FIELDS)",
    "checkpoint": "a restore point on disk: point (see POINT_FIELDS)",
    "verified": "a restore point was verified by digest: point_step, where, ok, digest",
    "point_dropped": "a restore point is gone: point_step, where ('memory' | 'disk'), reason",
    "paused": "the training holds at `step`",
    "resumed": "the training goes on after `step`: held (seconds)",
    "rolled_back": "state was put back: to, where, before {step,loss,scale,lr}, after {...}, digest, digests_equal, "
    "data_rewound (bool), lr_scale, scale",
    "baseline": "a tuning baseline: what ('begun' | 'ended' | 'failed'); begun: steps, lr, taken, model, parameters, "
    "device_name, gradient_format, batch_size; ended: steps, put_back (bool), digest, digests_equal, goes_on; "
    "failed: reason",
    "emulation": "layers work on FP8 values: layers [name], left [name], share (of the parameters)",
    "fingerprint": "what a step of a compared run began with: what ('weights' | 'inputs'), digest, about [text]",
    "inspected": "what the training is made of (doctor): parameters {dtype: count}, optimizers, scalers, device, "
    "products (linear layers: name, inputs, outputs, rows), final (bool)",
    "profile": "a profile's settings were applied: file, applied {name: value}, not_applied [reason]",
}

#: A restore point. ``kind``: 'snapshot' (memory) or 'checkpoint' (disk). ``loss`` is the mean of the last steps' loss.
POINT_FIELDS = (
    *("step", "kind", "tag", "time", "loss", "grad_norm", "scale", "lr"),
    *("bytes", "seconds", "verified", "healthy"),
)


def make(kind: str, text: str, step: int | None = None, **fields: Any) -> dict[str, Any]:
    """An event of this moment. Raises KeyError for a kind that KINDS does not list."""
    KINDS[kind]
    return {"time": clock.time(), "kind": kind, "step": step, "text": text, **fields}


class EventWriter:
    """Appends events to one file; ``failed`` says why the last one could not be written, and nothing is raised.

    The first failure switches it off, unless it is to try ``again`` with each event, as after a disk was full.
    """

    def __init__(self, path: Path, again: bool = False) -> None:
        self.failed: str | None = None
        self._again = again
        self._lines = LineFile(path)
        try:
            self._lines.open()
        except OSError as error:
            self.failed = f"{path}: {error.strerror}"

    def write(self, event: dict[str, Any]) -> None:
        """One line, in one write, so that a kill can tear at most the last line of the file."""
        if self.failed is None or self._again:
            try:
                self._lines.append(dumps(event).encode())
                self.failed = None
            except OSError as error:
                self.failed = str(error.strerror)


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The event of one line, or None for a torn or foreign one."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("kind"), str) or "time" not in event:
        return None
    return event
