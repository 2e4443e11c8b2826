"""What is gathered between two step boundaries, and how it becomes one step record."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from fp8console.probe.norms import hypot
from fp8console.probe.readback import Reading
from fp8console.protocol.records import FLAGS


@dataclass
class Norm:
    """Gradient norms of one optimizer's step: their hypot is its L2 norm, times ``scale`` if there is one."""

    parts: list[Reading]
    scale: Reading | None = None
    parameters: frozenset[int] = frozenset()  # when taken at a clip: whose gradients, by id
    backwards: int = 0  # backward passes of the process when it was taken
    users: set[int] = field(default_factory=set)  # optimizers that have stepped with it, by id


@dataclass
class Clip:
    """One call of ``clip_grad_norm_``: the norm it saw, the maximum it was given, the scale if it was still in."""

    norm: Reading
    max_norm: Reading
    scale: Reading | None
    parameters: frozenset[int]
    backwards: int = 0
    operators: bool = False  # clipped to the operator's limit
    exact: bool = False  # by a limit that follows the norms: without the 1e-6 of torch's formula


@dataclass
class StepWindow:
    """The readings of the step under way. A reading is a float, or a 0-d tensor that has yet to reach the host."""

    losses: list[tuple[Reading, Reading | None]] = field(default_factory=list)  # (loss, scale to divide by)
    micro_batches: int = 0
    norms: list[Norm] = field(default_factory=list)
    clips: list[Clip] = field(default_factory=list)
    found_inf: list[Reading] = field(default_factory=list)
    scale: Reading | None = None
    growth_tracker: Reading | None = None
    lr: Reading | None = None
    scaler_used: bool = False
    unscaled: bool = False
    norm_unknown: bool = False
    data_wait: float = 0.0
    optimizers: list[Any] = field(default_factory=list)  # those that stepped, in order

    def unmeasured(self, ids: frozenset[int], backwards: int) -> frozenset[int]:
        """Of the parameters about to be clipped those whose gradients no earlier clip of this step has measured.

        Norms from before a further backward are dropped: that has made newer gradients of the same parameters.
        """
        self.norms = [
            norm
            for norm in self.norms
            if norm.users or not norm.parameters or norm.backwards == backwards or not norm.parameters <= ids
        ]
        return ids.difference(*(norm.parameters for norm in self.norms if not norm.users))

    def use_norms(self, own: frozenset[int], optimizer: int, unscaled: bool) -> frozenset[int]:
        """An optimizer steps with what clipping has measured and changed: the parameters that need no norm any more.

        ``unscaled``: it steps with gradients as they are, so the script has taken the scale out itself.
        """
        covered: frozenset[int] = frozenset()
        for norm in self.norms:
            if norm.parameters & own and optimizer not in norm.users:
                norm.users.add(optimizer)
                covered |= norm.parameters
                if unscaled:
                    norm.scale = None
        for clip in self.clips if unscaled else ():
            if clip.parameters & own:
                clip.scale = None
        return covered

    def norm_before_clips(self, own: frozenset[int], backwards: int) -> torch.Tensor | None:
        """The unscaled norm of at least these parameters' gradients from before the script clipped them, if it did."""
        for norm in reversed(self.norms):
            if norm.parameters >= own and norm.backwards == backwards and norm.parts:
                parts = torch.stack([torch.as_tensor(part, dtype=torch.float32) for part in norm.parts])
                total: torch.Tensor = torch.linalg.vector_norm(parts)
                return total if norm.scale is None else total / norm.scale
        return None

    def to_readings(self) -> list[Reading]:
        """All readings in the order in which ``record_values`` takes their numbers back."""
        flat: list[Reading] = []
        for loss, scale in self.losses:
            flat += [loss, 1.0 if scale is None else scale]
        for norm in self.norms:
            flat += [*norm.parts, 1.0 if norm.scale is None else norm.scale]
        for clip in self.clips:
            flat += [clip.norm, clip.max_norm, 1.0 if clip.scale is None else clip.scale]
        flat += self.found_inf
        flat += [reading for reading in (self.scale, self.growth_tracker, self.lr) if reading is not None]
        return flat


