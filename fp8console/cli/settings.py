"""Where settings come from: flags, then FP8CONSOLE_* variables, then fp8console.toml here, then the user's own file.

Every value given anywhere is checked, also one that another place overrides: nothing is ignored silently.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from fp8console.cli.arguments import UsageError
from fp8console.protocol import paths, toml_text
from fp8console.protocol.settings import SettingError, Settings, check

PREFIX = "FP8CONSOLE_"
#: Variables of ours that are no settings: how a training process finds its supervisor.
NOT_SETTINGS = frozenset({paths.ENV_RUN_DIR, paths.ENV_LINK, paths.ENV_SITE})
FILE_HERE = "fp8console.toml"

_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_TYPES = {field.name: str(field.type) for field in fields(Settings)}


def parse_text(name: str, text: str) -> Any:
    """A setting's value as written in a flag or a variable; "none" where a setting may be unset.

    Raises SettingError when the name is unknown or the value is not one it can have.
    """
    value: Any = text
    kind = _TYPES.get(name, "str")
    word = text.strip().lower()
    if "None" in kind and word == "none":
        value = None
    elif "bool" in kind and word in _BOOLEANS:
        value = _BOOLEANS[word]
    elif "str" not in kind:
        for parse in (int, float):
            try:
                value = parse(text)
                break
            except ValueError:
                continue
    check(name, value)
    return value


def user_file(environ: Mapping[str, str] = os.environ) -> Path:
    """The user's own settings: ``$XDG_CONFIG_HOME/fp8console/config.toml``."""
    base = environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return Path(base) / "fp8console" / "config.toml"


def gather(
    flags: Iterable[tuple[str, str, str]] = (),
    environ: Mapping[str, str] = os.environ,
    folder: Path | None = None,
) -> Settings:
    """The settings in effect. ``flags``: (flag as typed, setting, text). Raises UsageError, with file and line."""
    values: dict[str, Any] = {}
    values.update(_from_file(user_file(environ)))
    values.update(_from_file((folder or Path()) / FILE_HERE))
    values.update(_from_environment(environ))
    for flag, name, text in flags:
        try:
            values[name] = parse_text(name, text)
        except SettingError as error:
            raise UsageError(f"{flag}: {error}") from None
    return Settings(**values)


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in NOT_SETTINGS:
            continue
        try:
            name = variable[len(PREFIX) :].lower()
            if variable != PREFIX + name.upper():
                raise SettingError(f"a variable's name is in capitals: {PREFIX}{name.upper()}")
            values[name] = parse_text(name, text)
        except SettingError as error:
            raise UsageError(f"{variable} in the environment: {error}") from None
    return values


def _from_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes().decode("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}") from None
    try:
        values = toml_text.parse(text)
    except toml_text.TomlError as error:
        raise UsageError(f"{toml_text.at(path, error.line)}: {error}") from None
    for name, value in values.items():
        try:
            check(name, value)
        except SettingError as error:
            raise UsageError(f"{path}, line {_line_of(name, text)}: {error}") from None
    return values


def _line_of(name: str, text: str) -> int:
    quoted = re.escape(name)
    pattern = re.compile(rf"""\s*\[*\s*(["']?){quoted}\1\s*([=.\]])""")
    for index, line in enumerate(text.splitlines(), start=1):
        if pattern.match(line):
            return index
    return 1
