"""Casts through FP8: the value that a tensor has after it was stored in eight bits, and back.

Rounding is to nearest, ties to even. What happens beyond the format's maximum is done here explicitly and is
the same for every torch version and device: ``Tensor.to`` itself saturates float8_e4m3fn in torch 2.13 and gives NaN
in older versions and in compiled code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8console.numerics.formats import Fp8Format, format_of


def cast_through(x: Tensor, fmt: Fp8Format | str | torch.dtype, saturate: bool = False) -> Tensor:
    """``x`` rounded to the values of ``fmt``; same shape and dtype as ``x``, detached from its graph.

    A magnitude that rounds beyond the format's maximum becomes what the format says (E5M2: inf of the same sign, the
    others: NaN), or with ``saturate`` the maximum, which also takes the place of an infinity. NaN stays NaN. Raises
    UnknownFormat, and TypeError for a ``x`` that is not floating point.
    """
    target = format_of(fmt)
    if not x.is_floating_point():
        raise TypeError(f"cast_through takes floating-point tensors, not {x.dtype}")
    with torch.no_grad():
        # float64 keeps its width, for .to(float8) goes through float32 and would round twice.
        wide = x.detach() if x.dtype == torch.float64 else x.detach().float()
        clamped = wide.clamp(-target.max, target.max)
        if wide.dtype == torch.float64:
            rounded = _round_to_grid(clamped, target)
        else:
            rounded = clamped.to(target.dtype).float()
        if not saturate:
            rounded = torch.where(_is_beyond(wide, target), _beyond(wide, target), rounded)
        return rounded.to(x.dtype)


def _is_beyond(x: Tensor, fmt: Fp8Format) -> Tensor:
    """Where ``x`` rounds to more than the maximum, were the exponent unbounded; False for NaN."""
    # round() takes ties to even, as the cast does, so the half-way point falls on the right side by itself.
    return (x.abs() / fmt.spacing_at_max).round() * fmt.spacing_at_max > fmt.max


def _beyond(x: Tensor, fmt: Fp8Format) -> Tensor:
    return torch.copysign(torch.full_like(x, fmt.cast_of_too_large), x)


def _round_to_grid(x: Tensor, fmt: Fp8Format) -> Tensor:
    """float64 to the nearest value of ``fmt`` by arithmetic; ``x`` within the format's range."""
    _, exponent = torch.frexp(x)
    lowest = 1 - fmt.bias
    # frexp's fraction lies in [0.5, 1): its exponent is one more than the binade's.
    spacing = torch.ldexp(torch.ones_like(x), (exponent - 1).clamp_min(lowest) - fmt.mantissa_bits)
    rounded = (x / spacing).round() * spacing
    rounded = torch.where(x.isnan(), x, rounded)
    return rounded if fmt.has_negative_zero else rounded + 0.0


class _Cast(torch.autograd.Function):
    """The cast itself, straight through, so that a gradient penalty can differentiate a gradient that was cast."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, fmt: Fp8Format, saturate: bool) -> Tensor:
        return cast_through(grad, fmt, saturate)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


class _GradCast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fmt: Fp8Format, saturate: bool) -> Tensor:
        ctx.fmt, ctx.saturate = fmt, saturate
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _Cast.apply(grads[0], ctx.fmt, ctx.saturate), None, None  # type: ignore[no-untyped-call]


def fp8_grad_cast(x: Tensor, fmt: Fp8Format | str | torch.dtype, saturate: bool = False) -> Tensor:
    """``x`` unchanged; its gradient passes through ``fmt`` on the way back, as in ``cast_through``.

    Put behind a layer, it rounds what the layer's backward receives. The gradient is cast as it comes, so a loss
    scale acts as it would on FP8 hardware. Of second derivatives the cast is straight through. The result is a view of
    ``x``: don't change it in place. Raises UnknownFormat.
    """
    result: Tensor = _GradCast.apply(x, format_of(fmt), saturate)  # type: ignore[no-untyped-call]
    return result