@dataclass
class HostValues:
    """The part of a record that is known on the host at the boundary."""

    step: int
    time: float
    duration: float | None
    device_memory: int | None
    batch: int | None
    epoch_batches: int | None
    epoch: int | None
    flags: int


def record_values(window: StepWindow, host: HostValues, numbers: list[float]) -> tuple[dict[str, Any], int]:
    """The values and flags of one record from a window's numbers; unknown ones are None.

    loss: mean over micro-batches. grad_norm: hypot over optimizers of (scaled norm / scale). clip_coef: the smallest
    ``min(1, max_norm / (norm + 1e-6))`` over the calls, torch.nn.utils.clip_grad_norm_'s own formula (without 1e-6 for
    limits that follow the norms). clip_limit: the smallest ``max_norm / scale``.
    """
    at = 2 * len(window.losses)
    losses = [_divide(numbers[i], numbers[i + 1]) for i in range(0, at, 2)]
    norms = []
    for norm in window.norms:
        end = at + len(norm.parts)
        norms.append(_divide(hypot(numbers[at:end]), numbers[end]))
        at = end + 1
    chains: list[list[Any]] = []  # clips of the same gradients, one after the other: their factors multiply
    limits: list[float] = []
    for clip in window.clips:
        seen, limit, carried = numbers[at : at + 3]
        factor = _clip_coefficient(seen, limit, carried, clip.exact)
        limits.append(_divide(limit, carried))
        at += 3
        for chain in chains:
            if chain[0] == clip.backwards and chain[1] & clip.parameters:
                chain[1] |= clip.parameters
                chain[2] *= factor
                break
        else:
            chains.append([clip.backwards, clip.parameters, factor])
    coefficients = [chain[2] for chain in chains]
    end = at + len(window.found_inf)
    found_inf = end > at and max(numbers[at:end]) > 0
    rest = iter(numbers[end:])
    scale = next(rest) if window.scale is not None else None
    tracker = next(rest) if window.growth_tracker is not None else None
    lr = next(rest) if window.lr is not None else None

    loss = _mean(losses) if losses else None
    grad_norm = hypot(norms) if norms and not window.norm_unknown else None
    limits = [limit for limit in limits if not math.isnan(limit)]
    clip_coef = min(coefficients) if coefficients and not any(math.isnan(c) for c in coefficients) else None
    flags = host.flags
    if found_inf:
        flags |= FLAGS["skipped"]
    if loss is not None and not math.isfinite(loss):
        flags |= FLAGS["loss_nonfinite"]
    if grad_norm is not None and not math.isfinite(grad_norm):
        flags |= FLAGS["grad_nonfinite"]
    if clip_coef is not None and clip_coef < 1:
        flags |= FLAGS["clipped"]
    if window.clips and any(clip.scale is not None for clip in window.clips):
        flags |= FLAGS["scaled_clip"]
    values = {
        "step": host.step,
        "time": host.time,
        "duration": host.duration,
        "loss": loss,
        "grad_norm": grad_norm,
        "clip_coef": clip_coef,
        "clip_limit": min(limits, default=None),
        "lr": lr,
        "scale": scale,
        "growth_tracker": None if tracker is None else int(tracker),
        "micro_batches": window.micro_batches,
        "data_wait": window.data_wait,
        "device_memory": host.device_memory,
        "batch": host.batch,
        "epoch_batches": host.epoch_batches,
        "epoch": host.epoch,
    }
    return values, flags


def _divide(value: float, by: float) -> float:
    # A scale of 0 or inf leaves nothing to recover the value from.
    return value / by if by and not math.isinf(by) else math.nan


def _mean(values: list[float]) -> float:
    # math.fsum raises on a sum of opposite infinities, and plain sum gives the NaN that is true there.
    return sum(values) / len(values)


def _clip_coefficient(norm: float, max_norm: float, scale: float, exact: bool) -> float:
    if not math.isfinite(norm) or scale != scale:
        return math.nan
    if exact:
        return max_norm / norm if norm > max_norm else 1.0
    return min(1.0, max_norm / (norm + 1e-6))


def parameter_ids(parameters: Any) -> frozenset[int]:
    """What tells these parameters, one or many, from others."""
    return frozenset((id(parameters),) if isinstance(parameters, torch.Tensor) else map(id, parameters))
