"""A small convolutional network that learns scikit-learn's handwritten digits.

1,797 real images of 8 by 8 pixels; the last 297 are kept for the test. 96% of those are right after half a minute.
"""

from __future__ import annotations

import sys

import recipe
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

TRAINING_IMAGES = 1500


def digits() -> tuple[Tensor, Tensor]:
    """Images, (1797, 1, 8, 8) of float32 in [0, 1], and their digits, (1797,) of int64."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("digits_cnn.py needs scikit-learn for its images: pip install scikit-learn")
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels, dtype=torch.int64)


class DigitsCNN(nn.Module):
    """Images, (batch, 1, 8, 8), to logits over the ten digits, (batch, 10)."""

    def __init__(self, cast: recipe.GradientCast | None) -> None:
        super().__init__()
        self.features = nn.Sequential(
            recipe.Conv2d(1, 32, cast),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            recipe.Conv2d(32, 64, cast),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
            recipe.Conv2d(64, 64, cast),
            nn.BatchNorm2d(64),
            nn.ReLU(),
        )
        self.classify = recipe.Linear(64 * 4 * 4, 10, cast)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classify(self.features(images).flatten(1))
        return logits


def main() -> None:
    """Train as the command line says, then print the share of the test images that are right."""
    options = recipe.parse_options(__doc__.splitlines()[0], steps=1000, batch_size=64, lr=2e-3)
    images, labels = digits()
    torch.manual_seed(options.seed)
    model = DigitsCNN(recipe.gradient_cast(options.precision)).to(options.device)
    loader = recipe.shuffled(TensorDataset(images[:TRAINING_IMAGES], labels[:TRAINING_IMAGES]), options)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"digits_cnn: {size:,} parameters, {options.precision}, scaler {options.scaler}, {options.device.type}, "
        f"{len(loader)} batches an epoch",
        flush=True,
    )
    recipe.train(model, loader, options)

    model.eval()
    with torch.no_grad():
        guesses = model(images[TRAINING_IMAGES:].to(options.device)).argmax(1).cpu()
    right = (guesses == labels[TRAINING_IMAGES:]).float().mean().item()
    print(f"test: {right:.1%} of {len(guesses)} images right", flush=True)
    recipe.save_parameters(model, options.save)


if __name__ == "__main__":
    main()
