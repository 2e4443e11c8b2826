"""Checks a device's scaled FP8 products against float64: forward, both backward products, and the weight update.

y = s_a s_b (A B^T). What may differ, from first principles: a product of two FP8 numbers has at most 8 significant
bits and is exact; adding k of them in some order errs by at most gamma_k = k u / (1 - k u) of the sum of their
magnitudes (u: the unit roundoff of one addition, devices.accumulation_roundoff); multiplying by the scales rounds three
times in float32; the output rounds once more, by 2^-24 (float32) or 2^-8 (bfloat16) of the result. Source of gamma_k:
Higham, Accuracy and Stability of Numerical Algorithms, section 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from fp8console.numerics import reference
from fp8console.numerics.cast_checks import Check
from fp8console.numerics.devices import partner
from fp8console.numerics.formats import Fp8Format

PASSES = ("forward", "input gradient", "weight gradient", "weight update")
#: Roundings of a result in float32 between the sum and the output: s_a s_b, and the sum times that, or once by each.
SCALE_ROUNDINGS = 3
LEARNING_RATE = 0.125
_OUTPUT_ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
#: (tokens, outputs, inputs), all multiples of 16, which the libraries ask for.
TINY = ((16, 32, 16), (32, 16, 48))
SHAPES = (*TINY, (48, 112, 80), (256, 512, 384), (512, 1024, 2048))


@dataclass(frozen=True)
class Operand:
    """Codes, (rows, k) of uint8, their format, and the scale that takes them back: value = scale * decoded code."""

    codes: Tensor
    fmt: Fp8Format
    scale: float

    def transposed(self) -> Operand:
        return Operand(self.codes.t().contiguous(), self.fmt, self.scale)

    def decoded(self) -> Tensor:
        return reference.decoded(self.fmt)[self.codes.long()]


@dataclass(frozen=True)
class Products:
    """How a device multiplies; tests put broken ones here.

    ``multiply(a, b, dtype)``: s_a s_b (A B^T), (rows of a, rows of b), in that dtype, wherever it was computed. Raises
    RuntimeError or NotImplementedError where the library refuses. ``how`` says what does it; ``roundoff`` is the u of
    its additions; ``device`` is where the weight update runs.
    """

    multiply: Callable[[Operand, Operand, torch.dtype], Tensor]
    how: str
    roundoff: float
    device: torch.device
    shapes: tuple[tuple[int, int, int], ...] = SHAPES


def scaled_mm(device: torch.device, roundoff: float) -> Products:
    """``torch._scaled_mm`` on ``device``, one scale a tensor. On a CPU only tiny products: it is very slow there."""

    def multiply(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        left = a.codes.to(device).view(a.fmt.dtype)
        right = b.codes.to(device).view(b.fmt.dtype)
        scales = [torch.tensor(operand.scale, dtype=torch.float32, device=device) for operand in (a, b)]
        result = torch._scaled_mm(left, right.t(), scale_a=scales[0], scale_b=scales[1], out_dtype=dtype)
        # torch 2.4 gives the result's amax as well.
        product: Tensor = result[0] if isinstance(result, tuple) else result
        return product

    shapes = TINY if device.type == "cpu" else SHAPES
    return Products(multiply, "torch._scaled_mm", roundoff, device, shapes)


def emulated(device: torch.device) -> Products:
    """Decoded to float32 and multiplied there: what a training without FP8 hardware does."""

    def multiply(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        left = a.codes.to(device).view(a.fmt.dtype).float()
        right = b.codes.to(device).view(b.fmt.dtype).float()
        return ((left @ right.t()) * (a.scale * b.scale)).to(dtype)

    # float32 products of a GPU may run in TF32, which holds FP8 numbers exactly but adds like its tensor cores.
    roundoff = 2.0**-24 if device.type == "cpu" else 2.0**-13
    return Products(multiply, "emulated: decoded to float32 and multiplied there", roundoff, device, TINY)


def refusal(products: Products, fmt: Fp8Format) -> str | None:
    """Why the library won't multiply operands of this format at all, in any output dtype; None when it does."""
    one = Operand(torch.zeros(16, 16, dtype=torch.uint8), fmt, 1.0)
    other = Operand(one.codes, partner(fmt), 1.0)
    reason = None
    for dtype in _OUTPUT_ROUNDOFF:
        try:
            products.multiply(one, other, dtype)
            return None
        except (RuntimeError, NotImplementedError, TypeError, AttributeError) as error:
            reason = first_sentence(error)
    return reason


