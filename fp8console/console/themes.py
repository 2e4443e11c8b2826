"""Themes from TOML files: ours in ``themes/``, a user's own in the configuration folder, one format.

name = "mine"              # optional: the file's name without .toml
dark = true
primary = "#56B4E9"        # and secondary, warning, error, success, accent, foreground, background, surface, panel
ansi = false               # true: the colours are the terminal's own sixteen, as "ansi_blue"
[variables]                # colours of ours (DEFAULTS below), and any variable that Textual knows
plot-loss = "#56B4E9"
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from textual.theme import Theme

DEFAULT = "okabe-ito"
COLOURS = (
    "primary",
    "secondary",
    "warning",
    "error",
    "success",
    "accent",
    "foreground",
    "background",
    "surface",
    "panel",
    "boost",
)

#: Our variables: for themes that do not set them, which of a theme's colours stands in, and at what opacity.
DEFAULTS: dict[str, tuple[str, str]] = {
    "rule": ("foreground", " 30%"),
    "faint": ("foreground", " 60%"),
    "plot-loss": ("primary", ""),
    "plot-norm": ("warning", ""),
    "plot-scale": ("success", ""),
    "plot-abandoned": ("foreground", " 35%"),
    "mark-skipped": ("warning", ""),
    "mark-alert": ("error", ""),
    "mark-rollback": ("accent", ""),
    "mark-point": ("success", ""),
    "bar": ("primary", ""),
    "bar-rest": ("foreground", " 20%"),
    "heat-0": ("foreground", " 30%"),
    "heat-1": ("secondary", ""),
    "heat-2": ("primary", ""),
    "heat-3": ("success", ""),
    "heat-4": ("warning", ""),
}


def variable_defaults(theme: Theme) -> dict[str, str]:
    """Our variables by the colours of ``theme``."""
    usual = {"foreground": "#e0e0e0" if theme.dark else "#202020"}
    defaults = {}
    for name, (source, opacity) in DEFAULTS.items():
        colour = getattr(theme, source) or usual.get(source) or theme.primary
        defaults[name] = colour if colour.startswith("ansi_") else colour + opacity
    return defaults


class ThemeError(ValueError):
    """A theme that can't be used; its text is one line: file, what, what would be right."""


def load(path: Path) -> Theme:
    """The theme of one file. Raises ThemeError."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib  # type: ignore[no-redef,import-not-found,unused-ignore]
    from textual.color import Color, ColorParseError

    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ThemeError(f"{path}: {error}") from None
    name = data.pop("name", path.stem)
    variables = data.pop("variables", {})
    if not isinstance(name, str) or not isinstance(variables, dict):
        raise ThemeError(f"{path}: name must be text and variables a table")
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key in ("dark", "ansi") and isinstance(value, bool):
            values[key] = value
        elif key in COLOURS and isinstance(value, str):
            try:
                Color.parse(value)
            except ColorParseError:
                raise ThemeError(f"{path}: {key} = {value!r} is no colour; right would be '#56B4E9'") from None
            values[key] = value
        else:
            raise ThemeError(
                f"{path}: unknown or unusable key {key!r}; known: dark, ansi, variables, {', '.join(COLOURS)}"
            )
    if "primary" not in values:
        raise ThemeError(f"{path}: primary is missing; right would be primary = '#56B4E9'")
    return Theme(name=name, variables={str(k): str(v) for k, v in variables.items()}, **values)


def own_folder() -> Path | None:
    """The folder of the themes that come with us: in the package when installed, beside it in a source tree."""
    here = Path(__file__).resolve()
    for folder in (here.parents[1] / "_data" / "themes", here.parents[2] / "themes"):
        if folder.is_dir():
            return folder
    return None


def user_folder() -> Path:
    """The folder of a user's own themes; it need not exist."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(base) / "fp8console" / "themes"


def load_all(folders: Iterable[Path | None]) -> tuple[list[Theme], list[str]]:
    """All themes of the folders, a later one replacing an earlier of the same name, and one line for each bad file."""
    found: dict[str, Theme] = {}
    problems: list[str] = []
    for folder in folders:
        if folder is None or not folder.is_dir():
            continue
        for path in sorted(folder.glob("*.toml")):
            try:
                theme = load(path)
            except ThemeError as error:
                problems.append(str(error))
                continue
            found[theme.name] = theme
    return list(found.values()), problems
