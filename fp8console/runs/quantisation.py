"""What rounding to a small format costs a tensor, worked out from its size alone: no tensor, no torch.

The model: the values are normally distributed around 0 with a known root mean square. Rounding to nearest moves a value
by an error that is even over one step of the format, so its mean square is step**2 / 12; the step is
2**(exponent - mantissa bits) for normal values and the smallest subnormal below them. Half of that and less becomes 0,
and what lies beyond the maximum is taken for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Format:
    """A format's limits. ``saturates``: torch's own cast makes too large values the maximum, so no inf is ever seen."""

    name: str
    max: float
    min_normal: float
    min_subnormal: float
    saturates: bool = False

    @property
    def mantissa_bits(self) -> int:
        """The smallest normal value is 2**mantissa_bits subnormal steps."""
        return round(math.log2(self.min_normal / self.min_subnormal))

    @property
    def range_bits(self) -> float:
        """From the smallest normal value to the maximum."""
        return math.log2(self.max / self.min_normal)


#: By name; a test compares them with all codes of torch's dtypes. float16 is for scripts that train in it.
FORMATS: dict[str, Format] = {
    "e4m3fn": Format("e4m3fn", 448.0, 2.0**-6, 2.0**-9, saturates=True),
    "e5m2": Format("e5m2", 57344.0, 2.0**-14, 2.0**-16),
    "e4m3fnuz": Format("e4m3fnuz", 240.0, 2.0**-7, 2.0**-10),
    "e5m2fnuz": Format("e5m2fnuz", 57344.0, 2.0**-15, 2.0**-17),
    "float16": Format("float16", 65504.0, 2.0**-14, 2.0**-24),
}


def format_from(about: dict[str, Any] | None, default: str) -> Format:
    """The format that a layer description names; ``default`` where it names none that is known."""
    return FORMATS.get(str((about or {}).get("name")), FORMATS[default])


def fitting_exponent(amax: float, largest: float) -> int:
    """``floor(log2(largest / amax))``: the largest power of two by which ``amax`` may grow. Both finite and over 0.

    By mantissa and exponent: exact, where a rounded logarithm may miss a quotient that is a power of two.
    """
    (mantissa, exponent), (below, shift) = math.frexp(largest), math.frexp(amax)
    return exponent - shift - (mantissa < below)


#: Magnitudes, in units of the root mean square, at which the integrals below are taken; evenly apart in log2.
_Z = np.exp2(np.linspace(-30.0, 3.0, 3301))
_DENSITY = math.sqrt(2 / math.pi) * np.exp(-_Z * _Z / 2) * _Z * (math.log(2) * 33.0 / 3300)


def relative_error(rms: Values, fmt: Format, amax: float = math.inf) -> Values:
    """Expected error of a cast, root mean square, as a share of ``rms`` (any shape, loss scale included).

    ``amax``: no value is larger, which keeps the distribution's far end from being taken for saturated. 0 to 1, over 1
    never: a tensor that is all flushed to 0 has lost all of itself. NaN where ``rms`` is not a finite number over 0.
    """
    sizes = np.asarray(rms, np.float64)
    with np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore"):
        x = sizes[..., None] * _Z
        step = np.exp2(np.floor(np.log2(np.maximum(x, fmt.min_normal))) - fmt.mantissa_bits)
        error = np.where(x <= fmt.min_subnormal / 2, x * x, step * step / 12)
        if amax > fmt.max:
            error = np.where(x > fmt.max, np.square(np.minimum(x, amax) - fmt.max), error)
        share = np.sqrt(np.sum(error * _DENSITY, axis=-1)) / sizes
    return np.where(np.isfinite(sizes) & (sizes > 0), np.minimum(share, 1.0), np.nan)


def least_error(fmt: Format) -> float:
    """``relative_error`` of a tensor that fits the format well: what its mantissa alone costs."""
    return float(relative_error(np.array([math.sqrt(fmt.max * fmt.min_normal) / 8]), fmt)[0])


def flushed_share(rms: Values, fmt: Format) -> Values:
    """Expected share of values that a cast makes 0: those of at most half the smallest subnormal."""
    sizes = np.asarray(rms, np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        bound = fmt.min_subnormal / 2 / (sizes * math.sqrt(2))
    share = np.vectorize(math.erf, otypes=[np.float64])(np.where(np.isfinite(bound), bound, 0.0))
    return np.where(np.isfinite(sizes) & (sizes > 0), share, np.nan)


def rescaled_share(measured: Values, factor: Values, modelled: Values) -> Values:
    """The share flushed to 0 when a tensor is cast at ``factor`` times the scale at which ``measured`` was counted.

    Near 0 the density of a smooth distribution is level, so the share below a bound goes with the bound: measured /
    factor. Where nothing or everything was flushed that says little, and ``modelled`` is taken.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        scaled = np.minimum(measured / factor, 1.0)
        usable = (measured > 0) & (measured < 0.5) & np.isfinite(factor) & (factor > 0)
    return np.where(usable, scaled, modelled)
