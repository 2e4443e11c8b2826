"""The checks of a device's FP8 pass on the CPU, and fail for every way of being wrong that is put in."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from test_formats import decode as decode_by_hand

from fp8console.numerics import cast_checks, consistency, product_checks, reference
from fp8console.numerics.cast_checks import Casts, torch_casts
from fp8console.numerics.devices import hardware_formats, partner
from fp8console.numerics.formats import E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, FORMATS, Fp8Format
from fp8console.numerics.product_checks import Operand, Products

CPU = torch.device("cpu")
EVERY = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
#: fp8 casts of the machine that runs the tests.
HERE = torch_casts(CPU)


def products(multiply: Callable[[Operand, Operand, torch.dtype], torch.Tensor]) -> Products:
    return Products(multiply, "a test's", 2.0**-24, CPU, product_checks.TINY[:1])


def exact(a: Operand, b: Operand, dtype: torch.dtype) -> torch.Tensor:
    """A product that errs by its output's rounding alone."""
    return (a.scale * b.scale * (a.decoded() @ b.decoded().t())).to(dtype)


# -- the reference ----------------------------------------------------------------------------------------------------
@EVERY
def test_reference_decoding_agrees_with_the_tables_of_the_formats(fmt: Fp8Format) -> None:
    for code in range(256):
        found, wanted = reference.decode(code, fmt), decode_by_hand(fmt.name, code)
        assert found == wanted or (math.isnan(found) and math.isnan(wanted))
        if found == 0:
            assert math.copysign(1, found) == math.copysign(1, wanted)


def test_known_codes() -> None:
    # OCP: sign, four exponent bits with bias 7, three mantissa bits.
    assert reference.decode(0b0_1111_110, E4M3FN) == 448 and math.isnan(reference.decode(0b1_1111_111, E4M3FN))
    assert reference.decode(0b0_0000_001, E4M3FN) == 2.0**-9 and reference.decode(0b1_0111_000, E4M3FN) == -1
    assert reference.decode(0b1_11111_00, E5M2) == -math.inf and reference.decode(0b0_11110_11, E5M2) == 57344
    assert math.isnan(reference.decode(0x80, E4M3FNUZ)) and reference.decode(0b0_1000_000, E4M3FNUZ) == 1
    assert reference.nan_codes(E5M2FNUZ) == [0x80] and reference.inf_codes(E5M2) == [0x7C, 0xFC]


def test_ladder_takes_ties_to_even_and_finds_what_lies_beyond() -> None:
    ladder = reference.Ladder(E4M3FN)
    x = torch.tensor([1.0625, 1.1875, 464.0, 464.0001, -1000.0, math.inf, 0.0, -0.0, 2.0**-10, 1.5 * 2.0**-9])
    codes, beyond = ladder.codes(x.double())
    # 1.0625 lies between 1 (even) and 1.125; 1.1875 between 1.125 and 1.25 (even).
    values = [reference.decode(code, E4M3FN) for code in codes.tolist()]
    assert values == [1.0, 1.25, 448, 448, -448, 448, 0, 0, 0, 2.0**-8]
    assert beyond.tolist() == [False, False, False, True, True, True, False, False, False, False]
    assert codes.tolist()[7] == 0x80
    assert reference.Ladder(E4M3FNUZ).codes(torch.tensor([-0.0, -1e-9]).double())[0].tolist() == [0, 0]
    assert reference.Ladder(E5M2).codes(torch.tensor([61440.0, 61439.0]).double())[1].tolist() == [True, False]


# -- casts ------------------------------------------------------------------------------------------------------------
@EVERY
def test_casts_of_this_cpu_pass(fmt: Fp8Format) -> None:
    checks = [check() for _, check in cast_checks.check_casts(HERE, fmt)]
    assert [check.verdict for check in checks] == ["passed"] * 3, checks
    assert checks[0].count == 3 * 256 and checks[1].count > 2 * 50_000


