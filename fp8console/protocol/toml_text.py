"""TOML as Python's own parser reads it, its errors with the line apart from the words."""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any


class TomlError(ValueError):
    """What can't be read; ``line`` counts from 1, None when no line is to blame. The text is one line without it."""

    def __init__(self, text: str, line: int | None) -> None:
        super().__init__(text)
        self.line = line


def parse(text: str) -> dict[str, Any]:
    """The values of a TOML text. Raises TomlError, also on a Python 3.10 without tomli."""
    try:
        toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ImportError:
        raise TomlError("reading it needs tomli on Python 3.10; install that", None) from None
    try:
        values: dict[str, Any] = toml.loads(text)
    except toml.TOMLDecodeError as error:
        # The parser's own text ends in "(at line 3, column 5)".
        match = re.fullmatch(r"(.*) \(at (?:line (\d+), column \d+|end of document)\)", str(error), re.DOTALL)
        line = int(match[2]) if match and match[2] else text.count("\n") + 1
        raise TomlError(match[1] if match else str(error), line) from None
    return values


def at(path: object, line: int | None) -> str:
    """Where it stands, for the beginning of a message: the file, and the line where there is one."""
    return f"{path}" if line is None else f"{path}, line {line}"
