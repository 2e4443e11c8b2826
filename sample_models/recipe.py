"""The training recipe that the samples share: options, precision, loss scaling, learning rate, injected faults.

FP8 here means what decides whether such a training works at all: every gradient that enters a layer's backward has
been rounded to eight bits and has lost what lies beyond the format's range. Everything else stays in float32, so a
difference from ``--precision fp32`` comes from that rounding alone. Try ``--precision fp8-e4m3 --scaler none``: the
gradients of char_gpt's mean loss lie below the format's smallest value, and nothing is learnt.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    from fp8console.numerics.counts import CastCount

PRECISIONS = ("fp32", "bf16", "fp8-e5m2", "fp8-e4m3", "fp8-e4m3-saturating", "fp8-e5m2fnuz", "fp8-e4m3fnuz")
SCALERS = ("default", "headroom", "article", "none")
SPIKE_LR_FACTOR = 30.0
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True)
class Options:
    """What the command line decides, the same for all samples."""

    precision: str
    scaler: str
    steps: int
    seed: int
    batch_size: int
    lr: float
    device: torch.device
    save: str | None
    loss: str = "mean"
    label_smoothing: float = 0.0
    nan_at: frozenset[int] = field(default_factory=frozenset)
    spike_at: frozenset[int] = field(default_factory=frozenset)


def parse_options(
    description: str, steps: int, batch_size: int, lr: float, precisions: tuple[str, ...] = PRECISIONS
) -> Options:
    """Options from ``sys.argv``; the arguments here are the sample's defaults, its first precision is one of them.

    Exits with one line on a bad option.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--precision", choices=precisions, default=precisions[0], help="of the gradients, for fp8-*")
    parser.add_argument(
        "--scaler",
        choices=SCALERS,
        help="torch.amp.GradScaler with its defaults, fp8console's with that preset, or none; "
        "fp8-* has 'default' unless given",
    )
    parser.add_argument("--loss", choices=("mean", "sum"), default="mean", help="over the targets of a batch")
    parser.add_argument("--label-smoothing", type=_share, default=0.0, metavar="SHARE", help="from 0 to below 1")
    parser.add_argument("--steps", type=_at_least_one, default=steps)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=_at_least_one, default=batch_size)
    parser.add_argument("--lr", type=_learning_rate, default=lr, help="at its highest, after the warm-up")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the GPU where torch sees one, unless given")
    parser.add_argument(
        "--inject",
        action="append",
        default=[],
        type=_injection,
        metavar="nan@STEP|spike@STEP",
        help="a bad batch (the loss is NaN) or a loss spike at that step; may be given again",
    )
    parser.add_argument("--save", metavar="PATH", help="write the final parameters there")
    args = parser.parse_args()
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this torch sees no GPU; leave the option out to train on the CPU")
    return Options(
        precision=args.precision,
        scaler=args.scaler or ("default" if args.precision.startswith("fp8") else "none"),
        steps=args.steps,
        seed=args.seed,
        batch_size=args.batch_size,
        lr=args.lr,
        device=device,
        save=args.save,
        loss=args.loss,
        label_smoothing=args.label_smoothing,
        nan_at=frozenset(step for kind, step in args.inject if kind == "nan"),
        spike_at=frozenset(step for kind, step in args.inject if kind == "spike"),
    )


@dataclass(frozen=True)
class GradientCast:
    """The FP8 format that gradients are rounded to on their way into a layer's backward."""

    format: str
    saturate: bool

    def counts(self) -> CastCount:
        """Figures of one layer's casts, which a loss scaler and the console read."""
        from fp8console.numerics.counts import CastCount

        return CastCount("", self.format)

    def __call__(self, output: Tensor, counts: CastCount | None) -> Tensor:
        """``output``, whose gradient will be rounded."""
        from fp8console.numerics.casts import fp8_grad_cast

        return fp8_grad_cast(output, self.format, self.saturate, counts)


def gradient_cast(precision: str) -> GradientCast | None:
    """What each layer does to its output so that the gradient coming back is in the precision's format."""
    if not precision.startswith("fp8"):
        return None
    try:
        import fp8console.numerics.casts  # noqa: F401
    except ImportError as error:
        sys.exit(f"--precision {precision} needs fp8console.numerics ({error}): pip install fp8console")
    return GradientCast(precision.split("-")[1], precision.endswith("-saturating"))


class Linear(nn.Linear):
    """A linear layer whose output's gradient may pass through FP8."""

    def __init__(self, inputs: int, outputs: int, cast: GradientCast | None) -> None:
        super().__init__(inputs, outputs)
        self.cast = cast
        self.grad_counts = None if cast is None else cast.counts()

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        return output if self.cast is None else self.cast(output, self.grad_counts)