def truncating(x: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    codes, _ = reference.Ladder(fmt).codes(x.double().nan_to_num(0.0, 0.0, 0.0))
    larger = reference.decoded(fmt)[codes.long()].abs() > x.double().abs()
    codes = codes - larger.to(torch.uint8)
    if not fmt.has_negative_zero:
        codes = torch.where(codes == 0x80, 0, codes)
    return torch.where(x.isnan(), reference.nan_codes(fmt)[0], codes).to(torch.uint8)


def away_from_even(x: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """Ties away from zero: nudged outwards by less than any other value needs."""
    nudged = x.double() * (1 + 2.0**-40)
    codes, _ = reference.Ladder(fmt).codes(nudged.nan_to_num(0.0))
    return torch.where(x.isnan(), reference.nan_codes(fmt)[0], codes).to(torch.uint8)


def flushing(x: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    return HERE.encode(torch.where(x.abs() < fmt.min_normal, x * 0, x), fmt)


def one_nan(x: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    codes = HERE.encode(x, fmt)
    codes[int((x.double() - 1.0).abs().nan_to_num(9e9).argmin())] = reference.nan_codes(fmt)[0]
    return codes


def nan_made_a_number(x: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    return HERE.encode(x.nan_to_num(0.0), fmt)


@EVERY
@pytest.mark.parametrize("encode", [truncating, away_from_even, flushing, one_nan, nan_made_a_number])
def test_a_wrong_cast_fails(fmt: Fp8Format, encode: Callable[[torch.Tensor, Fp8Format], torch.Tensor]) -> None:
    check = cast_checks.check_encode(Casts(encode, HERE.decode), fmt)
    assert check.verdict == ("nonfinite" if encode is one_nan else "failed")
    assert "gives" in check.detail


@pytest.mark.parametrize("fmt, read_as", [(E4M3FN, E4M3FNUZ), (E4M3FNUZ, E4M3FN), (E5M2, E5M2FNUZ)])
def test_codes_read_in_the_other_family_fail(fmt: Fp8Format, read_as: Fp8Format) -> None:
    wrong = Casts(HERE.encode, lambda codes, _, dtype: HERE.decode(codes, read_as, dtype))
    assert cast_checks.check_decode(wrong, fmt).verdict == "failed"


def test_a_single_wrong_code_fails() -> None:
    def decode(codes: torch.Tensor, fmt: Fp8Format, dtype: torch.dtype) -> torch.Tensor:
        return torch.where(codes == 0x42, HERE.decode(codes, fmt, dtype) * 2, HERE.decode(codes, fmt, dtype))

    check = cast_checks.check_decode(Casts(HERE.encode, decode), E4M3FN)
    assert check.verdict == "failed" and "0x42" in check.detail


@pytest.mark.parametrize(
    "fmt, becomes, allowed",
    [
        (E4M3FN, "max", True),
        (E4M3FN, "nan", True),
        (E5M2, "inf", True),
        (E5M2, "max", True),
        (E5M2, "nan", False),
        (E4M3FNUZ, "nan", True),
        (E4M3FNUZ, "max", True),
        (E4M3FNUZ, "zero", False),
        (E4M3FN, "wrong sign", False),
    ],
)
def test_what_may_become_of_numbers_beyond_the_maximum(fmt: Fp8Format, becomes: str, allowed: bool) -> None:
    top = len(reference.Ladder(fmt).values) - 1
    nan = reference.nan_codes(fmt)[0]

    def encode(x: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
        sign = torch.where(x.signbit(), 128, 0)
        made = {"max": top + sign, "nan": torch.full_like(sign, nan), "inf": 0x7C + sign, "zero": sign * 0}
        made["wrong sign"] = top + 128 - sign
        return made[becomes].to(torch.uint8)

    check = cast_checks.check_beyond(Casts(encode, HERE.decode), fmt)
    assert (check.verdict == "passed") is allowed
    said = {"max": f"{fmt.max:g}", "nan": "NaN", "inf": "inf"}.get(becomes)
    assert not allowed or check.findings == [f"beyond the maximum becomes {said}", f"inf becomes {said}"]


# -- products ---------------------------------------------------------------------------------------------------------
@EVERY
def test_products_of_this_cpu_pass(fmt: Fp8Format) -> None:
    made, _ = consistency.choose_products(CPU, "cpu", fmt)
    checks = [check() for _, check in product_checks.check_products(made, fmt)]
    assert [check.verdict for check in checks] == ["passed"] * 5, checks
    assert all(check.worst is None or 0 < check.worst <= 1 for check in checks)


@EVERY
def test_emulated_and_exact_products_pass(fmt: Fp8Format) -> None:
    for made in (product_checks.emulated(CPU), products(exact)):
        assert {check().verdict for _, check in product_checks.check_products(made, fmt)} == {"passed"}


def spoilt(spoil: Callable[[torch.Tensor, Operand, Operand, torch.dtype], torch.Tensor]) -> Products:
    return products(lambda a, b, dtype: spoil(exact(a, b, dtype), a, b, dtype))


def one_element_too_large(y: torch.Tensor, a: Operand, b: Operand, dtype: torch.dtype) -> torch.Tensor:
    y[1, 2] += 0.05 * y.abs().max()
    return y


def truncated_output(y: torch.Tensor, a: Operand, b: Operand, dtype: torch.dtype) -> torch.Tensor:
    full = exact(a, b, torch.float64)
    return torch.where(y.double().abs() > full.abs(), torch.nextafter(y, y * 0), y)


def a_scale_forgotten(y: torch.Tensor, a: Operand, b: Operand, dtype: torch.dtype) -> torch.Tensor:
    return exact(a, replace(b, scale=1.0), dtype)


def last_term_lost(y: torch.Tensor, a: Operand, b: Operand, dtype: torch.dtype) -> torch.Tensor:
    codes = a.codes.clone()
    codes[:, -1] = 0
    return exact(replace(a, codes=codes), b, dtype)


def subnormals_flushed(y: torch.Tensor, a: Operand, b: Operand, dtype: torch.dtype) -> torch.Tensor:
    small = (a.codes & 0x7F) < (1 << a.fmt.mantissa_bits)
    return exact(replace(a, codes=torch.where(small, 0, a.codes)), b, dtype)


def other_family(y: torch.Tensor, a: Operand, b: Operand, dtype: torch.dtype) -> torch.Tensor:
    twin = {E4M3FN: E4M3FNUZ, E4M3FNUZ: E4M3FN, E5M2: E5M2FNUZ, E5M2FNUZ: E5M2}
    return exact(replace(a, fmt=twin[a.fmt]), b, dtype)


PLACES = [(E4M3FN, name) for name in product_checks.PASSES] + [(fmt, "weight update") for fmt in FORMATS[1:]]


@pytest.mark.parametrize("fmt, name", PLACES)
@pytest.mark.parametrize(
    "spoil",
    [one_element_too_large, a_scale_forgotten, last_term_lost, subnormals_flushed, other_family],
)
def test_a_wrong_product_fails(fmt: Fp8Format, name: str, spoil: Callable[..., torch.Tensor]) -> None:
    check = product_checks.check_pass(spoilt(spoil), fmt, name)
    # In the other family some of the codes are NaN.
    assert check.verdict == "failed" or (spoil is other_family and check.verdict == "nonfinite")


def test_truncation_in_place_of_rounding_fails() -> None:
    assert product_checks.check_pass(spoilt(truncated_output), E4M3FN, "forward").verdict == "failed"


@pytest.mark.parametrize("name", product_checks.PASSES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_out_of_finite_has_a_verdict_of_its_own(name: str, value: float) -> None:
    def spoil(y: torch.Tensor, a: Operand, b: Operand, dtype: torch.dtype) -> torch.Tensor:
        y[3, 4] = value
        return y

    check = product_checks.check_pass(spoilt(spoil), E5M2, name)
    assert check.verdict == "nonfinite"
    assert check.detail.startswith("the library returned non-finite for finite inputs")
    assert "[3, 4]" in check.detail


def test_a_nan_that_spreads_or_is_lost_fails() -> None:
    assert product_checks.check_nan(products(exact), E4M3FN).verdict == "passed"
    lost = product_checks.check_nan(products(lambda a, b, dtype: exact(a, b, dtype).nan_to_num(0.0)), E4M3FN)
    assert lost.verdict == "failed" and "32 results of that row are not NaN" in lost.detail
    spread = product_checks.check_nan(products(lambda a, b, dtype: exact(a, b, dtype) * math.nan), E4M3FN)
    assert spread.verdict == "failed"


def test_a_library_that_refuses_everything_has_failed() -> None:
    def refuse(a: Operand, b: Operand, dtype: torch.dtype) -> torch.Tensor:
        raise RuntimeError("no such kernel\nand more lines")

    assert product_checks.refusal(products(refuse), E4M3FN) == "no such kernel"
    check = product_checks.check_pass(products(refuse), E4M3FN, "forward")
    assert check.verdict == "failed" and "no such kernel" in check.detail


# -- devices and the entry --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "arch, names",
    [
        ("gfx90a", []),
        ("gfx940", ["e4m3fnuz", "e5m2fnuz"]),
        ("gfx942", ["e4m3fnuz", "e5m2fnuz"]),
        ("gfx950", ["e4m3fn", "e5m2"]),
        ("gfx1201", ["e4m3fn", "e5m2"]),
        ("gfx1100", []),
        ("sm_80", []),
        ("sm_89", ["e4m3fn", "e5m2"]),
        ("sm_90", ["e4m3fn", "e5m2"]),
        ("sm_100", ["e4m3fn", "e5m2"]),
        ("cpu", []),
        ("gfx9999", []),
    ],
)
def test_formats_by_architecture(arch: str, names: list[str]) -> None:
    assert [fmt.name for fmt in hardware_formats(arch)] == names


def test_partners_stay_in_the_family() -> None:
    assert [partner(fmt) for fmt in FORMATS] == [E4M3FN, E4M3FN, E4M3FNUZ, E4M3FNUZ]


def test_a_device_without_hardware_is_emulated_and_one_with_it_is_not() -> None:
    _, reason = consistency.choose_products(torch.device("meta"), "gfx90a", E4M3FN)
    assert reason is not None
    made, reason = consistency.choose_products(CPU, "gfx942", E4M3FNUZ)
    assert reason is None and made.how == "torch._scaled_mm"


def test_run_tells_of_each_check_before_and_after_it() -> None:
    said: list[dict[str, object]] = []
    assert consistency.run(CPU, [E5M2], said.append)
    assert list(said[0]) == ["machine"]
    kinds = [next(iter(line)) for line in said[1:]]
    assert kinds == ["begin", "check"] * 3 + ["begin"] + ["begin", "check"] * 5  # one when the products begin
    json.dumps(said, allow_nan=False)


def test_a_check_that_raises_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(device: torch.device) -> Casts:
        def encode(x: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
            raise RuntimeError("HIP error: invalid device function\nmore")

        return Casts(encode, HERE.decode)

    monkeypatch.setattr(consistency, "torch_casts", explode)
    said: list[dict[str, dict[str, object]]] = []
    assert not consistency.run(CPU, [E4M3FN], said.append)
    failed = [line["check"] for line in said if "check" in line and line["check"]["verdict"] == "failed"]
    assert [check["name"] for check in failed] == ["encode", "beyond"]
    assert failed[0]["detail"] == "RuntimeError: HIP error: invalid device function"


@pytest.mark.parametrize("words, says", [(["--device", "abacus"], "abacus"), (["--format", "e3m4"], "no FP8 format")])
def test_the_entry_refuses_what_there_is_not(words: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(consistency, "_own_stdout", lambda: out)
    assert consistency.main(words) == 2
    (line,) = out.getvalue().splitlines()
    assert says in json.loads(line)["error"]
