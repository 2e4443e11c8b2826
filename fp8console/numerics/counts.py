"""What a cast did to the values that went through it: how many it saturated, how many it made 0, how far it was.

Counted on the device, from before the cast, so that a format that saturates (and then shows no inf to anyone) is seen
as clearly as one that overflows. Nothing here waits for the device; who reads the figures decides when.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fp8console.numerics.formats import Fp8Format, format_of

#: The places of ``CastCount.values``, in order.
COUNT_FIELDS = ("amax", "elements", "nonzero", "nonfinite", "saturated", "underflowed")

_FLOAT32_MAX = torch.finfo(torch.float32).max


class CastCount:
    """Running figures of one place where tensors are cast to ``fmt``; picklable, and copied by ``copy.deepcopy``.

    ``values`` is float32 of shape (6,), in the order of COUNT_FIELDS, on the device of what was cast last; None before
    the first cast. Since the last ``clear``: ``amax``, the largest finite magnitude (at most float32's maximum);
    ``elements``; ``nonzero``, finite and not 0; ``nonfinite``, NaN and inf; ``saturated``, finite but rounding beyond
    the format's maximum, whatever the cast then makes of it; ``underflowed``, not 0 but made 0. All of them of the
    values as they enter the cast, loss scale included. Counts are exact up to 2**24, then to 7 digits. ``scaled`` says
    that the cast has a scale of its own, so that a loss scale doesn't decide what it loses. Raises UnknownFormat.
    """

    def __init__(self, name: str, fmt: Fp8Format | str | torch.dtype, scaled: bool = False) -> None:
        self.name = name
        self.fmt = format_of(fmt)
        self.scaled = scaled
        self.values: Tensor | None = None

    def add(self, x: Tensor) -> None:
        """Count the elements of ``x``, of any shape and floating-point dtype, just before they are cast."""
        with torch.no_grad():
            x = x.detach()
            if hasattr(x, "to_local"):  # a DTensor, of tensor parallelism: each rank counts its own part
                x = x.to_local()
            if self.values is None:
                self.values = torch.zeros(len(COUNT_FIELDS), dtype=torch.float32, device=x.device)
            elif self.values.device != x.device:
                self.values = self.values.to(x.device)
            if x.numel() == 0:
                return
            amax, counts = _figures(x, self.fmt)
            self.values[0] = torch.maximum(self.values[0], amax)
            self.values[1:] += counts

    def clear(self) -> None:
        """Start again from 0, in place."""
        if self.values is not None:
            self.values.zero_()

    def __repr__(self) -> str:
        return f"CastCount({self.name!r}, {self.fmt.name!r})"


def cast_counts(model: nn.Module) -> list[CastCount]:
    """The counts that tell how well a loss scale fits: every module's ``grad_counts``, each once, in module order.

    Without those of casts that have a scale of their own. A count that has no name yet is named after its module.
    """
    found: list[CastCount] = []
    for name, module in model.named_modules():
        counts = getattr(module, "grad_counts", None)
        if isinstance(counts, CastCount) and not counts.scaled and not any(counts is other for other in found):
            counts.name = counts.name or name
            found.append(counts)
    return found


def _figures(x: Tensor, fmt: Fp8Format) -> tuple[Tensor, Tensor]:
    """amax, 0-d, and the five counts, (5,), both float32."""
    # Every bound below has few enough bits to be exact in bfloat16 and float16, so no wider copy is needed.
    magnitude = x.abs().nan_to_num_(nan=math.inf, posinf=math.inf)
    is_beyond = torch.ge if fmt.edge_overflows else torch.gt

    # A comparison into numbers is several times faster on a CPU than one into bools, and so is their sum.
    marks = torch.empty_like(magnitude)

    def count(compare: Callable[..., Tensor], bound: float) -> Tensor:
        return compare(magnitude, bound, out=marks).sum(dtype=torch.float32)

    nonfinite = count(torch.eq, math.inf)
    zeros = count(torch.eq, 0.0)
    # Differences of sums over nested sets: equal sets give equal sums, so nothing is made up where counts are rounded.
    saturated = count(is_beyond, fmt.overflow_edge) - nonfinite
    underflowed = count(torch.le, fmt.min_subnormal / 2) - zeros
    elements = torch.full_like(zeros, x.numel())
    counts = torch.stack((elements, elements - zeros - nonfinite, nonfinite, saturated, underflowed))

    amax = magnitude.nan_to_num_(posinf=0.0).amax()
    if amax.dtype == torch.float64:
        amax = amax.clamp_max(_FLOAT32_MAX)
    return amax.float(), counts
