"""What a tuning profile may hold: sections, keys, and what each value can be. Standard library only.

A profile is what ``fp8console tune`` writes and ``--profile`` applies, as a TOML file (runs/profiles.py) and, cut down
to what a training needs, as a setting in run.json.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fp8console.protocol.commands import BACKOFF_MIN, SCALE_MAX, SCALE_MIN

#: Of the file's layout; a later one that can't be read as this one gets a higher number.
VERSION = 1
FORMATS = ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "float16")
PRESETS = ("pytorch", "article", "headroom")
PRECISIONS = ("fp8", "bf16", "uncast")

#: A rule gives what a value must be, or None when it is that.
Rule = Callable[[Any], "str | None"]


class ProfileError(ValueError):
    """A profile with something wrong in it; its text is one line. ``place``: the keys that lead there."""

    def __init__(self, text: str, place: tuple[str | int, ...] = ()) -> None:
        super().__init__(text)
        self.place = place


def _number(low: float, high: float = math.inf, over: bool = False) -> Rule:
    def check(value: Any) -> str | None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return "a finite number"
        if value < low or (over and value == low):
            return f"{'over' if over else 'from'} {low:g}" + ("" if over else " up")
        return None if value <= high else f"at most {high:g}"

    return check


def _count(low: int) -> Rule:
    def check(value: Any) -> str | None:
        whole = isinstance(value, int) and not isinstance(value, bool)
        return None if whole and low <= value < 2**31 else f"a whole number from {low} up"

    return check


def _text(value: Any) -> str | None:
    return None if isinstance(value, str) else "a text"


def _one_of(*words: str) -> Rule:
    return lambda value: None if value in words and isinstance(value, str) else "one of " + ", ".join(words)


def _finite(value: Any) -> str | None:
    return _number(-math.inf)(value)


_SCALE = _number(SCALE_MIN, SCALE_MAX)
_POSITIVE = _number(0, over=True)

SCALER_RULES: dict[str, Rule] = {
    "preset": _one_of(*PRESETS),
    "margin": _number(0, 16),
    "init_scale": _SCALE,
    "growth_factor": _number(1 + 2.0**-23),
    "backoff_factor": lambda v: _number(BACKOFF_MIN)(v) or ("below 1" if v >= 1 else None),
    "growth_interval": _count(1),
    "floor": _SCALE,
    "cap": _SCALE,
}
SECTIONS: dict[str, dict[str, Rule]] = {
    "made": {
        "script": _text,
        "model": _text,
        "device": _text,
        "date": _text,
        "fp8console": _text,
        "torch": _text,
        "batch_size": _count(1),
        "parameters": _count(0),
        "world_size": _count(1),
        "steps": _count(1),
        "usable_steps": _count(1),
        "lr": _POSITIVE,
    },
    "format": {"gradients": _one_of(*FORMATS), "forward": _one_of(*FORMATS)},
    "scaler": SCALER_RULES,
    "clipping": {"clip_norm": _POSITIVE},
}
LAYER_RULES: dict[str, Rule] = {
    "name": _text,
    "precision": _one_of(*PRECISIONS),
    "sensitivity": _finite,
    "headroom": _finite,
    "spread": _finite,
    "underflow": _number(0, 1),
    "error": _number(0),
    "why": _text,
}


def check_profile(data: Any) -> None:
    """Raises ProfileError, with its place, for the first thing that a profile can't hold."""
    if not isinstance(data, dict) or "profile" not in data:
        raise ProfileError(f"no profile: the line 'profile = {VERSION}' is missing")
    if data["profile"] != VERSION or isinstance(data["profile"], bool):
        raise ProfileError(
            f"profile must be {VERSION}, the layout this version reads, not {data['profile']!r}", ("profile",)
        )
    for section, values in data.items():
        if section == "profile":
            continue
        if section == "layers":
            _check_layers(values)
            continue
        if section not in SECTIONS:
            known = ", ".join(["profile", *SECTIONS, "layers"])
            raise ProfileError(f"unknown section {section!r}; known: {known}", (section,))
        if not isinstance(values, dict):
            raise ProfileError(f"{section} must be a table: [{section}]", (section,))
        for key, value in values.items():
            if (section, key) == ("clipping", "groups"):
                _check_groups(value)
            else:
                _check(SECTIONS[section], key, value, (section, key))
    scaler = data.get("scaler", {})
    _check_order(scaler)


def _check(rules: dict[str, Rule], key: str, value: Any, place: tuple[str | int, ...]) -> None:
    if key not in rules:
        raise ProfileError(f"unknown key {key!r}; known: {', '.join(rules)}", place)
    wanted = rules[key](value)
    if wanted is not None:
        raise ProfileError(f"{key} must be {wanted}, not {value!r}", place)


def _check_groups(groups: Any) -> None:
    if not isinstance(groups, dict):
        raise ProfileError("groups must be a table: [clipping.groups]", ("clipping", "groups"))
    for name, value in groups.items():
        wanted = _POSITIVE(value)
        if wanted is not None:
            raise ProfileError(f"{name} must be {wanted}, not {value!r}", ("clipping", "groups", name))


def _check_layers(layers: Any) -> None:
    if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
        raise ProfileError("layers must be a list of tables: [[layers]]", ("layers",))
    for index, layer in enumerate(layers):
        for key, value in layer.items():
            _check(LAYER_RULES, key, value, ("layers", index, key))
        if "name" not in layer or "precision" not in layer:
            raise ProfileError("a layer needs a name and a precision", ("layers", index))


def _check_order(scaler: dict[str, Any]) -> None:
    floor, cap, start = scaler.get("floor"), scaler.get("cap"), scaler.get("init_scale")
    if floor is not None and cap is not None and floor > cap:
        raise ProfileError(f"floor {floor:g} is over cap {cap:g}", ("scaler", "floor"))
    if start is not None and cap is not None and start > cap:
        raise ProfileError(f"init_scale {start:g} is over cap {cap:g}", ("scaler", "init_scale"))
    if start is not None and floor is not None and start < floor:
        raise ProfileError(f"init_scale {start:g} is under floor {floor:g}", ("scaler", "init_scale"))


def as_setting(data: dict[str, Any], file: str) -> dict[str, Any]:
    """What a training needs of a profile, for run.json: the ``profile`` setting."""
    made = data.get("made", {})
    return {
        "file": file,
        "device": made.get("device"),
        "format": data.get("format", {}).get("gradients"),
        "scaler": dict(data.get("scaler", {})),
        "clip_norm": data.get("clipping", {}).get("clip_norm"),
        "clip_groups": dict(data.get("clipping", {}).get("groups", {})),
    }


def setting_rule(value: Any) -> str | None:
    """The rule of the ``profile`` setting: what it must be, or None when it is that."""
    wanted = "a profile: give its file with --profile FILE"
    keys = ("file", "device", "format", "scaler", "clip_norm", "clip_groups")
    if not isinstance(value, dict) or sorted(value) != sorted(keys) or not isinstance(value["file"], str):
        return wanted
    made = {} if value["device"] is None else {"device": value["device"]}
    form = {} if value["format"] is None else {"gradients": value["format"]}
    clipping = {} if value["clip_norm"] is None else {"clip_norm": value["clip_norm"]}
    sections = {"made": made, "format": form, "scaler": value["scaler"]}
    try:
        check_profile({"profile": VERSION, **sections, "clipping": {**clipping, "groups": value["clip_groups"]}})
    except ProfileError as error:
        return f"{wanted} ({error})"
    return None
