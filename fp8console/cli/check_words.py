"""The words of ``fp8console check``, parsed and checked; a training's own words begin at the script."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fp8console.cli.arguments import Parser, UsageError, seconds, whole
from fp8console.protocol.settings import FP8_FORMATS

REFERENCES = ("as-is", "fp32")

_EPILOG = """\
Without a training: the device's FP8 casts and scaled products against a float64 reference.
With one: two runs of it, unedited, with the same seeds: a reference as it is, and a candidate whose Linear and
convolution layers work on FP8 values; or the same script twice with --reference-args and --candidate-args. Options
stand before the training; what follows it is the training's.

exit status: 0 within the limits, 1 not, 2 for words that make no sense, 130 after Ctrl-C
"""


@dataclass(frozen=True)
class CheckWords:
    """What was asked for; ``training`` and ``kind`` as in LaunchOptions, [] for a check of the device."""

    training: list[str]
    kind: str
    python: str | None
    device: str | None
    formats: list[str]
    junit: Path | None
    json: bool
    timeout: float
    steps: int
    tolerance: float
    worst_tolerance: float
    layer_tolerance: float
    seed: int
    reference: str
    reference_args: list[str]
    candidate_args: list[str] | None
    scaling: str
    keep: list[str]
    settings: list[str] = field(default_factory=list)


def parser() -> Parser:
    """The parser of everything that stands before a training."""
    made = Parser("check", "Check FP8: the device's math, or a training in FP8 against itself without.", _EPILOG)
    made.usage = "fp8console check [OPTIONS] [train.py ARGS | -m MODULE ARGS | -- COMMAND]"
    made.add_argument("--python", metavar="PATH", help="interpreter that has torch (default: this one)")
    made.add_argument("--junit", metavar="FILE", type=Path, help="write a JUnit file")
    made.add_argument("--json", action="store_true", help="print one object instead of a table")
    made.add_argument(
        "--format", action="append", metavar="F", dest="formats", help=f"FP8 format: {', '.join(FP8_FORMATS)}"
    )
    device = made.add_argument_group("the device")
    device.add_argument("--device", help="cpu, cuda or cuda:N (default: the GPU where torch sees one)")
    device.add_argument("--timeout", type=seconds, metavar="S", help="longest time for one check (default 300)")
    training = made.add_argument_group("a training")
    training.add_argument("--steps", type=_steps, metavar="N", help="steps of each run (default 100)")
    training.add_argument(
        "--tolerance",
        type=_share,
        metavar="T",
        help="largest gap between the losses at the end, relative (default 0.01)",
    )
    training.add_argument(
        "--worst-tolerance", type=_share, metavar="T", help="largest gap anywhere on the way (default: ten times that)"
    )
    training.add_argument(
        "--layer-tolerance", type=_share, metavar="T", help="relative error from which a layer drifts (default 0.1)"
    )
    training.add_argument("--seed", type=whole, metavar="S", help="random seeds set in both runs (default 0)")
    training.add_argument(
        "--reference", choices=REFERENCES, help="the script as it is (default), or without autocast and TF32"
    )
    training.add_argument("--reference-args", metavar="WORDS", help="more words for the script in the reference")
    training.add_argument(
        "--candidate-args", metavar="WORDS", help="more words for the script in the candidate, in place of emulation"
    )
    training.add_argument(
        "--scaling", choices=("dynamic", "none"), help="of the emulated casts: by each tensor's amax (default), or none"
    )
    training.add_argument(
        "--keep", action="append", metavar="PATTERN", help="leave layers of such names out of the emulation; may repeat"
    )
    training.add_argument("--set", action="append", metavar="KEY=VALUE", dest="settings", help="a setting of both runs")
    return made


def parse(words: Sequence[str]) -> CheckWords:
    """The words as CheckWords. Raises UsageError; exits 0 after ``--help``."""
    made = parser()
    own, rest = _split(words, made)
    given = made.parse_args(own)
    kind = "script"
    training: list[str] = []
    if rest:
        from fp8console.cli.launch_words import take_training

        kind, training = take_training(rest)
    _fitting(given, bool(training))
    formats = [_format(name) for name in given.formats or []]
    if training and len(formats) > 1:
        raise UsageError("fp8console check: a training is checked in one --format at a time")
    tolerance = 0.01 if given.tolerance is None else given.tolerance
    return CheckWords(
        training=training,
        kind=kind,
        python=given.python,
        device=given.device,
        formats=formats,
        junit=given.junit,
        json=given.json,
        timeout=given.timeout or 300.0,
        steps=given.steps or 100,
        tolerance=tolerance,
        worst_tolerance=10 * tolerance if given.worst_tolerance is None else given.worst_tolerance,
        layer_tolerance=0.1 if given.layer_tolerance is None else given.layer_tolerance,
        seed=given.seed or 0,
        reference=given.reference or "as-is",
        reference_args=_words("--reference-args", given.reference_args) or [],
        candidate_args=_words("--candidate-args", given.candidate_args),
        scaling=given.scaling or "dynamic",
        keep=given.keep or [],
        settings=given.settings or [],
    )


def _split(words: Sequence[str], made: Parser) -> tuple[list[str], list[str]]:
    """``words`` cut where the training begins: at the first that is neither an option nor an option's value."""
    takes_value = {
        flag: action.nargs != 0 for action in made._actions for flag in action.option_strings if action.nargs != 0
    }
    known = {flag for action in made._actions for flag in action.option_strings}
    index, own = 0, []
    while index < len(words):
        flag, sign, _ = words[index].partition("=")
        if words[index] in ("--", "-m") or flag not in known:
            break
        if flag in takes_value and not sign:
            if index + 1 == len(words):
                raise UsageError(f"fp8console check: {flag} needs a value")
            # Joined: argparse would take a value that begins with a dash for an option.
            own.append(f"{flag}={words[index + 1]}")
            index += 2
        else:
            own.append(words[index])
            index += 1
    return own, list(words[index:])


