"""``fp8console doctor``: is this machine, its software and, if one is named, a script fit for training in FP8?"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import socket
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8console.cli.arguments import CommandFailed, Parser, UsageError
from fp8console.protocol import paths
from fp8console.protocol.numbers import dumps
from fp8console.protocol.settings import Settings

#: Steps of a script that are looked at, unless --steps says otherwise: scalers and clips show from the first on.
STEPS = 5
_EPILOG = """\
Works with no GPU, no ROCm and no torch. What needs torch is asked in the training's Python, in a process of its own.
A script named after the options is run for a few steps, unedited, and ended; what follows it are its own words.
Known cards and versions can be extended in doctor.toml, beside the user's config.toml.

exit status: 0 without a fail, 1 with one, 2 for words that make no sense
"""
#: SGR colours of the verdicts on a terminal; the word is there in any case.
_COLOURS = {"ok": "32", "warn": "33", "fail": "31;1", "not applicable": "2"}
_SHORT = {"not applicable": "n/a"}


def parser() -> Parser:
    """The parser of everything that stands before a script."""
    made = Parser("doctor", "Check this machine, and a script if one is given, for training in FP8.", _EPILOG)
    made.usage = "fp8console doctor [OPTIONS] [train.py ARGS | -m MODULE ARGS | -- COMMAND]"
    made.add_argument(
        "--python", metavar="PATH", help="the training's interpreter (default: this one, if it has torch)"
    )
    made.add_argument("--bandwidth", action="store_true", help="time a copy in each device's memory")
    made.add_argument("--steps", type=_steps, metavar="N", help=f"steps of the script to look at (default {STEPS})")
    made.add_argument("--json", action="store_true", help="print one object instead of a table")
    return made


def main(words: Sequence[str]) -> int:
    """Checks, prints, and returns 1 when a check failed, else 0."""
    from fp8console.cli.launch import LaunchError, choose_python
    from fp8console.doctor import findings as verdicts

    given, kind, training = _parse(words)
    try:
        python = choose_python(given.python)
    except LaunchError as error:
        raise UsageError(str(error)) from None
    if training and kind == "script":
        _there(training[0], python)
    began = time.monotonic()
    found = examine(python, given.bandwidth)
    if training:
        found += try_script(kind, training, given.python, given.steps or STEPS)
    count = {verdict: sum(finding.verdict == verdict for finding in found) for verdict in verdicts.VERDICTS}
    if given.json:
        about = {"python": python, "seconds": time.monotonic() - began, "counts": count}
        print(dumps({"passed": not count["fail"], **about, "findings": [finding.to_json() for finding in found]}))
        return 1 if count["fail"] else 0
    terminal = sys.stdout is not None and sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else None
    colours = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
    print("\n".join(table(found, width, colours)))
    print(f"\n{', '.join(f'{many} {verdict}' for verdict, many in count.items())}")
    return 1 if count["fail"] else 0


def examine(python: str, bandwidth: bool) -> list[Any]:
    """Findings on the machine, as this process and ``python`` see it. Raises UsageError for a bad doctor.toml."""
    from fp8console.cli.logout import killed_at_logout
    from fp8console.doctor import access, device, environment, inquiry, machine, software, tables

    environ = dict(os.environ)
    try:
        known = tables.load(tables.user_file(environ))
    except tables.TableError as error:
        raise UsageError(f"fp8console doctor: {error}") from None
    root = Path(environ.get("SYSFS_PATH") or "/sys")
    here = machine.look(root, known, environ)
    _tell(f"asking {python} about torch")
    answer = inquiry.ask(python, environ, bandwidth)

    def again() -> inquiry.Answer:
        return inquiry.ask(python, environ, without="amdsmi")

    surroundings = access.look(environ, paths.state_root(), killed_at_logout(), sys=root)
    return [
        *device.check(here, known, answer, bandwidth),
        *software.check(here, known, answer, environ, again),
        *environment.check(here, answer, environ, _interfaces()),
        *access.check(here, surroundings),
    ]


def _interfaces() -> list[str] | None:
    try:
        return [name for _, name in socket.if_nameindex()]
    except OSError:
        return None


def _there(name: str, python: str) -> None:
    """Raises UsageError or CommandFailed for a script that can't be run, before anything else is done."""
    from fp8console.cli.launch import LaunchError, check_script

    try:
        check_script(name, python)
    except LaunchError as error:
        raise (UsageError if error.status == 2 else CommandFailed)(str(error)) from None