def first_sentence(error: BaseException, most: int = 120) -> str:
    """What an error says, without the pages that torch's dispatcher adds."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    text = text.split(". ")[0]
    return text if len(text) <= most else text[: most - 3] + "..."


def check_products(products: Products, fmt: Fp8Format) -> Iterator[tuple[str, Callable[[], Check]]]:
    """The checks of one format (of activations or gradients, the other operand in its family's E4M3)."""
    for name in PASSES:
        yield name, partial(check_pass, products, fmt, name)
    yield "NaN", partial(check_nan, products, fmt)


@dataclass
class _Tally:
    wrong: list[str] = field(default_factory=list)
    nonfinite: bool = False
    worst: float = 0.0
    worst_sum: float = 0.0  # error over the sum of magnitudes
    count: int = 0
    refused: set[str] = field(default_factory=set)


def check_pass(products: Products, fmt: Fp8Format, name: str) -> Check:
    """One kind of product over all shapes, inputs and output dtypes."""
    tally = _Tally()
    generator = torch.Generator().manual_seed(20)
    for shape in products.shapes:
        for case in CASES:
            x, weight = _operands(case, shape, fmt, name, generator)
            a, b = _pair(x, weight, name)
            dtypes = (torch.float32,) if name == "weight update" else tuple(_OUTPUT_ROUNDOFF)
            for dtype in dtypes:
                where = f"{case}, {tuple(a.codes.shape)} x {tuple(b.codes.shape)}^T, {str(dtype)[6:]}"
                try:
                    got = products.multiply(a, b, dtype)
                except (RuntimeError, NotImplementedError) as error:
                    tally.refused.add(f"{str(dtype)[6:]} refused: {first_sentence(error)}")
                    continue
                if name == "weight update":
                    _judge_update(products, a, b, got, where, tally, generator)
                else:
                    _judge(products, a, b, got, dtype, where, tally)
    return _verdict(products, fmt, name, tally)


def check_nan(products: Products, fmt: Fp8Format) -> Check:
    """A NaN in one row of an operand makes that row NaN, and no other."""
    generator = torch.Generator().manual_seed(21)
    (x, _), weight = _operands("normal", products.shapes[0], fmt, "forward", generator)
    codes = x.codes.clone()
    codes[3, 5] = reference.nan_codes(fmt)[0]
    try:
        got = products.multiply(Operand(codes, fmt, x.scale), weight, torch.bfloat16).detach().cpu()
    except (RuntimeError, NotImplementedError) as error:
        return Check("products", fmt.name, "NaN", "failed", f"{products.how}: {first_sentence(error)}")
    rows = torch.arange(len(codes)) == 3
    lost = int((~got[rows].isnan()).sum())
    spread = int((~got[~rows].isfinite()).sum())
    detail = products.how
    if lost or spread:
        detail = f"a NaN in row 3 of an operand: {lost} results of that row are not NaN, {spread} of others not finite"
    return Check("products", fmt.name, "NaN", "failed" if lost or spread else "passed", detail, got.numel())


def _verdict(products: Products, fmt: Fp8Format, name: str, tally: _Tally) -> Check:
    findings = sorted(tally.refused)
    if tally.worst_sum > 0:
        findings.append(f"float32 sums err by up to 2^{math.log2(tally.worst_sum):.1f} of their terms")
    verdict, detail = "passed", products.how
    if not tally.count:
        verdict, detail = "failed", f"{products.how}: {'; '.join(sorted(tally.refused)) or 'nothing was computed'}"
    if tally.wrong:
        verdict = "nonfinite" if tally.nonfinite else "failed"
        detail = tally.wrong[0] + (f"; and {len(tally.wrong) - 1} more products" if len(tally.wrong) > 1 else "")
    return Check("products", fmt.name, name, verdict, detail, tally.count, tally.worst, findings)


def _judge(
    products: Products, a: Operand, b: Operand, got: Tensor, dtype: torch.dtype, where: str, tally: _Tally
) -> None:
    want, magnitudes = _exact(a, b)
    k = a.codes.shape[1]
    allowed = _allowed(want, magnitudes, k, products.roundoff, _OUTPUT_ROUNDOFF[dtype])
    if where.startswith(EXACT):
        # Terms of -1, 0 and 1: every sum on the way is exact, and up to 256 bfloat16 holds it too.
        allowed = torch.where(want.abs() <= 256, 0.0, allowed)
    found = got.detach().cpu().double()
    _compare(found, want, allowed, where, tally)
    if dtype == torch.float32 and bool(found.isfinite().all()):
        share = ((found - want).abs() / magnitudes.clamp_min(1e-300)).max()
        tally.worst_sum = max(tally.worst_sum, float(share))


def _judge_update(
    products: Products, a: Operand, b: Operand, got: Tensor, where: str, tally: _Tally, generator: torch.Generator
) -> None:
    """w - lr * gradient by torch's SGD on the device, the gradient straight from the product."""
    want, magnitudes = _exact(a, b)
    k = a.codes.shape[1]
    # Weights of the gradient's own size: a wrong update can't hide behind a large weight.
    size = want.abs().mean().clamp_min(1e-30)
    weight = (torch.randn(want.shape, generator=generator, dtype=torch.float64) * size).float()
    parameter = torch.nn.Parameter(weight.to(products.device, copy=True))
    parameter.grad = got.to(products.device, torch.float32)
    torch.optim.SGD([parameter], lr=LEARNING_RATE).step()
    updated = weight.double() - LEARNING_RATE * want
    gradient_allowed = _allowed(want, magnitudes, k, products.roundoff, 2.0**-24)
    # The step itself: lr times gradient, then the difference, each rounded once.
    roundings = 2.0**-24 * (weight.double().abs() + 2 * LEARNING_RATE * (want.abs() + gradient_allowed))
    allowed = LEARNING_RATE * gradient_allowed + roundings + 2.0**-149
    _compare(parameter.detach().cpu().double(), updated, allowed, where, tally)


def _compare(found: Tensor, want: Tensor, allowed: Tensor, where: str, tally: _Tally) -> None:
    tally.count += found.numel()
    bad_number = ~found.isfinite()
    if bool(bad_number.any()):
        at = bad_number.nonzero()[0].tolist()
        text = f"{int(bad_number.sum())} of {found.numel()} results, first at {at}: {found[tuple(at)]:g}"
        tally.wrong.append(f"the library returned non-finite for finite inputs: {text} ({where})")
        tally.nonfinite = True
        return
    ratio = (found - want).abs() / allowed.clamp_min(1e-300)
    tally.worst = max(tally.worst, float(ratio.max()))
    if bool((ratio > 1).any()):
        at = (ratio == ratio.max()).nonzero()[0].tolist()
        value, right = found[tuple(at)], want[tuple(at)]
        text = f"at {at} {value:.9g}, right is {right:.9g} within {allowed[tuple(at)]:.2g}"
        tally.wrong.append(f"{int((ratio > 1).sum())} of {found.numel()} results are wrong, worst {text} ({where})")


def _exact(a: Operand, b: Operand) -> tuple[Tensor, Tensor]:
    """The product, and the sum of its terms' magnitudes, in float64 (its own error is 2^29 times smaller)."""
    left, right = a.decoded(), b.decoded()
    # The scales as the library gets them.
    scale = float(torch.tensor(a.scale)) * float(torch.tensor(b.scale))
    return scale * (left @ right.t()), scale * (left.abs() @ right.abs().t())


def _allowed(want: Tensor, magnitudes: Tensor, k: int, roundoff: float, output_roundoff: float) -> Tensor:
    gamma = k * roundoff / (1 - k * roundoff)
    summed = gamma * magnitudes
    rounded = ((1 + SCALE_ROUNDINGS * 2.0**-24) * (1 + output_roundoff) - 1) * (want.abs() + summed)
    return summed + 1.01 * rounded + 2.0**-133  # bfloat16's smallest number


# -- inputs -----------------------------------------------------------------------------------------------------------
EXACT = "ones"
CASES = ("normal", "every code", EXACT, "subnormals", "largest")


def _operands(
    case: str, shape: tuple[int, int, int], fmt: Fp8Format, name: str, generator: torch.Generator
) -> tuple[tuple[Operand, Operand], Operand]:
    """((activations or gradients in ``fmt``, the same in the partner's format), weights)."""
    tokens, outputs, inputs = shape
    other = partner(fmt)
    width = inputs if name == "forward" else outputs
    first = _codes(case, (tokens, width), fmt, generator)
    second = _codes(case, (tokens, inputs), other, generator)
    weight = _codes(case, (outputs, inputs), other, generator)
    return (first, second), weight


def _pair(x: tuple[Operand, Operand], weight: Operand, name: str) -> tuple[Operand, Operand]:
    """The operands as rows over what is summed: Y = X W^T, dX = G W, dW = G^T X."""
    first, second = x
    if name == "forward":
        return first, weight
    if name == "input gradient":
        return first, weight.transposed()
    return first.transposed(), second.transposed()


def _codes(case: str, shape: tuple[int, int], fmt: Fp8Format, generator: torch.Generator) -> Operand:
    ladder = reference.Ladder(fmt)
    signs = torch.randint(0, 2, shape, generator=generator) * 128

    def one_of(magnitudes: Tensor) -> Tensor:
        picked = magnitudes[torch.randint(0, len(magnitudes), shape, generator=generator)]
        # FNUZ has no -0: that code is its NaN.
        return torch.where(picked == 0, 0, picked + signs).to(torch.uint8)

    top = len(ladder.values) - 1
    if case == "normal":
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        scale = fmt.max / float(x.abs().max())
        return Operand(ladder.codes(x * scale)[0], fmt, float(torch.tensor(1 / scale)))
    if case == "every code":
        return Operand(one_of(torch.arange(top + 1)), fmt, 0.3)
    if case == EXACT:
        ones = int(ladder.codes(torch.tensor([1.0], dtype=torch.float64))[0])
        return Operand(one_of(torch.tensor([0, ones])), fmt, 1.0)
    if case == "subnormals":
        return Operand(one_of(torch.arange(1, 1 << fmt.mantissa_bits)), fmt, 1 / fmt.min_subnormal)
    return Operand(one_of(torch.tensor([top])), fmt, 1 / fmt.max)
