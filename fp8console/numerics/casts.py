"""Casts through FP8: the value that a tensor has after it was stored in eight bits, and back.

Rounding is to nearest, ties to even, by exact arithmetic in float32 (float64 for float64), so it is the same for every
torch version and device: ``Tensor.to`` itself saturates float8_e4m3fn in torch 2.13 and gives NaN in older versions
and in compiled code, and its way back from float8_e4m3fn is many times slower on a CPU.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from fp8console.numerics.counts import CastCount
from fp8console.numerics.formats import Fp8Format, format_of

#: What a forward cast's gradient is: the one that arrives, or the same with 0 where the value lay beyond the maximum.
STRAIGHT_THROUGH = ("identity", "clipped")


class TensorScale(Protocol):
    """Gives the factor that a tensor is multiplied by before its cast, as DynamicScale and DelayedScale do."""

    def scale_of(self, x: Tensor) -> Tensor: ...


def cast_through(
    x: Tensor,
    fmt: Fp8Format | str | torch.dtype,
    saturate: bool = False,
    scale: Tensor | float | None = None,
    counts: CastCount | None = None,
) -> Tensor:
    """``x`` rounded to the values of ``fmt``; same shape and dtype as ``x``, detached from its graph.

    A magnitude that rounds beyond the format's maximum becomes what the format says (E5M2: inf of the same sign, the
    others: NaN), or with ``saturate`` the maximum, which also takes the place of an infinity. NaN stays NaN. With
    ``scale``, positive and finite (not checked, for that would wait for the device), the values are multiplied by it
    before the cast and divided by it after. ``counts`` gets them as they enter the cast. Raises UnknownFormat, and
    TypeError for a ``x`` that is not floating point.
    """
    target = format_of(fmt)
    if not x.is_floating_point():
        raise TypeError(f"cast_through takes floating-point tensors, not {x.dtype}")
    with torch.no_grad():
        wide = _entering(x, scale)
        if counts is not None:
            counts.add(wide)
        rounded = _round(wide, target, saturate)
        if scale is not None:
            rounded = rounded / scale
        return rounded.to(x.dtype)


def _entering(x: Tensor, scale: Tensor | float | None) -> Tensor:
    """``x`` as it enters a cast: scaled, in float32 (float64 stays), for 16 bits would round the product first."""
    wide = x.detach() if x.dtype == torch.float64 else x.detach().float()
    return wide if scale is None else wide * scale


def _round(x: Tensor, fmt: Fp8Format, saturate: bool) -> Tensor:
    """float32 or float64 to the nearest value of ``fmt``, as a new tensor."""
    clamped = x.clamp(-fmt.max, fmt.max)
    # The exponent's bits alone are the power of two at or below the magnitude. In the lowest binade and below, where
    # float32's own small numbers give 0, the format's values lie evenly.
    bits, mask = (torch.int64, 0x7FF0 << 48) if x.dtype == torch.float64 else (torch.int32, 0x7F80 << 16)
    binade = (clamped.view(bits) & mask).view(x.dtype).clamp_min_(fmt.min_normal)
    spacing = binade.mul_(2.0**-fmt.mantissa_bits)
    rounded = clamped.div_(spacing).round_().mul_(spacing)
    if not fmt.has_negative_zero:
        rounded.add_(0.0)
    if not saturate:
        # Divided by 0 or 1: max / 0 is the infinity of the right sign. A select costs several times as much.
        rounded.div_(_within(x, fmt))
        if math.isnan(fmt.cast_of_too_large):
            rounded.nan_to_num_(nan=math.nan, posinf=math.nan, neginf=math.nan)
    return rounded


def _within(x: Tensor, fmt: Fp8Format) -> Tensor:
    """1 where ``x`` rounds to at most the maximum, else 0, NaN included; in the dtype of ``x``."""
    magnitude = x.abs()
    return magnitude.lt_(fmt.overflow_edge) if fmt.edge_overflows else magnitude.le_(fmt.overflow_edge)


class _ForwardCast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        fmt: Fp8Format,
        saturate: bool,
        scale: Tensor | float | None,
        counts: CastCount | None,
        clipped: bool,
    ) -> Tensor:
        if clipped:
            ctx.save_for_backward(_within(_entering(x, scale), fmt).to(x.dtype))
        return cast_through(x, fmt, saturate, scale, counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        passed = grads[0] * ctx.saved_tensors[0] if ctx.saved_tensors else grads[0]
        return passed, None, None, None, None, None


def fp8_cast(
    x: Tensor,
    fmt: Fp8Format | str | torch.dtype,
    saturate: bool = True,
    scale: Tensor | float | None = None,
    counts: CastCount | None = None,
    straight_through: str = "identity",
) -> Tensor:
    """``x`` rounded to the values of ``fmt``, as ``cast_through`` does, with a gradient.

    The rounding counts as the identity (``straight_through="identity"``), or as the identity with a gradient of 0
    where the scaled value lay beyond the format's maximum ("clipped"), as a clamp has. ``scale`` counts as a constant.
    Raises UnknownFormat, TypeError for a ``x`` that is not floating point, ValueError for another variant.
    """
    if straight_through not in STRAIGHT_THROUGH:
        raise ValueError(f"straight_through is one of {', '.join(STRAIGHT_THROUGH)}, not {straight_through!r}")
    clipped = straight_through == "clipped"
    result: Tensor = _ForwardCast.apply(  # type: ignore[no-untyped-call]
        x, format_of(fmt), saturate, scale, counts, clipped
    )
    return result


class _GradCast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, fmt: Fp8Format, saturate: bool, counts: CastCount | None, scaling: TensorScale | None
    ) -> Tensor:
        ctx.fmt, ctx.saturate, ctx.counts, ctx.scaling = fmt, saturate, counts, scaling
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale = None if ctx.scaling is None else ctx.scaling.scale_of(grads[0])
        # A function of its own, so that a gradient penalty can differentiate a gradient that was cast.
        cast = _ForwardCast.apply(grads[0], ctx.fmt, ctx.saturate, scale, ctx.counts, False)  # type: ignore[no-untyped-call]
        return cast, None, None, None, None


def fp8_grad_cast(
    x: Tensor,
    fmt: Fp8Format | str | torch.dtype,
    saturate: bool = False,
    counts: CastCount | None = None,
    scaling: TensorScale | None = None,
) -> Tensor:
    """``x`` unchanged; its gradient passes through ``fmt`` on the way back, as in ``cast_through``.

    Put behind a layer, it rounds what the layer's backward receives. Without ``scaling`` the gradient is cast as it
    comes, so a loss scale acts as it would on FP8 hardware. ``counts`` gets each gradient as it enters the cast. Of
    second derivatives the cast is straight through. The result is a view of ``x``: don't change it in place. Raises
    UnknownFormat.
    """
    result: Tensor = _GradCast.apply(x, format_of(fmt), saturate, counts, scaling)  # type: ignore[no-untyped-call]
    return result
