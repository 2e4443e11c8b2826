"""Linear and convolution layers that compute as FP8 hardware would: on values that eight bits can hold.

Input, weight and the output's gradient are rounded to an FP8 format and kept in the dtype that they had, so a layer
runs on any device, at the cost of the rounding. Products accumulate in that dtype. For layers on real FP8 hardware
take torchao's (``convert(..., backend="torchao")``); these have what it doesn't: FNUZ, casts of the gradient alone,
delayed scaling, casts without any scale of their own, and counts of what was saturated and flushed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8console.numerics.casts import STRAIGHT_THROUGH, fp8_cast, fp8_grad_cast
from fp8console.numerics.counts import CastCount
from fp8console.numerics.formats import format_of
from fp8console.numerics.tensor_scales import SCALINGS, DelayedScale, DynamicScale, tensor_scale


@dataclass(frozen=True)
class Fp8Recipe:
    """Which tensors of a layer pass through which format, and how.

    ``forward_format`` is for input and weight, ``backward_format`` for the output's gradient; None leaves those as they
    are. Each ``*_scaling`` is None (cast as it comes: for gradients the loss scale then decides), "dynamic" or
    "delayed"; ``history``, ``margin`` in bits and ``power_of_two`` belong to it. ``backward_saturate`` None means: with
    delayed scaling only, since a loss scaler has to see what lies beyond the range. Raises UnknownFormat, ValueError.
    """

    forward_format: str | None = "e4m3fn"
    backward_format: str | None = "e5m2"
    forward_scaling: str | None = None
    backward_scaling: str | None = None
    forward_saturate: bool = True
    backward_saturate: bool | None = None
    straight_through: str = "identity"
    history: int = 1024
    margin: float = 0.0
    power_of_two: bool = False
    counts: bool = True

    def __post_init__(self) -> None:
        if self.forward_format is None and self.backward_format is None:
            raise ValueError("an Fp8Recipe needs a forward_format or a backward_format")
        for fmt in (self.forward_format, self.backward_format):
            if fmt is not None:
                format_of(fmt)
        for name in ("forward_scaling", "backward_scaling"):
            if getattr(self, name) not in SCALINGS:
                raise ValueError(f"{name} is one of {', '.join(map(str, SCALINGS))}, not {getattr(self, name)!r}")
        if self.straight_through not in STRAIGHT_THROUGH:
            raise ValueError(f"straight_through is one of {', '.join(STRAIGHT_THROUGH)}, not {self.straight_through!r}")
        if self.history < 1:
            raise ValueError(f"history must be 1 or more, not {self.history}")
        if not math.isfinite(self.margin):
            raise ValueError(f"margin is a finite number of bits, not {self.margin}")

    @property
    def saturates_gradients(self) -> bool:
        """Whether a gradient beyond the range becomes the maximum."""
        return self.backward_scaling == "delayed" if self.backward_saturate is None else self.backward_saturate


#: The formats of gfx95x, gfx12xx and NVIDIA's cards; those of gfx94x; and E5M2 gradients alone.
OCP = Fp8Recipe()
FNUZ = Fp8Recipe(forward_format="e4m3fnuz", backward_format="e5m2fnuz")
GRADIENT_ONLY = Fp8Recipe(forward_format=None)


class Fp8Layer(nn.Module):
    """What Fp8Linear and Fp8Conv2d share: the three casts, their scales and their counts.

    ``input_counts``, ``weight_counts`` and ``grad_counts`` are CastCounts or None. The state of delayed scaling lies
    in the buffers of ``input_scale``, ``weight_scale`` and ``grad_scale``, so it is part of the state dict.
    """

    recipe: Fp8Recipe
    input_counts: CastCount | None
    weight_counts: CastCount | None
    grad_counts: CastCount | None
    input_scale: DynamicScale | DelayedScale | None
    weight_scale: DynamicScale | DelayedScale | None
    grad_scale: DynamicScale | DelayedScale | None

    def use_recipe(self, recipe: Fp8Recipe, name: str = "") -> None:
        """Cast as ``recipe`` says from now on, counts and amax histories starting empty."""
        weight = self.weight
        assert isinstance(weight, Tensor)
        self.recipe = recipe
        for tensor, fmt, scaling in (
            ("input", recipe.forward_format, recipe.forward_scaling),
            ("weight", recipe.forward_format, recipe.forward_scaling),
            ("grad", recipe.backward_format, recipe.backward_scaling),
        ):
            scale, counts = None, None
            if fmt is not None:
                scale = tensor_scale(scaling, fmt, recipe.history, recipe.margin, recipe.power_of_two, weight.device)
                label = name if tensor == "grad" else f"{name}.{tensor}".lstrip(".")
                counts = CastCount(label, fmt, scaled=scale is not None) if recipe.counts else None
            if scale is not None:
                scale.train(self.training)
            setattr(self, f"{tensor}_scale", scale)
            setattr(self, f"{tensor}_counts", counts)

    def extra_repr(self) -> str:
        """The layer's own figures, then its formats and scalings, forward / backward."""
        recipe = self.recipe
        return (
            f"{super().extra_repr()}, {recipe.forward_format}/{recipe.backward_format}"
            f", scaling={recipe.forward_scaling}/{recipe.backward_scaling}"
        )

    def _cast(self, x: Tensor, scale: DynamicScale | DelayedScale | None, counts: CastCount | None) -> Tensor:
        recipe = self.recipe
        if recipe.forward_format is None:
            return x
        factor = None if scale is None else scale.scale_of(x)
        return fp8_cast(x, recipe.forward_format, recipe.forward_saturate, factor, counts, recipe.straight_through)

    def _operands(self, input: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return (
            self._cast(input, self.input_scale, self.input_counts),
            self._cast(weight, self.weight_scale, self.weight_counts),
        )

    def _result(self, product: Tensor, bias: Tensor | None) -> Tensor:
        """The product with its gradient cast, plus the bias, whose own gradient is a sum and stays as it is."""
        recipe = self.recipe
        if recipe.backward_format is not None and product.requires_grad:
            saturate = recipe.saturates_gradients
            product = fp8_grad_cast(product, recipe.backward_format, saturate, self.grad_counts, self.grad_scale)
            if bias is None:
                # The cast gives a view, which what comes next (an in-place ReLU) could not write to.
                return product.clone()
        return product if bias is None else product + bias.to(product.dtype)


class Fp8Linear(Fp8Layer, nn.Linear):
    """``nn.Linear``, (..., in_features) to (..., out_features), computed on FP8 values as ``recipe`` says."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        recipe: Fp8Recipe = OCP,
    ) -> None:
        nn.Linear.__init__(self, in_features, out_features, bias, device, dtype)
        self.use_recipe(recipe)

    @classmethod
    def from_linear(cls, linear: nn.Linear, recipe: Fp8Recipe = OCP) -> Fp8Linear:
        """A layer of its own with the same parameter objects and mode; hooks stay behind. ``convert`` keeps those."""
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, "meta", recipe=recipe)
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.train(linear.training)
        layer.use_recipe(recipe)
        return layer

    def forward(self, input: Tensor) -> Tensor:
        return self._result(nn.functional.linear(*self._operands(input, self.weight)), self.bias)


class Fp8Conv2d(Fp8Layer, nn.Conv2d):
    """``nn.Conv2d`` computed on FP8 values as ``recipe`` says; takes the arguments of nn.Conv2d."""

    def __init__(self, *args: Any, recipe: Fp8Recipe = OCP, **kwargs: Any) -> None:
        nn.Conv2d.__init__(self, *args, **kwargs)
        self.use_recipe(recipe)

    def forward(self, input: Tensor) -> Tensor:
        product = self._conv_forward(*self._operands(input, self.weight), None)
        return self._result(product, None if self.bias is None else self.bias.view(-1, 1, 1))
