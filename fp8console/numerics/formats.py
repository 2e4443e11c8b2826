"""The four FP8 formats that PyTorch has, with the limits that their 256 codes really have.

Sources: the OCP 8-bit Floating Point Specification (E4M3, E5M2) and the float8 types "FN", "UZ" as LLVM's APFloat
defines them (FNUZ). ``torch.finfo`` is not used: its ``eps`` for float8_e5m2fnuz is half of what the codes say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch


class UnknownFormat(ValueError):
    """A name or dtype that is no FP8 format; its text is one line that lists the known ones."""


@dataclass(frozen=True)
class Fp8Format:
    """An 8-bit floating-point format: one sign bit, ``exponent_bits``, ``mantissa_bits``, exponent ``bias``.

    ``max``, ``min_normal`` and ``min_subnormal`` are its largest finite, smallest normal and smallest positive value.
    ``cast_of_too_large`` is what a value beyond ``max`` becomes when it is converted without saturation, as the
    format is defined: inf where the format has one, else NaN. ``torch_cast_of_too_large`` is what ``Tensor.to`` made
    of it on a CPU in torch 2.13 ('inf', 'nan' or 'max'); other versions and devices differ.
    """

    name: str
    dtype: torch.dtype
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    min_normal: float
    min_subnormal: float
    has_inf: bool
    has_negative_zero: bool
    cast_of_too_large: float
    torch_cast_of_too_large: str

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy would be unequal to the original: one of the fields may be NaN.
        return format_of, (self.name,)

    @property
    def eps(self) -> float:
        """Distance from 1 to the next larger value."""
        return 2.0**-self.mantissa_bits

    @property
    def spacing_at_max(self) -> float:
        """Distance between neighbours in the binade of ``max``."""
        return 2.0 ** (math.floor(math.log2(self.max)) - self.mantissa_bits)

    @property
    def overflow_edge(self) -> float:
        """Half-way between ``max`` and the value that would follow it: what is larger in magnitude overflows."""
        return self.max + self.spacing_at_max / 2

    @property
    def edge_overflows(self) -> bool:
        """Whether ``overflow_edge`` itself overflows: ties go to the even neighbour, which may be ``max``."""
        return (self.max / self.spacing_at_max) % 2 == 1


E4M3FN = Fp8Format(
    name="e4m3fn",
    dtype=torch.float8_e4m3fn,
    exponent_bits=4,
    mantissa_bits=3,
    bias=7,
    max=448.0,
    min_normal=2.0**-6,
    min_subnormal=2.0**-9,
    has_inf=False,
    has_negative_zero=True,
    cast_of_too_large=math.nan,
    torch_cast_of_too_large="max",
)
E5M2 = Fp8Format(
    name="e5m2",
    dtype=torch.float8_e5m2,
    exponent_bits=5,
    mantissa_bits=2,
    bias=15,
    max=57344.0,
    min_normal=2.0**-14,
    min_subnormal=2.0**-16,
    has_inf=True,
    has_negative_zero=True,
    cast_of_too_large=math.inf,
    torch_cast_of_too_large="inf",
)
E4M3FNUZ = Fp8Format(
    name="e4m3fnuz",
    dtype=torch.float8_e4m3fnuz,
    exponent_bits=4,
    mantissa_bits=3,
    bias=8,
    max=240.0,
    min_normal=2.0**-7,
    min_subnormal=2.0**-10,
    has_inf=False,
    has_negative_zero=False,
    cast_of_too_large=math.nan,
    torch_cast_of_too_large="nan",
)
E5M2FNUZ = Fp8Format(
    name="e5m2fnuz",
    dtype=torch.float8_e5m2fnuz,
    exponent_bits=5,
    mantissa_bits=2,
    bias=16,
    max=57344.0,
    min_normal=2.0**-15,
    min_subnormal=2.0**-17,
    has_inf=False,
    has_negative_zero=False,
    cast_of_too_large=math.nan,
    torch_cast_of_too_large="nan",
)

FORMATS: tuple[Fp8Format, ...] = (E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ)

#: Short names that papers and libraries use for the OCP formats.
_ALIASES = {"e4m3": "e4m3fn", "e5m2fn": "e5m2"}


def format_of(which: Fp8Format | str | torch.dtype) -> Fp8Format:
    """The format of a name ("e4m3", "float8_e4m3fn", ...), of a dtype, or the given one. Raises UnknownFormat."""
    if isinstance(which, Fp8Format):
        return which
    if isinstance(which, torch.dtype):
        for fmt in FORMATS:
            if fmt.dtype == which:
                return fmt
    elif isinstance(which, str):
        name = which.lower().removeprefix("torch.").removeprefix("float8_").removeprefix("fp8-")
        name = _ALIASES.get(name, name)
        for fmt in FORMATS:
            if fmt.name == name:
                return fmt
    raise UnknownFormat(f"{which!r} is no FP8 format; known: {', '.join(fmt.name for fmt in FORMATS)}")


def headroom_bits(fmt: Fp8Format | str | torch.dtype, amax: float | None, scale: float | None = 1.0) -> float | None:
    """Factors of two between the largest magnitude of a tensor, once scaled, and the format's maximum.

    ``log2(max / (amax * scale))``, from before the cast; negative when values are beyond the format, under 1 when
    they are close to it. An ``amax`` of 0 has inf bits, an infinite one -inf. None when it can't be known: an amax or
    scale that is None or NaN, or a product of 0 and inf. Raises ValueError for a negative amax or scale.
    """
    limit = format_of(fmt).max
    if amax is None or scale is None or math.isnan(amax) or math.isnan(scale):
        return None
    if amax < 0 or scale < 0:
        raise ValueError(f"amax and scale must be 0 or more, not {amax:g} and {scale:g}")
    if (amax == 0 and math.isinf(scale)) or (math.isinf(amax) and scale == 0):
        return None
    if amax == 0 or scale == 0:
        return math.inf
    # Logarithms apart: the product of two representable numbers may over- or underflow.
    return math.log2(limit) - math.log2(amax) - math.log2(scale)
