"""Checks a device's FP8 casts: all 256 codes decoded, and everything that 16-bit floats can hold encoded.

What happens beyond a format's maximum differs between versions and devices and is reported as a finding; only a result
that no definition of the format allows is a failure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8console.numerics import reference
from fp8console.numerics.formats import Fp8Format

VERDICTS = ("passed", "failed", "nonfinite", "skipped")
#: float32 bit patterns tried beside the hard values, from a fixed seed.
RANDOM_FLOATS = 100_000


@dataclass(frozen=True)
class Check:
    """One checked property. ``verdict``: one of VERDICTS; "nonfinite": NaN or inf came out of finite inputs.

    ``worst`` is the largest error found as a share of what is allowed, None where that makes no sense; ``count`` the
    number of results compared; ``findings`` are worth knowing and no fault.
    """

    group: str  # "casts" | "products"
    format: str
    name: str
    verdict: str
    detail: str
    count: int = 0
    worst: float | None = None
    findings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return dict(self.__dict__)


@dataclass(frozen=True)
class Casts:
    """How a device casts. Codes are uint8 tensors; tests put broken ones here.

    ``encode(x, fmt)``: floating-point ``x`` to codes of the same shape; ``decode(codes, fmt, dtype)``: to numbers.
    Both take tensors of any device and give CPU tensors.
    """

    encode: Callable[[Tensor, Fp8Format], Tensor]
    decode: Callable[[Tensor, Fp8Format, torch.dtype], Tensor]


def torch_casts(device: torch.device) -> Casts:
    """``Tensor.to`` as it works on ``device``."""

    def encode(x: Tensor, fmt: Fp8Format) -> Tensor:
        return x.to(device).to(fmt.dtype).view(torch.uint8).cpu()

    def decode(codes: Tensor, fmt: Fp8Format, dtype: torch.dtype) -> Tensor:
        return codes.to(device).view(fmt.dtype).to(dtype).cpu()

    return Casts(encode, decode)


def check_casts(casts: Casts, fmt: Fp8Format) -> Iterator[tuple[str, Callable[[], Check]]]:
    """The checks of one format: (name, what to call)."""
    for name, check in (("decode", check_decode), ("encode", check_encode), ("beyond", check_beyond)):
        yield name, partial(check, casts, fmt)


def check_decode(casts: Casts, fmt: Fp8Format) -> Check:
    """Every code against its bit fields, to float32, bfloat16 and float16: all three hold each value exactly."""
    codes = torch.arange(256, dtype=torch.uint8)
    want = reference.decoded(fmt)
    wrong = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        got = casts.decode(codes, fmt, dtype).double()
        for code in _different(got, want).nonzero().flatten().tolist():
            wrong.append(f"code 0x{code:02x} to {_name(dtype)} gives {got[code]:g}, its bits say {want[code]:g}")
    return _result(fmt, "decode", wrong, 3 * 256, "all 256 codes, to float32, bfloat16 and float16")


def check_encode(casts: Casts, fmt: Fp8Format) -> Check:
    """Numbers to codes: nearest, ties to even, signs of zeros, NaN; what rounds beyond the maximum is left out here.

    Every bfloat16 and every float16 there is; of float32 each value, each tie, their neighbours, and random bits.
    """
    ladder = reference.Ladder(fmt)
    wrong: list[str] = []
    count = 0
    nonfinite = False
    for dtype, x in _inputs(ladder):
        want, beyond = ladder.codes(x.double())
        got = casts.encode(x, fmt)
        is_nan = x.isnan()
        got_nan = torch.isin(got, torch.tensor(reference.nan_codes(fmt), dtype=torch.uint8))
        bad = torch.where(is_nan, ~got_nan, (got != want) & ~beyond)
        count += int((~beyond).sum())
        values = reference.decoded(fmt)
        nonfinite |= bool((bad & x.isfinite() & ~values[got.long()].isfinite()).any())
        for index in bad.nonzero().flatten()[:3].tolist():
            right = "NaN" if is_nan[index] else f"{values[int(want[index])]:g} (0x{int(want[index]):02x})"
            given = int(got[index])
            wrong.append(f"{_name(dtype)} {x[index]:.9g} gives {values[given]:g} (0x{given:02x}), right is {right}")
        if bad.any():
            wrong.append(f"{int(bad.sum())} of {len(x)} {_name(dtype)} values in all")
    right = "every bfloat16 and float16 value, float32's ties and random ones"
    return _result(fmt, "encode", wrong, count, right, nonfinite=nonfinite)


def check_beyond(casts: Casts, fmt: Fp8Format) -> Check:
    """What magnitudes that round beyond the maximum become: the maximum, or inf where the format has one, else NaN."""
    ladder = reference.Ladder(fmt)
    values = reference.decoded(fmt)
    wrong: list[str] = []
    said: dict[str, set[str]] = {}
    count = 0
    for dtype, x in _inputs(ladder):
        wide = x.double()
        _, beyond = ladder.codes(wide)
        x, wide = x[beyond], wide[beyond]
        got = values[casts.encode(x, fmt).long()]
        sign = torch.where(wide < 0, -1.0, 1.0)
        allowed = {
            f"{fmt.max:g}": got == sign * fmt.max,
            "inf": got == sign * math.inf,
            "NaN": got.isnan() & (not fmt.has_inf),
        }
        count += len(x)
        for kind, which in (("beyond the maximum", ~wide.isinf()), ("inf", wide.isinf())):
            said.setdefault(kind, set()).update(name for name, hit in allowed.items() if bool((hit & which).any()))
        bad = ~(allowed["inf"] | allowed["NaN"] | allowed[f"{fmt.max:g}"])
        for index in bad.nonzero().flatten()[:3].tolist():
            wrong.append(f"{_name(dtype)} {x[index]:g} gives {got[index]:g}, which no definition of {fmt.name} allows")
    findings = [f"{kind} becomes {' or '.join(sorted(kinds))}" for kind, kinds in said.items()]
    return _result(fmt, "beyond", wrong, count, "; ".join(findings), findings)


def _inputs(ladder: reference.Ladder) -> Iterator[tuple[torch.dtype, Tensor]]:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    yield torch.bfloat16, every.view(torch.bfloat16)
    yield torch.float16, every.view(torch.float16)
    hard = torch.cat((ladder.values, ladder.halfway)).float()
    tiny = torch.tensor([0.0, 1e-45, 1e-40, float(ladder.values[1]) / 2, math.nan])
    up, down = torch.tensor(math.inf), torch.tensor(-math.inf)
    hard = torch.cat((hard, torch.nextafter(hard, up), torch.nextafter(hard, down), tiny))
    generator = torch.Generator().manual_seed(20)
    bits = torch.randint(-(2**31), 2**31, (RANDOM_FLOATS,), generator=generator, dtype=torch.int64).to(torch.int32)
    # Most random bits lie far outside an 8-bit format: as many again within its exponents.
    near = torch.exp2(torch.rand(RANDOM_FLOATS, generator=generator, dtype=torch.float64) * 36 - 19).float()
    near = near * (torch.randint(0, 2, near.shape, generator=generator) * 2 - 1)
    yield torch.float32, torch.cat((hard, -hard, bits.view(torch.float32), near))


def _different(got: Tensor, want: Tensor) -> Tensor:
    same = (got == want) & (got.signbit() == want.signbit()) | (got.isnan() & want.isnan())
    return ~same


def _result(
    fmt: Fp8Format,
    name: str,
    wrong: list[str],
    count: int,
    right: str,
    findings: list[str] | None = None,
    nonfinite: bool = False,
) -> Check:
    detail = right if not wrong else "; ".join(wrong[:4]) + (f"; and {len(wrong) - 4} more" if len(wrong) > 4 else "")
    verdict = "passed" if not wrong else "nonfinite" if nonfinite else "failed"
    return Check("casts", fmt.name, name, verdict, detail, count, None, findings or [])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
