"""The limits of the FP8 formats, against all 256 codes of each, decoded here from the formats' definitions."""

from __future__ import annotations

import math

import pytest
import torch

from fp8console.numerics.formats import FORMATS, Fp8Format, UnknownFormat, format_of, headroom_bits

# Written from the definitions, not from the code under test: exponent bits, mantissa bits, bias.
DEFINED = {"e4m3fn": (4, 3, 7), "e5m2": (5, 2, 15), "e4m3fnuz": (4, 3, 8), "e5m2fnuz": (5, 2, 16)}


def decode(name: str, code: int) -> float:
    """The value of one 8-bit code."""
    exponent_bits, mantissa_bits, bias = DEFINED[name]
    negative = bool(code & 0x80)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    if name.endswith("fnuz"):
        # Finite, no infinity, no negative zero: that code alone is NaN.
        if code == 0x80:
            return math.nan
    elif name == "e4m3fn":
        if code & 0x7F == 0x7F:
            return math.nan
    elif exponent == 0x1F:
        if mantissa:
            return math.nan
        return -math.inf if negative else math.inf
    if exponent == 0:
        magnitude = math.ldexp(mantissa, 1 - bias - mantissa_bits)
    else:
        magnitude = math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)
    return -magnitude if negative else magnitude


def values(name: str) -> list[float]:
    return [decode(name, code) for code in range(256)]


def every_format() -> list[object]:
    return [pytest.param(fmt, id=fmt.name) for fmt in FORMATS]


@pytest.mark.parametrize("fmt", every_format())
def test_torch_reads_each_code_as_the_definition_does(fmt: Fp8Format) -> None:
    read = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).double().tolist()
    for code, (got, want) in enumerate(zip(read, values(fmt.name))):
        assert got == want or (math.isnan(got) and math.isnan(want)), f"code {code:#04x}"
        assert math.isnan(want) or math.copysign(1, got) == math.copysign(1, want), f"code {code:#04x}"


@pytest.mark.parametrize("fmt", every_format())
def test_limits_are_those_of_the_codes(fmt: Fp8Format) -> None:
    codes = values(fmt.name)
    finite = [value for value in codes if math.isfinite(value)]
    assert fmt.max == max(finite) == -min(finite)
    assert fmt.min_subnormal == min(value for value in finite if value > 0)
    mantissas = 1 << fmt.mantissa_bits
    # Positive codes rise with their number, and the first normal one follows the subnormals.
    assert fmt.min_normal == codes[mantissas]
    assert fmt.has_inf == any(math.isinf(value) for value in codes)
    assert fmt.has_negative_zero == any(value == 0 and math.copysign(1, value) < 0 for value in codes)
    assert (fmt.exponent_bits, fmt.mantissa_bits, fmt.bias) == DEFINED[fmt.name]
    assert fmt.eps == min(value for value in finite if value > 1) - 1
    assert fmt.spacing_at_max == fmt.max - sorted(finite)[-2]
    assert fmt.torch_cast_of_too_large in ("inf", "nan", "max")


@pytest.mark.parametrize("fmt", every_format())
def test_too_large_becomes_inf_only_where_the_format_has_one(fmt: Fp8Format) -> None:
    if fmt.has_inf:
        assert fmt.cast_of_too_large == math.inf
    else:
        assert math.isnan(fmt.cast_of_too_large)


def test_an_ocp_code_read_as_fnuz_is_half_the_value() -> None:
    for ocp, fnuz in (("e4m3fn", "e4m3fnuz"), ("e5m2", "e5m2fnuz")):
        for code in range(256):
            value, other = decode(ocp, code), decode(fnuz, code)
            if math.isfinite(value) and code != 0x80:
                assert other == value / 2


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the table is of torch 2.13")
@pytest.mark.parametrize("fmt", every_format())
def test_torch_cast_of_too_large_is_as_noted(fmt: Fp8Format) -> None:
    for value in (fmt.max * 4, math.inf):
        cast = torch.tensor(value).to(fmt.dtype).float().item()
        said = {"inf": math.inf, "nan": math.nan, "max": fmt.max}[fmt.torch_cast_of_too_large]
        assert cast == said or (math.isnan(cast) and math.isnan(said))


@pytest.mark.parametrize(
    ("which", "name"),
    [
        ("e5m2", "e5m2"),
        ("E4M3", "e4m3fn"),
        ("float8_e4m3fnuz", "e4m3fnuz"),
        ("torch.float8_e5m2", "e5m2"),
        ("fp8-e4m3", "e4m3fn"),
        (torch.float8_e5m2fnuz, "e5m2fnuz"),
        (FORMATS[0], "e4m3fn"),
    ],
)
def test_formats_are_found_by_name_and_dtype(which: object, name: str) -> None:
    assert format_of(which).name == name  # type: ignore[arg-type]


@pytest.mark.parametrize("which", ["", "e3m4", "e8m0fnu", torch.float16, None, 8])
def test_an_unknown_format_is_named_with_the_known_ones(which: object) -> None:
    with pytest.raises(UnknownFormat, match=r"no FP8 format; known: e4m3fn, e5m2, e4m3fnuz, e5m2fnuz$"):
        format_of(which)  # type: ignore[arg-type]


def test_headroom_counts_factors_of_two_to_the_maximum() -> None:
    assert headroom_bits("e4m3fn", 448.0) == 0
    assert headroom_bits("e4m3fn", 7.0) == 6
    assert headroom_bits("e5m2", 57344.0, 2.0) == -1
    assert headroom_bits("e5m2", 1.75, 2.0**10) == 5


def test_headroom_of_what_is_not_a_plain_number() -> None:
    assert headroom_bits("e5m2", None) is None
    assert headroom_bits("e5m2", math.nan) is None
    assert headroom_bits("e5m2", 1.0, None) is None
    assert headroom_bits("e5m2", 1.0, math.nan) is None
    assert headroom_bits("e5m2", 0.0, math.inf) is None
    assert headroom_bits("e5m2", math.inf, 0.0) is None
    assert headroom_bits("e5m2", math.inf) == -math.inf
    assert headroom_bits("e5m2", 1.0, math.inf) == -math.inf
    assert headroom_bits("e5m2", 0.0) == math.inf
    assert headroom_bits("e5m2", 1.0, 0.0) == math.inf
    with pytest.raises(ValueError, match="0 or more"):
        headroom_bits("e5m2", -1.0)


def test_headroom_survives_a_product_beyond_float64() -> None:
    assert headroom_bits("e5m2", 1e300, 1e300) == pytest.approx(math.log2(57344) - 2 * math.log2(1e300))
    assert headroom_bits("e5m2", 5e-324, 1e-300) == pytest.approx(math.log2(57344) + 1074 - math.log2(1e-300))