# -- the script -------------------------------------------------------------------------------------------------------
def try_script(kind: str, training: list[str], python: str | None = None, steps: int = STEPS) -> list[Any]:
    """Run a script for a few steps; what is found. Raises UsageError."""
    from fp8console.cli.check_runs import run_training
    from fp8console.cli.options import LaunchOptions
    from fp8console.cli.settings import gather
    from fp8console.doctor import script

    settings = _looking(gather(), steps)
    # The hooks that look at layers would split compiled graphs.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    options = LaunchOptions(kind, python, detach=True, settings=settings)
    began = time.monotonic()
    try:
        ended = run_training("doctor", training, options, steps)
    except CommandFailed as error:
        return script.check(script.Trial(0, time.monotonic() - began, str(error), None, None, 0))
    events = ended.run.events.events
    inspected = [event for event in events if event["kind"] == "inspected" and event.get("rank", 0) == 0]
    clips = ended.run.rank(0).flag("scaled_clip", 0, steps) if ended.steps else []
    trial = script.Trial(
        steps=ended.steps,
        seconds=time.monotonic() - began,
        error=ended.error,
        run_dir=str(ended.run_dir),
        inspected=inspected[-1] if inspected else None,
        scaled_clips=sum(map(bool, clips)),
    )
    return script.check(trial)


def _looking(settings: Settings, steps: int) -> Settings:
    """The settings of a run that is only looked at: nothing kept, nothing sampled, ended after ``steps``."""
    return dataclasses.replace(
        settings,
        inspect=True,
        stop_after=steps,
        total_steps=steps,
        layer_steps=0,
        snapshot_budget=0.0,
        checkpoint_minutes=0.0,
    )


# -- words ------------------------------------------------------------------------------------------------------------
def _parse(words: Sequence[str]) -> tuple[argparse.Namespace, str, list[str]]:
    """Options, and the training's kind and words ([] without one). Raises UsageError; exits 0 after ``--help``."""
    made = parser()
    own, rest = _split(list(words), made)
    given = made.parse_args(own)
    if not rest:
        if given.steps is not None:
            raise UsageError("fp8console doctor: --steps needs a script; see: fp8console doctor --help")
        return given, "script", []
    from fp8console.cli.launch_words import take_training

    return given, *take_training(rest)


def _split(words: list[str], made: Parser) -> tuple[list[str], list[str]]:
    """``words`` cut where the training begins: at the first that is neither an option nor an option's value."""
    flags = {flag: action.nargs != 0 for action in made._actions for flag in action.option_strings}
    own: list[str] = []
    while words:
        flag, sign, _ = words[0].partition("=")
        if words[0] in ("--", "-m") or flag not in flags:
            break
        own.append(words.pop(0))
        if flags[flag] and not sign:
            if not words:
                raise UsageError(f"fp8console doctor: {flag} needs a value")
            own[-1] += f"={words.pop(0)}"
    return own, words


def _steps(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 up, not {text!r}")
    return int(text)


def _tell(text: str) -> None:
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"fp8console: {text} ...", file=sys.stderr, flush=True)


# -- the table --------------------------------------------------------------------------------------------------------
def table(found: Sequence[Any], width: int | None, colours: bool) -> list[str]:
    """Findings by group, a line or more each; ``width``: columns to wrap at, None for lines as long as they come."""
    from fp8console.cli.wording import printable

    names = max(len(finding.name) for finding in found)
    indent = 2 + 6 + names + 2
    narrow = width is not None and width - indent < 36
    lines: list[str] = []
    group = ""
    for finding in found:
        if finding.group != group:
            lines += ([""] if group else []) + [finding.group]
            group = finding.group
        verdict = _SHORT.get(finding.verdict, finding.verdict)
        shown = f"\x1b[{_COLOURS[finding.verdict]}m{verdict}\x1b[0m" if colours else verdict
        head = f"  {shown}{' ' * (6 - len(verdict))}{finding.name}"
        texts = [printable(finding.evidence)]
        if finding.remedy is not None:
            texts.append(f"-> {printable(finding.remedy)}")
        body = [line for text in texts for line in _wrapped(text, width, 8 if narrow else indent)]
        if narrow:
            lines += [head, *body]
        else:
            lines += [head + " " * (names + 2 - len(finding.name)) + body[0].lstrip(), *body[1:]]
    return lines


def _wrapped(text: str, width: int | None, indent: int) -> list[str]:
    room = 10**6 if width is None else max(20, width - indent)
    first, rest = " " * indent, " " * (indent + (3 if text.startswith("->") else 0))
    return textwrap.wrap(
        text,
        width=room + indent,
        initial_indent=first,
        subsequent_indent=rest,
        break_on_hyphens=False,
        break_long_words=False,
    )
