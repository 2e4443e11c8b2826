"""A small GPT that learns to write Python, byte by byte, from the standard library's own sources.

Every machine that has Python has the text. 0.4 million parameters; a loss of 5.5 (256 equally likely bytes) falls to
about 2 within a minute or two on two CPU cores.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import recipe
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

CONTEXT = 64  # bytes that the model sees at once
WIDTH = 96
HEADS = 4
LAYERS = 3
TEXT_BYTES = 1 << 19


def standard_library_text() -> bytes:
    """The first half MiB of the standard library's top-level modules, in the order of their names."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= TEXT_BYTES:
            return bytes(text[:TEXT_BYTES])
    if len(text) < 100 * CONTEXT:
        sys.exit("char_gpt.py: this Python's standard library has no sources to read; use one with .py files")
    return bytes(text)


class Windows(Dataset[tuple[Tensor, ...]]):
    """Windows of CONTEXT bytes that do not overlap, each with the same window one byte on as its target."""

    def __init__(self, text: bytes) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * CONTEXT
        window = self.text[start : start + CONTEXT + 1].long()
        return window[:-1], window[1:]


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each behind its normalization."""

    def __init__(self, cast: recipe.GradientCast | None) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = recipe.Linear(WIDTH, 3 * WIDTH, cast)
        self.project = recipe.Linear(WIDTH, WIDTH, cast)
        self.feed_norm = nn.LayerNorm(WIDTH)
        self.expand = recipe.Linear(WIDTH, 4 * WIDTH, cast)
        self.contract = recipe.Linear(4 * WIDTH, WIDTH, cast)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        change: Tensor = self.contract(nn.functional.gelu(self.expand(self.feed_norm(x))))
        return x + change


class CharGPT(nn.Module):
    """Bytes, (batch, length) of int64, to logits over the next byte, (batch, length, 256)."""

    def __init__(self, cast: recipe.GradientCast | None) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.positions = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.blocks = nn.Sequential(*(Block(cast) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = recipe.Linear(WIDTH, 256, cast)
        nn.init.normal_(self.bytes.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.02)
        for block in self.blocks:
            assert isinstance(block, Block)
            # Each block adds twice to the residual stream: keep its variance from growing with the depth.
            for layer in (block.project, block.contract):
                nn.init.normal_(layer.weight, std=0.02 / (2 * LAYERS) ** 0.5)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.positions[: text.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def main() -> None:
    """Train as the command line says."""
    options = recipe.parse_options(__doc__.splitlines()[0], steps=1500, batch_size=16, lr=3e-3)
    torch.manual_seed(options.seed)
    model = CharGPT(recipe.gradient_cast(options.precision)).to(options.device)
    loader = recipe.shuffled(Windows(standard_library_text()), options)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"char_gpt: {size:,} parameters, {options.precision}, scaler {options.scaler}, {options.device.type}, "
        f"{len(loader)} batches an epoch",
        flush=True,
    )

    recipe.train(model, loader, options)
    recipe.save_parameters(model, options.save)


if __name__ == "__main__":
    main()
