"""The words before a training, told from the training's own. Light: ``fp8console --help`` imports this."""

from __future__ import annotations

import os
from collections.abc import Sequence

from fp8console.cli.arguments import Parser, UsageError

#: Flags that are settings under a name of their own.
SETTING_FLAGS = {
    "--total-steps": ("total_steps", "N", "steps the training will take, for the time left"),
    "--snapshot-budget": ("snapshot_budget", "SHARE", "share of step time that snapshots may cost (default 0.01)"),
    "--snapshot-memory": ("snapshot_memory_gib", "GIB", "host memory for snapshots, a rank"),
    "--checkpoint-minutes": ("checkpoint_minutes", "MIN", "between unasked checkpoints, 0 for none (default 10)"),
    "--gpu-source": ("gpu_source", "NAME", "GPU values from amdsmi, sysfs, amd-smi, rocm-smi or nvml alone"),
}
_WITH_VALUE = ("--python", "--run-dir", "--name", "--profile", "--set", *SETTING_FLAGS)
_WITHOUT_VALUE = ("--detach", "--headless")


def launch_parser() -> Parser:
    """The parser of the options that stand before a training."""
    parser = Parser("", "", add_help=False, usage="fp8console [OPTIONS] train.py [ARGS]")
    group = parser.add_argument_group("options of a launch (before the training; what follows it is the training's)")
    group.add_argument("--python", metavar="PATH", help="interpreter for the training (default: this one)")
    group.add_argument("--detach", action="store_true", help="launch without a console and print the run's id")
    group.add_argument("--headless", action="store_true", help="plain progress lines also on a terminal")
    group.add_argument("--run-dir", metavar="DIR", help="this run's directory, new or empty")
    group.add_argument("--name", help="name of the run (default: the script's)")
    group.add_argument("--profile", metavar="FILE", help="scaler and clip settings that tune has found (or a NAME)")
    for flag, (_, metavar, meaning) in SETTING_FLAGS.items():
        group.add_argument(flag, metavar=metavar, help=meaning)
    group.add_argument(
        "--set",
        action="append",
        metavar="KEY=VALUE",
        help="any setting (a wrong KEY lists them); also as FP8CONSOLE_<KEY>, in ./fp8console.toml or in the user's "
        "own fp8console/config.toml",
    )
    return parser


def split_options(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """``words`` cut behind the launch options at their beginning. Raises UsageError for one without its value."""
    index = 0
    while index < len(words):
        flag, sign, _ = words[index].partition("=")
        if flag in _WITH_VALUE:
            if not sign and index + 1 == len(words):
                raise UsageError(f"fp8console: {flag} needs a value")
            index += 1 if sign else 2
        elif words[index] in _WITHOUT_VALUE:
            index += 1
        else:
            break
    return list(words[:index]), list(words[index:])


def join_values(words: Sequence[str]) -> list[str]:
    """Options with each value joined to its flag: argparse takes the value in "--name -x" for a flag."""
    joined: list[str] = []
    rest = iter(words)
    for word in rest:
        joined.append(f"{word}={next(rest)}" if word in _WITH_VALUE else word)
    return joined


def take_training(words: Sequence[str]) -> tuple[str, list[str]]:
    """(kind, training) of words that begin with one: ``-m MODULE``, ``-- COMMAND`` or a script. Raises UsageError."""
    if not words:
        raise UsageError("fp8console: no training given; see: fp8console --help")
    first, rest = words[0], list(words[1:])
    if first == "-m":
        if not rest:
            raise UsageError("fp8console: -m needs a module")
        return "module", rest
    if first == "--":
        if not rest:
            raise UsageError("fp8console: -- needs a command")
        return "command", rest
    if first.startswith("-") and not os.path.exists(first):
        raise UsageError(f"fp8console: unknown option {first}; see: fp8console --help")
    return "script", [first, *rest]