#: Options that only one of the two kinds of check has.
_OF_DEVICE = ("device", "timeout")
_OF_TRAINING = (
    *(
        "steps",
        "tolerance",
        "worst_tolerance",
        "layer_tolerance",
        "seed",
        "reference",
        "reference_args",
        "candidate_args",
    ),
    *("scaling", "keep", "settings"),
)


def _fitting(given: argparse.Namespace, training: bool) -> None:
    for name in _OF_DEVICE if training else _OF_TRAINING:
        if getattr(given, name) not in (None, False):
            flag = "--" + ("set" if name == "settings" else name.replace("_", "-"))
            what = "checks the device: leave the training out" if training else "needs a training: name a script"
            raise UsageError(f"fp8console check: {flag} {what}; see: fp8console check --help")
    if given.candidate_args is not None:
        for name in ("formats", "scaling", "keep"):
            if getattr(given, name) not in (None, False, []):
                flag = {"formats": "--format"}.get(name, "--" + name.replace("_", "-"))
                raise UsageError(f"fp8console check: {flag} is of the emulation, which --candidate-args replaces")


def _format(name: str) -> str:
    """A format by its full or short name."""
    plain = name.lower().removeprefix("torch.").removeprefix("float8_")
    plain = {"e4m3": "e4m3fn", "e5m2fn": "e5m2"}.get(plain, plain)
    if plain not in FP8_FORMATS:
        raise UsageError(f"fp8console check: --format must be one of {', '.join(FP8_FORMATS)}, not {name!r}")
    return plain


def _words(flag: str, text: str | None) -> list[str] | None:
    try:
        return None if text is None else shlex.split(text)
    except ValueError as error:
        raise UsageError(f"fp8console check: {flag}: {error}") from None


def _steps(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 up, not {text!r}")
    return value


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"must be a number from 0 up, not {text!r}")
    return value
