"""Gradient clipping by a threshold from a baseline, or by one that follows the norms; per group of layers.

All on the gradients' devices and without a branch on their values, so that nothing waits for a device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

#: z-score above which a norm is abnormal, weight of the past in the moving averages, and norms that make their
#: beginning: ZClip's defaults (arXiv 2504.02507).
Z = 2.5
DECAY = 0.97
WARMUP = 25
#: Least standard deviation, as a share of the mean: nearly constant norms are not abnormal for their last digits. Ours.
LEAST_SPREAD = 0.01
#: A z-score up to here is ordinary (2.3% of a normal distribution lie above); the depth of a stack never goes below.
ORDINARY_Z = 2.0
_LOW_PRECISION = (torch.float16, torch.bfloat16)

#: The columns of a state: norms taken in, their mean and variance; steps seen and steps clipped.
STATE = ("count", "mean", "variance", "steps", "clipped")


def threshold_from_baseline(
    norms: Iterable[float] | Tensor, quantile: float = 0.95, factor: float = 1.5
) -> float | None:
    """A clip threshold from the unscaled gradient norms of a baseline: their ``quantile`` times ``factor``.

    Linear interpolation between the two nearest norms; norms that are not finite are left out. None without a finite
    norm over 0. Raises ValueError for a quantile outside 0 to 1 or a factor that is not over 0.
    """
    if not 0 <= quantile <= 1:
        raise ValueError(f"quantile must lie between 0 and 1, not {quantile:g}")
    if not (factor > 0 and math.isfinite(factor)):
        raise ValueError(f"factor must be a finite number over 0, not {factor:g}")
    listed = norms.detach().reshape(-1).tolist() if isinstance(norms, Tensor) else norms
    finite = sorted(float(norm) for norm in listed if math.isfinite(norm))
    if not finite or finite[-1] <= 0:
        return None
    place = quantile * (len(finite) - 1)
    below = math.floor(place)
    above = min(below + 1, len(finite) - 1)
    return (finite[below] + (finite[above] - finite[below]) * (place - below)) * factor


def depth_margin(layers: int) -> float:
    """What is left of a threshold's margin over ordinary norms in a stack of so many layers: ``1 / sqrt(layers)``.

    The rule is ours. The squared norm of a stack is the sum over its layers; where their noises are independent its
    relative spread falls as 1 / sqrt(layers), so the same excess is rarer, and means more, in a deeper stack. Raises
    ValueError for less than one layer.
    """
    if layers < 1:
        raise ValueError(f"a stack has at least one layer, not {layers}")
    return 1 / math.sqrt(layers)


def thresholds_from_baseline(
    norms: Mapping[str, Iterable[float]], layers: Mapping[str, int], quantile: float = 0.95, factor: float = 1.5
) -> dict[str, float | None]:
    """A threshold for each group: its quantile times ``1 + (factor - 1) * depth_margin(layers of the group)``.

    ``layers`` holds the groups' numbers of layers, 1 where missing. None and ValueError as threshold_from_baseline.
    """
    return {
        name: threshold_from_baseline(values, quantile, 1 + (factor - 1) * depth_margin(layers.get(name, 1)))
        for name, values in norms.items()
    }


def depth_z(z: float, margin: float) -> float:
    """The z-score limit of a group: what ``z`` is over ``ORDINARY_Z`` counts only as ``margin`` of it."""
    return z if z <= ORDINARY_Z else ORDINARY_Z + (z - ORDINARY_Z) * margin


def z_limit(norm: Tensor, state: Tensor, z: float | Tensor, warmup: int = WARMUP) -> Tensor:
    """The largest norm allowed for gradients that have ``norm``: inf until ``warmup`` norms were taken in.

    ZClip (arXiv 2504.02507) with reciprocal clipping: with the state's mean m and standard deviation s and the score
    ``t = (norm - m) / s`` the limit is ``m + z s`` for t up to z, and ``m + z^2 / t s`` beyond: the more abnormal a
    norm, the closer to the mean it is brought. s is at least LEAST_SPREAD of m; inf as well where m is 0 or ``norm``
    is not finite. ``state`` is (..., 3 or more) as STATE, ``norm`` (...).
    """
    count, mean, variance = state[..., 0], state[..., 1], state[..., 2]
    spread = torch.maximum(variance.clamp_min(0).sqrt(), mean * LEAST_SPREAD)
    score = (norm - mean) / spread
    most = z if isinstance(z, Tensor) else torch.full_like(norm, z)
    excess = torch.where(score > most, most * most / score, most)
    usable = (count >= warmup) & (mean > 0) & torch.isfinite(norm)
    return torch.where(usable, mean + excess * spread, torch.full_like(norm, math.inf))


def taken_in(norm: Tensor, state: Tensor, decay: float = DECAY, warmup: int = WARMUP) -> Tensor:
    """The state after ``norm``, which should be what clipping left of it; unchanged by a norm that is not finite.

    The first ``warmup`` norms make a plain mean and variance (of the population); after them, as in ZClip, ``mean =
    decay mean + (1 - decay) norm`` and ``variance = decay variance + (1 - decay) (norm - mean)^2`` with the new mean.
    Steps and clipped are left as they are. Shapes as in z_limit.
    """
    count, mean, variance = state[..., 0], state[..., 1], state[..., 2]
    change = norm - mean
    share = torch.where(count < warmup, 1 / (count + 1), torch.full_like(mean, 1 - decay))
    new_mean = mean + share * change
    plain = variance + share * (change * (norm - new_mean) - variance)
    moving = variance + share * ((norm - new_mean) ** 2 - variance)
    new = torch.stack((count + 1, new_mean, torch.where(count < warmup, plain, moving)), dim=-1)
    new = torch.where(torch.isfinite(norm)[..., None], new, state[..., :3])
    return torch.cat((new, state[..., 3:]), dim=-1)


@dataclass(frozen=True)
class LayerGroup:
    """Parameters that are clipped together; ``layers``: how deep the stack is that they belong to."""

    name: str
    parameters: tuple[nn.Parameter, ...]
    layers: int = 1


def layer_groups(model: nn.Module, groups: str | Sequence[str] = "model") -> list[LayerGroup]:
    """The model's parameters in groups, in the order of the model.

    "model": one group. "stack": each numbered sequence of layers (``blocks.0``, ``blocks.1``, ...) is a group with as
    many layers as it has, everything else goes by its top-level module. "layer": as "stack", but each numbered layer
    is a group of its own. A list of patterns (``"*.attn.*"``): a parameter belongs to the first that its name matches,
    else to "rest". Raises ValueError for another word.
    """
    if isinstance(groups, str) and groups not in ("model", "stack", "layer"):
        raise ValueError(f"groups must be 'model', 'stack', 'layer' or a list of name patterns, not {groups!r}")
    members: dict[str, list[nn.Parameter]] = {}
    stacks: dict[str, str] = {}  # group -> its stack
    numbers: dict[str, set[str]] = {}  # stack -> the numbers of its layers
    for name, parameter in model.named_parameters():
        if groups == "model":
            group = "model"
        elif not isinstance(groups, str):
            group = next((pattern for pattern in groups if fnmatchcase(name, pattern)), "rest")
        else:
            parts = name.split(".")
            place = next((i for i, part in enumerate(parts) if part.isdigit()), None)
            group = parts[0]
            if place is not None:
                stack = ".".join(parts[:place]) or "model"
                numbers.setdefault(stack, set()).add(parts[place])
                group = stack if groups == "stack" else ".".join(parts[: place + 1])
                stacks[group] = stack
        members.setdefault(group, []).append(parameter)
    return [
        LayerGroup(name, tuple(found), len(numbers[stacks[name]]) if name in stacks else 1)
        for name, found in members.items()
    ]


class GradClipper:
    """Clips a model's gradients in place, each group by a limit of its own.

    ``z``: adaptive, only what is abnormal is clipped (``z_limit``); None: not adaptive. ``max_norm``: a fixed limit for
    each group, or limits by group's name (``thresholds_from_baseline``); with both, the smaller one holds. ``groups``:
    see ``layer_groups``. ``margins``: by group's name, how much of ``z``'s margin it is allowed, 0 to 1; by default
    ``depth_margin`` of its stack, so that deeper stacks are clipped earlier. ``decay``, ``warmup``: see ``taken_in``.

    ``clip_()`` belongs before the optimizer's step and, with a scaler, after ``scaler.unscale_(optimizer)``. If any
    group's norm is not finite, no gradient is touched and no norm is taken in, for clipping would make zeros of the
    finite ones and NaN of the others; such a step has to be left out. A scaler has seen it and does so; without one,
    ``clipper.step(optimizer)`` does. Zeroed gradients would not do: momentum and weight decay would still move weights.

    Raises ValueError for what can't be: no limit at all, an unknown group, numbers out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        z: float | None = Z,
        max_norm: float | Mapping[str, float] | None = None,
        groups: str | Sequence[str] = "model",
        margins: Mapping[str, float] | None = None,
        decay: float = DECAY,
        warmup: int = WARMUP,
    ) -> None:
        if z is None and max_norm is None:
            raise ValueError("z and max_norm are both None: nothing would be clipped")
        for name, value in (("z", z), *(_limits(max_norm))):
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be a finite number over 0, not {value:g}")
        if not 0 < decay < 1:
            raise ValueError(f"decay must lie between 0 and 1, not {decay:g}")
        if warmup < 2:
            raise ValueError(f"warmup must be at least 2 norms, not {warmup}")
        self.groups = layer_groups(model, groups)
        if not self.groups:
            raise ValueError("the model has no parameters")
        names = [group.name for group in self.groups]
        for what, given in (("max_norm", max_norm), ("margins", margins)):
            for name in given if isinstance(given, Mapping) else ():
                if name not in names:
                    raise ValueError(f"{what}: no group {name!r}; groups: {', '.join(names)}")
        if any(not 0 <= margin <= 1 for margin in (margins or {}).values()):
            raise ValueError("margins must lie between 0 and 1")
        by_name = max_norm if isinstance(max_norm, Mapping) else dict.fromkeys(names, max_norm)
        fixed = [by_name.get(name) for name in names]
        margin = [(margins or {}).get(group.name, depth_margin(group.layers)) for group in self.groups]
        self.z = None if z is None else [depth_z(z, one) for one in margin]
        self.max_norm = [math.inf if limit is None else limit for limit in fixed]
        self.decay, self.warmup = decay, warmup
        self.skipped = False  # whether the last ``step`` refused to run the optimizer
        #: After ``clip_``, by group (groups,): unscaled norms before it, limits, factors applied; and whether any norm
        #: was not finite, as 0 or 1 in float32, which is the form that fused optimizers take.
        self.norms: Tensor | None = None
        self.limits: Tensor | None = None
        self.coefficients: Tensor | None = None
        self.found_inf: Tensor | None = None
        self._state: Tensor | None = None
        self._constants: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def clip_(self, scale: Tensor | float | None = None) -> Tensor:
        """Clip in place; the global unscaled L2 norm before it, a 0-d tensor.

        ``scale``: the loss scale that the gradients still carry. Norms are taken in float32, so that one over 1.8e19
        counts as infinite. Raises TypeError for sparse and sharded gradients.
        """
        grads = [[p.grad for p in group.parameters if p.grad is not None] for group in self.groups]
        first = next((grad for group in grads for grad in group), None)
        device = torch.device("cpu") if first is None else first.device
        carried = torch.stack([_norm(group, device) for group in grads])
        norms = carried if scale is None else carried / _on(scale, carried)
        state, (fixed, z) = self._state_on(device), self._constants_on(device)
        adaptive = torch.full_like(norms, math.inf) if self.z is None else z_limit(norms, state, z, self.warmup)
        limits = torch.minimum(adaptive, fixed)
        finite = torch.isfinite(norms).all()
        # Without torch's 1e-6 in the divisor, which would clip ordinary norms of about that size.
        coefficients = torch.where(finite & (norms > limits), limits / norms, torch.ones_like(norms))
        for group, coefficient in zip(grads, coefficients.unbind()):
            _multiply(group, coefficient)
        after = taken_in(torch.minimum(norms, limits), state, self.decay, self.warmup)
        seen = torch.stack((torch.ones_like(norms), (coefficients < 1).to(norms.dtype)), dim=-1)
        after = torch.cat((after[..., :3], state[..., 3:] + seen), dim=-1)
        counts = finite
        if not all(grads):  # a group without gradients in this step has no norm, not one of 0
            # Filled on the device: a list would be copied there, which waits.
            counts = finite & torch.stack([torch.full((1,), bool(group), device=device) for group in grads])
        self._state = torch.where(counts, after, state)
        self.norms, self.limits, self.coefficients = norms, limits, coefficients
        self.found_inf = (~finite).float()
        total: Tensor = torch.linalg.vector_norm(norms)
        return total

    @property
    def should_skip(self) -> Tensor:
        """Whether the last ``clip_`` met a norm that is not finite, as a 0-d bool tensor; ``bool()`` of it waits."""
        return torch.tensor(False) if self.found_inf is None else self.found_inf > 0

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """``optimizer.step()``, unless the last ``clip_`` met a norm that is not finite: then None, and nothing moves.

        A fused optimizer refuses on the device; for the others the answer is read, which waits for it, as a GradScaler
        does. Not for use with a scaler, whose ``step`` refuses by itself.
        """
        self.skipped = False
        if self.found_inf is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.found_inf = self.found_inf  # type: ignore[attr-defined]
            try:
                return optimizer.step(*args, **kwargs)
            finally:
                del optimizer.found_inf  # type: ignore[attr-defined]
        self.skipped = bool(self.should_skip)
        return None if self.skipped else optimizer.step(*args, **kwargs)

    def clip_frequency(self) -> dict[str, float | None]:
        """By group, the share of steps in which its gradients were made smaller; None before the first. Waits."""
        if self._state is None:
            return {group.name: None for group in self.groups}
        steps, clipped = self._state[:, 3].tolist(), self._state[:, 4].tolist()
        return {group.name: c / n if n else None for group, n, c in zip(self.groups, steps, clipped)}

    def state_dict(self) -> dict[str, Any]:
        """The groups' names and their state (groups, 5), columns as STATE."""
        state = self._state_on(torch.device("cpu")) if self._state is None else self._state
        return {"groups": [group.name for group in self.groups], "state": state.clone()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up a state. Raises ValueError, with nothing changed, for one of other groups."""
        names = [group.name for group in self.groups]
        if list(state_dict.get("groups", ())) != names:
            raise ValueError(f"state of other groups: {state_dict.get('groups')}; here: {names}")
        state = torch.as_tensor(state_dict["state"])
        if state.shape != (len(names), len(STATE)):
            raise ValueError(f"state must have the shape ({len(names)}, {len(STATE)}), not {tuple(state.shape)}")
        self._state = state.detach().clone()

    def _state_on(self, device: torch.device) -> Tensor:
        if self._state is None:
            self._state = torch.zeros(len(self.groups), len(STATE), device=device)
        elif self._state.device != device:
            self._state = self._state.to(device, torch.float32, non_blocking=True)
        return self._state

    def _constants_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._constants is None or self._constants[0].device != device:
            z = self.z or [math.inf] * len(self.groups)
            self._constants = torch.tensor(self.max_norm, device=device), torch.tensor(z, device=device)
        return self._constants


def _limits(max_norm: float | Mapping[str, float] | None) -> list[tuple[str, float | None]]:
    if isinstance(max_norm, Mapping):
        return [(f"max_norm of {name!r}", value) for name, value in max_norm.items()]
    return [("max_norm", max_norm)]


def _on(value: Tensor | float, like: Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=like.dtype).to(like.device, non_blocking=True)


def _norm(grads: list[Tensor], device: torch.device) -> Tensor:
    """The L2 norm of all together in float32 on ``device``; 0 for none."""
    if not grads:
        return torch.zeros((), device=device)
    for grad in grads:
        if grad.is_sparse or hasattr(grad, "_local_tensor"):
            kind = "sparse" if grad.is_sparse else "sharded"
            raise TypeError(f"{kind} gradients can't be clipped here: use torch.nn.utils.clip_grad_norm_")
    if all(grad.dtype is torch.float32 and grad.device == device for grad in grads):
        each = list(torch._foreach_norm(grads, 2))
    else:
        norms = [
            torch.linalg.vector_norm(grad, dtype=torch.float32 if grad.dtype in _LOW_PRECISION else None)
            for grad in grads
        ]
        each = [norm.to(device, torch.float32, non_blocking=True) for norm in norms]
    whole: Tensor = torch.linalg.vector_norm(torch.stack(each))
    return whole


def _multiply(grads: list[Tensor], coefficient: Tensor) -> None:
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        alike.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, dtype), members in alike.items():
        real = dtype if dtype.is_floating_point else torch.float32
        torch._foreach_mul_(members, coefficient.to(device, real, non_blocking=True))
