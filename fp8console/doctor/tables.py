"""Known architectures, cards and versions: the package's tables, and before them the user's own doctor.toml."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PARTS = ("torch", "rocm", "cuda", "torchao", "transformer_engine", "nvidia_driver")
_KEYS: dict[str, dict[str, Any]] = {
    "architecture": {"name": str, "cards": str, "fp8": list, "rocm": str},
    "card": {"name": str, "pci": int, "arch": str, "bandwidth": (int, float)},
    "together": {**dict.fromkeys(PARTS, list), "verdict": str, "otherwise": str, "works": bool, "why": str},
}


class TableError(ValueError):
    """A table that can't be; its text is one line that begins with the file."""


@dataclass(frozen=True)
class Tables:
    """Entries as they stand in the files, the user's first."""

    architecture: tuple[dict[str, Any], ...]
    card: tuple[dict[str, Any], ...]
    together: tuple[dict[str, Any], ...]
    nvidia: dict[str, Any]

    def formats(self, arch: str) -> tuple[str, ...] | None:
        """FP8 formats in an architecture's matrix hardware, () for none; None where it is not listed."""
        capability = re.fullmatch(r"sm_(\d+)", arch)
        if capability:
            return tuple(self.nvidia["fp8"]) if int(capability[1]) >= self.nvidia["fp8_since"] else ()
        entry = self.about(arch)
        return None if entry is None or "fp8" not in entry else tuple(entry["fp8"])

    def about(self, arch: str) -> dict[str, Any] | None:
        """The entry of an architecture, or None."""
        return next((entry for entry in self.architecture if entry["name"] == arch), None)

    def card_by_number(self, number: int | None) -> dict[str, Any] | None:
        """The entry of AMD's PCI device number, or None."""
        return next((entry for entry in self.card if number is not None and entry.get("pci") == number), None)

    def bandwidth(self, name: str) -> float | None:
        """GB/s of the card that a device's name names in whole words, the longest such name; None where not listed."""
        fitting = [e for e in self.card if "bandwidth" in e and re.search(_as_word(e["name"]), name, re.IGNORECASE)]
        # max takes the first of equals: the user's.
        return float(max(fitting, key=lambda e: len(e["name"]))["bandwidth"]) if fitting else None


def load(own: Path | None) -> Tables:
    """The tables; ``own`` is the user's file, which need not be there. Raises TableError."""
    here = Path(__file__).resolve().parent
    read = [_read(here / "cards.toml"), _read(here / "versions.toml")]
    nvidia = read[0]["nvidia"]
    if own is not None and os.path.exists(own):
        read.insert(0, _read(own))
        _check(own, read[0])
    entries = {name: tuple(entry for tables in read for entry in tables.get(name, ())) for name in _KEYS}
    return Tables(**entries, nvidia=nvidia)


def user_file(environ: Mapping[str, str]) -> Path:
    """The user's own tables: ``$XDG_CONFIG_HOME/fp8console/doctor.toml``."""
    base = environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(base) / "fp8console" / "doctor.toml"


def fits(version: str, wanted: Iterable[str]) -> bool:
    """Whether a version is one of those wanted: "2.9" (and every 2.9.x) or ">=2.11"."""
    have = numbers(version)
    for text in wanted:
        least = numbers(text.removeprefix(">="))
        if have >= least if text.startswith(">=") else have[: len(least)] == least:
            return True
    return False


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 9, 1) of "2.9.1+rocm6.4"."""
    match = re.match(r"\s*v?(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in match[1].split(".")) if match else ()


def _as_word(name: str) -> str:
    return rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])"


def _read(path: Path) -> dict[str, Any]:
    try:
        toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ImportError:
        raise TableError(f"{path}: reading it needs tomli on Python 3.10; install that") from None
    try:
        values: dict[str, Any] = toml.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TableError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise TableError(f"{path}: not UTF-8 at byte {error.start}") from None
    except toml.TOMLDecodeError as error:
        raise TableError(f"{path}: {error}") from None
    return values


def _check(path: Path, values: dict[str, Any]) -> None:
    for name, entries in values.items():
        if name not in _KEYS:
            raise TableError(f"{path}: unknown table {name!r}; known: {', '.join(_KEYS)}")
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise TableError(f"{path}: {name} is a list of tables: write [[{name}]]")
        for number, entry in enumerate(entries, start=1):
            _check_entry(f"{path}: [[{name}]] {number}", name, entry)


def _check_entry(where: str, name: str, entry: dict[str, Any]) -> None:
    for key, value in entry.items():
        kind = _KEYS[name].get(key)
        if kind is None:
            raise TableError(f"{where}: unknown key {key!r}; known: {', '.join(_KEYS[name])}")
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            wanted = {str: "text", list: "a list of texts", int: "a whole number", bool: "true or false"}
            raise TableError(f"{where}: {key} must be {wanted.get(kind, 'a number')}, not {value!r}")
        if isinstance(value, list) and not all(isinstance(item, str) for item in value):
            raise TableError(f"{where}: {key} must be a list of texts, not {value!r}")
    if name != "together" and "name" not in entry:
        raise TableError(f"{where}: needs a name")
    if name == "together":
        if sum(part in entry for part in PARTS) != 2:
            raise TableError(f"{where}: names two of {', '.join(PARTS)}")
        if entry.get("verdict", "warn") not in ("warn", "fail"):
            raise TableError(f"{where}: verdict must be warn or fail, not {entry['verdict']!r}")
