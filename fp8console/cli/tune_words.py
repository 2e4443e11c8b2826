"""The words of ``fp8console tune``: its own options, those of a launch, then the training's."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fp8console.cli.arguments import Parser, UsageError
from fp8console.cli.launch_words import SETTING_FLAGS, take_training
from fp8console.cli.options import LaunchOptions, parse_options
from fp8console.protocol.profile import FORMATS
from fp8console.protocol.settings import Settings

#: The first step is set up, and five more make a quantile (runs/tuning.py).
LEAST_STEPS = 6

_EPILOG = """\
Measures a baseline at a tiny learning rate, puts weights, optimizers and random state back, and works out: the initial
loss scale, growth policy and cap, clip thresholds, and which layers to keep in BF16. The script is not edited, its
output goes to the run's output.log. Options of a launch (--python, --name, --set, ...) may stand among these.

exit status: 0 with a profile written, 1 where the baseline is of no use, 2 for words that make no sense
"""
_LAUNCH_VALUES = ("--python", "--run-dir", "--name", "--profile", "--set", *SETTING_FLAGS)


@dataclass(frozen=True)
class TuneWords:
    """What was asked for; ``options`` has the baseline's settings in it."""

    training: list[str]
    options: LaunchOptions
    format: str | None
    margin: int | None
    clip_factor: float
    output: Path | None
    then_train: bool
    layers: int
    json: bool


def parser() -> Parser:
    """The parser of tune's own options."""
    made = Parser("tune", "Find the settings of a training in FP8, by a baseline of it.", _EPILOG)
    made.usage = "fp8console tune [OPTIONS] train.py [ARGS] | -m MODULE [ARGS] | -- torchrun ... train.py"
    made.add_argument("--steps", type=_steps, default=100, metavar="N", help="steps of the baseline (default 100)")
    made.add_argument("--lr", type=_over_zero, default=1e-6, metavar="X", help="its learning rate (default 1e-6)")
    made.add_argument("--format", metavar="F", help=f"of the gradients: {', '.join(FORMATS)} (default: the device's)")
    made.add_argument(
        "--margin", type=_margin, metavar="BITS", help="free above the largest gradient (default: 2 or 3)"
    )
    made.add_argument(
        "--clip-factor", type=_over_zero, default=1.5, metavar="X", help="threshold over the 95%% norm (default 1.5)"
    )
    made.add_argument("-o", "--output", type=Path, metavar="FILE", help="the profile (default: in the user's folder)")
    made.add_argument("--then-train", action="store_true", help="train on after the baseline, with what was found")
    made.add_argument(
        "--layers", type=_whole, default=30, metavar="N", help="rows of the table, 0 for all (default 30)"
    )
    made.add_argument("--json", action="store_true", help="print one object instead")
    return made


def parse(words: Sequence[str]) -> TuneWords:
    """The words as TuneWords. Raises UsageError; exits 0 after ``--help``."""
    made = parser()
    own, launch, rest = _split(words, made)
    given = made.parse_args(own)
    if not rest:
        raise UsageError("fp8console tune: no training given; see: fp8console tune --help")
    kind, training = take_training(rest)
    form = None if given.format is None else _format(given.format)
    if given.output is not None and not given.output.expanduser().parent.is_dir():
        raise UsageError(f"fp8console tune: -o {given.output}: no such folder: {given.output.parent}")
    options = parse_options(launch, kind)
    return TuneWords(
        training=training,
        options=replace(options, settings=_settings(options, given)),
        format=form,
        margin=given.margin,
        clip_factor=given.clip_factor,
        output=None if given.output is None else given.output.expanduser(),
        then_train=given.then_train,
        layers=given.layers,
        json=given.json,
    )


def _settings(options: LaunchOptions, given: argparse.Namespace) -> Settings:
    return replace(
        options.settings,
        tune_steps=given.steps,
        tune_lr=given.lr,
        tune_goes_on=given.then_train,
        # Every step counts, and nothing else is to take its time.
        layer_steps=1,
        layer_budget=1.0,
        snapshot_budget=options.settings.snapshot_budget if given.then_train else 0.0,
        checkpoint_minutes=options.settings.checkpoint_minutes if given.then_train else 0.0,
    )


def _split(words: Sequence[str], made: Parser) -> tuple[list[str], list[str], list[str]]:
    """(tune's own words, a launch's, the rest from the training on); values joined to their flags."""
    takes_value = {flag for action in made._actions for flag in action.option_strings if action.nargs != 0}
    known = {flag for action in made._actions for flag in action.option_strings}
    own: list[str] = []
    launch: list[str] = []
    index = 0
    while index < len(words):
        word = words[index]
        flag, sign, _ = word.partition("=")
        ours = flag in known
        if word in ("--", "-m") or not (ours or flag in _LAUNCH_VALUES):
            break
        into = own if ours else launch
        if (flag in takes_value if ours else True) and not sign:
            if index + 1 == len(words):
                raise UsageError(f"fp8console tune: {flag} needs a value")
            # Joined: argparse would take a value that begins with a dash for an option.
            into += [flag, words[index + 1]] if flag == "-o" else [f"{flag}={words[index + 1]}"]
            index += 2
        else:
            into.append(word)
            index += 1
    return own, launch, list(words[index:])


def _format(name: str) -> str:
    plain = name.lower().removeprefix("torch.").removeprefix("float8_")
    plain = {"e4m3": "e4m3fn", "e5m2fn": "e5m2", "fp16": "float16", "half": "float16"}.get(plain, plain)
    if plain not in FORMATS:
        raise UsageError(f"fp8console tune: --format must be one of {', '.join(FORMATS)}, not {name!r}")
    return plain


def _steps(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if not LEAST_STEPS <= value < 2**31:
        raise argparse.ArgumentTypeError(f"must be a whole number from {LEAST_STEPS} up, not {text!r}")
    return value


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 up, not {text!r}")
    return int(text)


def _margin(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else -1
    if not 0 <= value <= 16:
        raise argparse.ArgumentTypeError(f"must be a whole number of bits from 0 to 16, not {text!r}")
    return value


def _over_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"must be a finite number over 0, not {text!r}")
    return value