class Conv2d(nn.Conv2d):
    """A 3x3 convolution that keeps the image's size and whose output's gradient may pass through FP8."""

    def __init__(self, inputs: int, outputs: int, cast: GradientCast | None) -> None:
        super().__init__(inputs, outputs, kernel_size=3, padding=1)
        self.cast = cast
        self.grad_counts = None if cast is None else cast.counts()

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        return output if self.cast is None else self.cast(output, self.grad_counts)


def gradient_scaler(options: Options, model: nn.Module) -> torch.amp.GradScaler | None:
    """The loss scaler of that name; fp8console's watches the casts of the model's layers."""
    if options.scaler == "none":
        return None
    if options.scaler == "default":
        return torch.amp.GradScaler(options.device.type)
    try:
        from fp8console.numerics.scaler import Fp8GradScaler
    except ImportError as error:
        sys.exit(f"--scaler {options.scaler} needs fp8console.numerics ({error}): pip install fp8console")
    fmt = options.precision.split("-")[1] if options.precision.startswith("fp8") else "e5m2"
    scaler = Fp8GradScaler(options.device.type, preset=options.scaler, fmt=fmt)
    scaler.watch(model)
    return scaler


def lr_factor(step: int, steps: int) -> float:
    """Linear warm-up over 5% of the steps (100 at most), then a cosine down to a tenth."""
    warmup = max(1, min(100, steps // 20))
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.55 + 0.45 * math.cos(math.pi * min(1.0, done))


def shuffled(examples: Dataset[tuple[Tensor, ...]], options: Options) -> DataLoader[tuple[Tensor, ...]]:
    """Full batches of the examples, in an order that the seed decides, a new one each epoch."""
    return DataLoader(
        examples,
        batch_size=min(options.batch_size, len(examples)),  # type: ignore[arg-type]
        shuffle=True,
        drop_last=True,
        generator=torch.Generator().manual_seed(options.seed),
    )


def train(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]], options: Options) -> None:
    """Train with AdamW on the cross-entropy of ``model(inputs)`` for ``options.steps`` steps.

    The loader's targets are class numbers, and the model's last dimension is the classes. Prints a line every ten
    steps, with the loss per target. A summed loss differs from a mean one in the size of its gradients alone: they are
    clipped at a norm that is as many times larger.
    """
    device = options.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, options.steps))
    scaler = gradient_scaler(options, model)
    in_bf16 = options.precision == "bf16" or (options.precision == "torchao" and device.type == "cuda")

    step = 0
    began = time.perf_counter()
    while step < options.steps:
        for inputs, targets in loader:
            step += 1
            inputs, targets = inputs.to(device), targets.to(device)
            spike = step in options.spike_at
            if spike:
                # Targets that belong to other inputs, learnt from at far too high a rate.
                targets = targets.roll(1, dims=0)
                for group in optimizer.param_groups:
                    group["lr"] *= SPIKE_LR_FACTOR

            with torch.autocast(device.type, torch.bfloat16, enabled=in_bf16):
                logits = model(inputs)
                loss = nn.functional.cross_entropy(
                    logits.flatten(0, -2).float(),
                    targets.flatten(),
                    reduction=options.loss,
                    label_smoothing=options.label_smoothing,
                )
            terms = targets.numel() if options.loss == "sum" else 1
            if step in options.nan_at:
                loss = loss * math.nan

            optimizer.zero_grad()
            if scaler is None:
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM * terms)
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM * terms)
                scaler.step(optimizer)
                scaler.update()
            schedule.step()

            if step % 10 == 0 or step == options.steps:
                now = time.perf_counter()
                scale = f"  scale {scaler.get_scale():g}" if scaler is not None else ""
                pace = (now - began) / (10 if step % 10 == 0 else step % 10) * 1000
                rate = optimizer.param_groups[0]["lr"]
                per_target = loss.item() / terms
                print(
                    f"step {step}/{options.steps}  loss {per_target:.4f}  lr {rate:.2e}{scale}  {pace:.0f} ms",
                    flush=True,
                )
                began = now
            if step == options.steps:
                break


def save_parameters(model: nn.Module, path: str | None) -> None:
    """Write the parameters and buffers with torch.save, when a path is given."""
    if path:
        torch.save({name: value.cpu() for name, value in model.state_dict().items()}, path)


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {value}")
    return value


def _learning_rate(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"must be a finite number over 0, not {text}")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to below 1, not {text}")
    return value


def _injection(text: str) -> tuple[str, int]:
    kind, _, step = text.partition("@")
    if kind not in ("nan", "spike") or not step.isdigit() or int(step) < 1:
        raise argparse.ArgumentTypeError(f"must be nan@STEP or spike@STEP with a step from 1 up, not {text!r}")
    return kind, int(step)
