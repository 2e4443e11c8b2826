"""argparse as the commands use it: a wrong word gives one line and exit status 2."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from typing import Any, NoReturn


class UsageError(Exception):
    """A command line, a setting or a name that can't be; its text is one line. Exit status 2."""


class CommandFailed(Exception):
    """The command was right, but it can't be done; its text is one line. Exit status 1."""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=max(40, min(100, _columns() - 1)), max_help_position=32)


def _columns() -> int:
    # shutil.get_terminal_size does the same, but importing shutil takes 3 ms.
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given):
        return int(given)
    try:
        return os.get_terminal_size(1).columns or 80
    except OSError:
        return 80


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UsageError in place of printing a page of usage."""

    def __init__(self, command: str, description: str, epilog: str | None = None, **options: Any) -> None:
        prog = f"fp8console {command}".strip()
        options.setdefault("allow_abbrev", False)
        super().__init__(prog, description=description, epilog=epilog, formatter_class=_Formatter, **options)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}; see: {self.prog} --help")

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """The arguments among and after options. Raises UsageError; exits 0 after ``--help``."""
        return self.parse_intermixed_args(list(words))


def add_run(parser: Parser) -> None:
    """The RUN argument, the newest run when left out."""
    parser.add_argument("run", nargs="?", metavar="RUN", help="id, unique part of one, or path (default: the newest)")


def seconds(text: str) -> float:
    """A number of seconds over 0, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"must be a number of seconds over 0, not {text!r}")
    return value


def whole(text: str) -> int:
    """A whole number from 0 up, for argparse."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 up, not {text!r}")
    return value
