"""Scales of single tensors: what a tensor is multiplied by before its cast, so that it fills the format's range.

Dynamic: from the tensor's own largest magnitude. Delayed: from those of the casts before, so that the cast needs one
pass only. No branch depends on a value, so nothing here waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fp8console.numerics.formats import Fp8Format, format_of

#: The ways of scaling that go by a name; None casts values as they come.
SCALINGS = (None, "dynamic", "delayed")

#: A scale's bounds: powers of two whose reciprocals are normal float32 numbers too.
_SMALLEST, _LARGEST = 2.0**-126, 2.0**126


def scale_for(
    amax: Tensor, fmt: Fp8Format | str | torch.dtype, current: Tensor, margin: float = 0.0, power_of_two: bool = False
) -> Tensor:
    """``fmt.max / amax / 2**margin``, float32 in the shape of ``amax``; with ``power_of_two`` the next one below.

    ``current`` where ``amax`` is 0, NaN or inf. Held within 2**-126 and 2**126. The formula is TransformerEngine's
    (its DelayedScaling recipe); older versions of it took the power of two. Raises UnknownFormat.
    """
    amax = amax.float()
    # Two tensors, since torch divides a number by a tensor by way of the reciprocal and so rounds twice.
    proposed = torch.full_like(amax, format_of(fmt).max * 2.0**-margin) / amax
    if power_of_two:
        # By the exponent's bits alone: exact everywhere, and an infinite quotient stays one.
        proposed = (proposed.view(torch.int32) & 0x7F80 << 16).view(torch.float32)
    known = (amax > 0) & (amax < math.inf)
    # The bounds come last: a tiny amax has an infinite quotient.
    return torch.where(known, proposed.clamp(_SMALLEST, _LARGEST), current.float())


def _largest_magnitude(x: Tensor) -> Tensor:
    """Of all elements, 0-d; NaN where one is NaN, 0 where there are none."""
    return x.detach().abs().amax() if x.numel() else x.new_zeros(())


class DynamicScale(nn.Module):
    """The scale that takes a tensor's largest magnitude to the format's maximum, anew for every tensor.

    1 for a tensor that is 0 throughout, empty, or not finite. With ``power_of_two``, the power of two below it, which
    changes no mantissa. ``margin`` in bits below the maximum. Raises UnknownFormat.
    """

    def __init__(self, fmt: Fp8Format | str | torch.dtype, margin: float = 0.0, power_of_two: bool = False) -> None:
        super().__init__()
        self.fmt = format_of(fmt)
        self.margin = margin
        self.power_of_two = power_of_two

    def scale_of(self, x: Tensor) -> Tensor:
        """The scale for ``x``, 0-d float32 on its device."""
        with torch.no_grad():
            amax = _largest_magnitude(x).float()
            return scale_for(amax, self.fmt, torch.ones_like(amax), self.margin, self.power_of_two)

    def extra_repr(self) -> str:
        return f"{self.fmt.name}, margin={self.margin:g}" + (", power_of_two" if self.power_of_two else "")


class DelayedScale(nn.Module):
    """The scale that takes the largest magnitude of the last ``history`` casts to the format's maximum.

    1 before the first cast; each cast in training mode then enters its own amax, for the casts after it. As in
    TransformerEngine's DelayedScaling recipe (amax_compute_algo "max"), with three differences: an amax of NaN or inf
    is entered as 0, where theirs keeps the scale from moving until it has left the history; the scale follows after
    every cast, where theirs follows when its autocast region ends; and ranks are not joined, where theirs takes the
    largest amax of all. DistributedDataParallel gives every rank the history of rank 0, whose scale the others'
    values may be too large for; with ``broadcast_buffers=False`` each keeps its own. ``amax_history``, (history,), and
    ``scale``, (1,), are buffers of float32 and stay so when the module is converted to another dtype. Raises
    UnknownFormat, and ValueError for a history below 1.
    """

    amax_history: Tensor
    scale: Tensor

    def __init__(
        self,
        fmt: Fp8Format | str | torch.dtype,
        history: int = 1024,
        margin: float = 0.0,
        power_of_two: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if history < 1:
            raise ValueError(f"history must be 1 or more, not {history}")
        self.fmt = format_of(fmt)
        self.margin = margin
        self.power_of_two = power_of_two
        self.register_buffer("amax_history", torch.zeros(history, device=device))
        self.register_buffer("scale", torch.ones(1, device=device))

    def scale_of(self, x: Tensor) -> Tensor:
        """The scale for ``x``, 0-d float32; in training mode ``x`` then enters the history."""
        with torch.no_grad():
            used = self.scale[0].clone()
            if self.training:
                amax = _largest_magnitude(x).float()
                history = self.amax_history.roll(1)
                history[0] = torch.where(amax < math.inf, amax, 0.0)
                self.amax_history.copy_(history)
                self.scale.copy_(scale_for(history.amax(), self.fmt, used, self.margin, self.power_of_two))
            return used

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DelayedScale:
        kept = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in kept.items():
            after = self._buffers[name]
            # In float16 an amax would be inf: only moves between devices are for these.
            if before is not None and after is not None and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        return self

    def extra_repr(self) -> str:
        bits = f"{self.fmt.name}, history={len(self.amax_history)}, margin={self.margin:g}"
        return bits + (", power_of_two" if self.power_of_two else "")


def tensor_scale(
    scaling: str | None,
    fmt: Fp8Format | str | torch.dtype,
    history: int = 1024,
    margin: float = 0.0,
    power_of_two: bool = False,
    device: torch.device | None = None,
) -> DynamicScale | DelayedScale | None:
    """The way of scaling of that name, of SCALINGS. Raises UnknownFormat, and ValueError for another name."""
    if scaling not in SCALINGS:
        raise ValueError(f"scaling is one of {', '.join(map(str, SCALINGS))}, not {scaling!r}")
    if scaling == "dynamic":
        return DynamicScale(fmt, margin, power_of_two)
    if scaling == "delayed":
        return DelayedScale(fmt, history, margin, power_of_two, device)
    return None
