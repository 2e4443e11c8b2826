"""Profiles as TOML files: writing one with comments, reading it with its lines checked, keeping them in a folder."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8console.protocol import toml_text
from fp8console.protocol.profile import ProfileError, check_profile

Place = tuple[str | int, ...]


def profiles_root(environ: Mapping[str, str] = os.environ) -> Path:
    """The user's folder of profiles, ``$XDG_CONFIG_HOME/fp8console/profiles``; not created here."""
    base = environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return Path(base) / "fp8console" / "profiles"


# -- writing ------------------------------------------------------------------------------------------------------
def dumps(data: dict[str, Any], comments: Mapping[Place, str] | None = None, heading: str = "") -> str:
    """``data`` as TOML; a comment stands behind its value, or before its table. What is None is left out.

    Raises ProfileError for a number that is not finite, or a value that TOML has no form for.
    """
    notes = comments or {}
    lines = [f"# {_comment(line)}".rstrip() for line in heading.splitlines()]
    _table(data, (), notes, lines)
    return "\n".join(lines).strip("\n") + "\n"


def _table(table: Mapping[str, Any], place: Place, notes: Mapping[Place, str], lines: list[str]) -> None:
    inner = {key: value for key, value in table.items() if isinstance(value, dict) or _is_tables(value)}
    for key, value in table.items():
        if value is None or key in inner:
            continue
        path = (*place, key)
        note = f"  # {_comment(notes[path])}" if path in notes else ""
        lines.append(f"{_key(key)} = {_value(value, path)}{note}")
    for key, value in inner.items():
        path = (*place, key)
        # A table within one of a list goes to the list's last item: TOML writes no number.
        name = ".".join(_key(part) for part in path if isinstance(part, str))
        if isinstance(value, dict):
            _heading(path, notes, lines)
            lines.append(f"[{name}]")
            _table(value, path, notes, lines)
            continue
        for index, item in enumerate(value):
            _heading(path if index == 0 else (), notes, lines)
            lines.append(f"[[{name}]]")
            _table(item, (*path, index), notes, lines)


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _heading(path: Place, notes: Mapping[Place, str], lines: list[str]) -> None:
    lines.append("")
    lines.extend(f"# {_comment(line)}" for line in notes.get(path, "").splitlines())


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _string(key)


def _value(value: Any, place: Place) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            where = ".".join(str(part) for part in place)
            raise ProfileError(f"{where} is {value}: a profile holds finite numbers only", place)
        return repr(value)
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, list):
        return "[" + ", ".join(_value(item, place) for item in value) + "]"
    raise ProfileError(f"{'.'.join(map(str, place))}: TOML has no form for a {type(value).__name__}", place)


def _string(text: str) -> str:
    # JSON's escapes are TOML's too; only DEL, which JSON leaves as it is, must be escaped here.
    whole = text.encode("utf-8", "replace").decode("utf-8")
    return json.dumps(whole, ensure_ascii=False).replace("\x7f", "\\u007f")


def _comment(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)


def save(text: str, path: Path) -> None:
    """Write a profile whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def free_path(root: Path, made: Mapping[str, Any]) -> Path:
    """Where to keep a new profile: named by model (or script), device, batch size and torch; none is written over."""
    parts = [made.get("model") or made.get("script") or "training", made.get("device") or "device"]
    if made.get("batch_size"):
        parts.append(f"b{made['batch_size']}")
    if made.get("torch"):
        parts.append(f"torch{str(made['torch']).split('+')[0]}")
    stem = "-".join(re.sub(r"[^A-Za-z0-9._]+", "_", str(part)).strip("._") or "x" for part in parts)[:100]
    for number in range(1, 10_000):
        path = root / (f"{stem}.toml" if number == 1 else f"{stem}-{number}.toml")
        if not path.exists():
            return path
    raise ProfileError(f"{root} holds 9,999 profiles named {stem}: remove some")


# -- reading ------------------------------------------------------------------------------------------------------
def load(path: Path) -> dict[str, Any]:
    """A profile from its file. Raises ProfileError: one line with the file, and the line where there is one."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ProfileError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ProfileError(f"{path}: not UTF-8 at byte {error.start}") from None
    try:
        data = toml_text.parse(text)
    except toml_text.TomlError as error:
        raise ProfileError(f"{toml_text.at(path, error.line)}: {error}") from None
    try:
        check_profile(data)
    except ProfileError as error:
        raise ProfileError(f"{path}, line {line_of(error.place, text)}: {error}", error.place) from None
    return data


_PART = re.compile(r"""\s*(?:"((?:[^"\\]|\\.)*)"|'([^']*)'|([A-Za-z0-9_-]+))\s*""")


def line_of(place: Place, text: str) -> int:
    """The line of a key, or of the table that is nearest to it; 1 where neither is found."""
    found: dict[Place, int] = {}
    section: Place = ()
    counts: dict[Place, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if stripped.startswith("["):
            section = _parts(stripped.lstrip("["), "]")
            if stripped.startswith("[["):
                counts[section] = counts.get(section, -1) + 1
                found.setdefault(section, number)
                section = (*section, counts[section])
            found.setdefault(section, number)
        elif "=" in stripped and not stripped.startswith("#"):
            found.setdefault((*section, *_parts(stripped, "=")), number)
    for length in range(len(place), 0, -1):
        if place[:length] in found:
            return found[place[:length]]
    return 1


def _parts(text: str, end: str) -> Place:
    """The parts of a dotted key that ``end`` follows."""
    parts: list[str | int] = []
    at = 0
    while match := _PART.match(text, at):
        if match[1] is not None:
            try:
                parts.append(json.loads(f'"{match[1]}"'))
            except ValueError:
                parts.append(match[1])
        else:
            parts.append(match[2] if match[2] is not None else match[3])
        at = match.end()
        if text[at : at + 1] != ".":
            break
        at += 1
    return tuple(parts) if text[at : at + 1] == end else ()


# -- the folder ---------------------------------------------------------------------------------------------------
def kept(root: Path) -> list[Path]:
    """The profiles in a folder, newest first."""
    try:
        found = [path for path in root.iterdir() if path.suffix == ".toml" and not path.name.startswith(".")]
    except OSError:
        return []
    return sorted(found, key=lambda path: (-path.stat().st_mtime, path.name))


def find(name: str, root: Path) -> Path:
    """A profile by its file, or by its name in the folder or a part of it that no other has. Raises ProfileError."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if os.sep in name or (path.suffix == ".toml" and not (root / name).is_file()):
        raise ProfileError(f"no profile {name}: no such file")
    stems = {path.stem: path for path in kept(root)}
    wanted = name.removesuffix(".toml")
    if wanted in stems:
        return stems[wanted]
    near = [stem for stem in stems if wanted in stem]
    if len(near) == 1:
        return stems[near[0]]
    if near:
        raise ProfileError(f"{name!r} fits {len(near)} profiles: {', '.join(sorted(near)[:6])}")
    raise ProfileError(f"no profile {name!r} in {root}; fp8console profiles lists them")


def flat(data: Mapping[str, Any]) -> dict[str, Any]:
    """A profile's values under dotted keys, each layer's under its name."""
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key == "layers":
            for layer in value:
                values.update({f"layers.{layer['name']}.{k}": v for k, v in layer.items() if k != "name"})
        elif isinstance(value, dict):
            values.update({f"{key}.{k}": v for k, v in flat(value).items()})
        else:
            values[key] = value
    return values
