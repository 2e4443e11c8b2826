"""A small MLP that guesses the next byte of Python source from the last eight, in torchao's FP8 layers.

Its hidden layers multiply in FP8 on a GPU that can (with bfloat16 around them); elsewhere torchao emulates that, and
the numbers are those of FP8 all the same. Each tensor has a scale of its own, so no loss scaler is needed.
"""

from __future__ import annotations

import sys

import recipe
import torch
from char_gpt import CONTEXT, Windows, standard_library_text
from torch import Tensor, nn

SEEN = 8  # bytes that each guess is made from
BYTE_WIDTH = 32
WIDTH = 256


class NextByteMLP(nn.Module):
    """Bytes, (batch, length) of int64, to logits over the next byte, (batch, length, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, BYTE_WIDTH)
        self.hidden = nn.Sequential(
            nn.Linear(SEEN * BYTE_WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
            nn.GELU(),
            nn.Linear(WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
            nn.GELU(),
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor) -> Tensor:
        # Each place's own byte and the seven before it; before the beginning lie zeros.
        seen = nn.functional.pad(text, (SEEN - 1, 0)).unfold(1, SEEN, 1)
        logits: Tensor = self.head(self.hidden(self.bytes(seen).flatten(2)))
        return logits


def use_float8(model: nn.Module) -> str:
    """Make torchao's FP8 layers of the hidden ones; says which, and whether the device multiplies in FP8."""
    try:
        from fp8console.numerics.convert import convert
        from fp8console.numerics.torchao_layers import NoTorchao
    except ImportError as error:
        sys.exit(f"--precision torchao needs fp8console.numerics ({error}): pip install fp8console")
    try:
        names = convert(model, include=["hidden.*"], backend="torchao")
    except NoTorchao as error:
        sys.exit(f"--precision torchao: {error}")
    layer = model.get_submodule(names[0])
    how = "emulated" if layer.config.emulate else "in hardware"  # type: ignore[union-attr]
    return f"torchao float8 {how} in {', '.join(names)}"


def main() -> None:
    """Train as the command line says."""
    options = recipe.parse_options(
        __doc__.splitlines()[0], steps=1500, batch_size=16, lr=3e-3, precisions=("torchao", "fp32", "bf16")
    )
    torch.manual_seed(options.seed)
    model = NextByteMLP().to(options.device)
    layers = use_float8(model) if options.precision == "torchao" else options.precision
    loader = recipe.shuffled(Windows(standard_library_text()), options)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"float8_mlp: {size:,} parameters, {layers}, scaler {options.scaler}, {options.device.type}, "
        f"{len(loader)} batches of {options.batch_size * CONTEXT} bytes an epoch",
        flush=True,
    )
    recipe.train(model, loader, options)
    recipe.save_parameters(model, options.save)


if __name__ == "__main__":
    main()
