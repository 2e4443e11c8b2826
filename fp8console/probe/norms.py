"""Global L2 norm of gradients, without changing them and without waiting for a device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fp8console.probe.readback import Reading, take

_LOW_PRECISION = (torch.float16, torch.bfloat16)


def gradients(optimizer: Any, leave_out: frozenset[int] = frozenset()) -> list[torch.Tensor]:
    """The gradients an optimizer will use; parameters whose id is in ``leave_out`` are skipped."""
    return [
        grad
        for group in optimizer.param_groups
        for parameter in group["params"]
        if (grad := parameter.grad) is not None and id(parameter) not in leave_out
    ]


def l2(grads: list[torch.Tensor], at_once: bool, careful: bool = False) -> list[Reading]:
    """L2 norms whose root of the sum of squares is the global norm; empty when a norm can't be had.

    float32 squares overflow above 1.8e19 and vanish below 1e-23 (the root of float32's limits), so with ``careful``,
    and at once on the CPU when the first result is not an ordinary number, the norms are taken in float64.
    fp16 and bf16 gradients are summed in float32. A sharded gradient (DTensor) gives none: its global norm needs a
    collective, which a monitor must not start.
    """
    if at_once and _alike(grads):
        # Alike float32 gradients on the CPU, nearly always the case there: nothing to sort, nothing to convert.
        value = hypot(_floats(torch._foreach_norm(grads, 2)))
        if 1e-18 < value < 1e18:
            return [value]
    if any(grad.requires_grad for grad in grads):
        grads = [grad.detach() for grad in grads]  # kept by create_graph: the norm must not join that graph
    parts: list[Reading] = []
    for group in _groups(grads):
        if any(hasattr(grad, "_local_tensor") for grad in group if type(grad) is not torch.Tensor):
            return []
        device = group[0].device.type
        here = at_once and device == "cpu"
        norms = _norms(group, torch.float64 if careful and not here and device != "mps" else None)
        if here:
            value = hypot(_floats(norms))
            if not 1e-18 < value < 1e18:
                value = hypot(_floats(_norms(group, torch.float64)))
            parts.append(value)
        else:
            parts.append(take(torch.linalg.vector_norm(torch.stack(norms)), at_once))
    return parts


def clip(
    grads: list[torch.Tensor],
    max_norm: float | Callable[[torch.Tensor], torch.Tensor],
    scale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Clip gradients in place to ``max_norm`` (times ``scale``, which they still carry if given): (norm, limit).

    ``max_norm`` may be a function of the unscaled norm.
    ``min(1, limit / (norm + 1e-6))``, torch.nn.utils.clip_grad_norm_'s formula, or with a function ``min(1, limit /
    norm)``: a limit that follows norms of about 1e-6 must leave those alone. But a norm that is not finite leaves the
    gradients alone: times 0 or NaN they would be lost. None, with nothing done, for sparse or sharded gradients.
    """
    if not grads or any(grad.is_sparse or hasattr(grad, "_local_tensor") for grad in grads):
        return None
    device = grads[0].device
    with torch.no_grad():
        each = [torch.linalg.vector_norm(grad.float()).to(device, non_blocking=True) for grad in grads]
        total = torch.linalg.vector_norm(torch.stack(each))
        carried = None if scale is None else scale.to(device, non_blocking=True)
        if callable(max_norm):
            limit = max_norm(total if carried is None else total / carried).to(total.dtype)
            added = 0.0
        else:
            limit = torch.full_like(total, max_norm)
            added = 1e-6
        if carried is not None:
            limit = limit * carried
        coefficient = torch.clamp(limit / (total + added), max=1.0)
        coefficient = torch.where(torch.isfinite(total), coefficient, torch.ones_like(coefficient))
        for grad in grads:
            grad.mul_(coefficient.to(grad.device, grad.dtype, non_blocking=True))
    return total, limit


def _alike(grads: list[torch.Tensor]) -> bool:
    for grad in grads:
        if grad.dtype is not torch.float32 or not grad.is_cpu or grad.layout is not torch.strided or grad.requires_grad:
            return False
        if type(grad) is not torch.Tensor:
            return False
    return True


def _floats(norms: Sequence[torch.Tensor]) -> list[float]:
    # Joining the tensors first pays off from a handful on.
    if len(norms) > 6:
        return list(torch.stack(tuple(norms)).tolist())
    return [norm.item() for norm in norms]


def hypot(values: Iterable[float]) -> float:
    """Root of the sum of squares; NaN if any value is NaN (math.hypot lets an infinity win over a NaN)."""
    listed = list(values)
    if len(listed) == 1:
        return abs(listed[0])
    total = math.hypot(*listed)
    return math.nan if total == math.inf and any(map(math.isnan, listed)) else total


def _groups(grads: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Gradients of one device and dtype each, sparse ones made of their summed values."""
    first = grads[0]
    device, dtype = first.device, first.dtype
    if all(grad.dtype is dtype and grad.device == device and not grad.is_sparse for grad in grads):
        return [grads]
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for grad in grads:
        # A sparse gradient lists a row once per use: only the coalesced values make the norm.
        dense = grad.coalesce().values() if grad.is_sparse else grad
        groups.setdefault((grad.device, grad.dtype), []).append(dense)
    return list(groups.values())


def _norms(grads: list[torch.Tensor], dtype: torch.dtype | None) -> list[torch.Tensor]:
    if dtype is None and grads[0].dtype not in _LOW_PRECISION:
        return list(torch._foreach_norm(grads, 2))
    wide = dtype or torch.float32
    if grads[0].is_complex():
        wide = torch.complex128 if wide == torch.float64 else torch.complex64
    return [torch.linalg.vector_norm(grad, 2, dtype=wide) for grad in grads]
