"""What FP8 must give, worked out without any FP8 cast: decoding in whole numbers, encoding by comparison in float64."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

import torch
from torch import Tensor

from fp8console.numerics.formats import Fp8Format


def decode(code: int, fmt: Fp8Format) -> float:
    """The value of one code, from its bit fields (sign, exponent, mantissa) in exact arithmetic."""
    sign = -1 if code & 0x80 else 1
    exponent = (code >> fmt.mantissa_bits) & ((1 << fmt.exponent_bits) - 1)
    mantissa = code & ((1 << fmt.mantissa_bits) - 1)
    if fmt.has_negative_zero:
        if exponent == (1 << fmt.exponent_bits) - 1:
            full = (1 << fmt.mantissa_bits) - 1
            if fmt.has_inf:  # the top exponent holds no numbers
                return sign * math.inf if mantissa == 0 else math.nan
            if mantissa == full:  # the top code alone is no number
                return math.nan
    elif code == 0x80:
        return math.nan
    fraction = mantissa if exponent == 0 else (1 << fmt.mantissa_bits) + mantissa
    power = max(exponent, 1) - fmt.bias - fmt.mantissa_bits
    value = Fraction(fraction) * Fraction(2) ** power
    return math.copysign(float(value), sign)


def decoded(fmt: Fp8Format) -> Tensor:
    """All 256 values by code: (256,) of float64."""
    return torch.tensor(_values(fmt), dtype=torch.float64)


@lru_cache
def _values(fmt: Fp8Format) -> tuple[float, ...]:
    return tuple(decode(code, fmt) for code in range(256))


class Ladder:
    """A format's magnitudes in order, and the points half-way between them, all exact in float64."""

    def __init__(self, fmt: Fp8Format) -> None:
        self.fmt = fmt
        finite = [value for value in _values(fmt)[:128] if math.isfinite(value)]
        self.values = torch.tensor(finite, dtype=torch.float64)
        # One more than the format has: where rounding with an unbounded exponent would leave its range.
        following = torch.tensor([2 * finite[-1] - finite[-2]], dtype=torch.float64)
        steps = torch.cat((self.values, following))
        self.halfway = (steps[1:] + steps[:-1]) / 2

    def codes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The codes of float64 ``x``, to nearest, ties to the even code; and where ``x`` rounds beyond the maximum.

        (n,) of uint8 and (n,) of bool. A value beyond it has the maximum's code, with its sign; NaN is left to the
        caller (its code is arbitrary here).
        """
        magnitude = x.abs()
        low = torch.searchsorted(self.halfway, magnitude, right=False)
        high = torch.searchsorted(self.halfway, magnitude, right=True)
        index = torch.where(low % 2 == 0, low, high)
        top = len(self.values) - 1
        beyond = (index > top) & ~x.isnan()
        index = index.clamp(max=top)
        sign = torch.where(x.signbit(), 128, 0)
        if not self.fmt.has_negative_zero:
            sign = torch.where(index == 0, 0, sign)
        return (index + sign).to(torch.uint8), beyond


def nan_codes(fmt: Fp8Format) -> list[int]:
    """The codes that are NaN."""
    return [code for code in range(256) if math.isnan(decode(code, fmt))]


def inf_codes(fmt: Fp8Format) -> list[int]:
    """The codes that are infinite."""
    return [code for code in range(256) if math.isinf(decode(code, fmt))]
