"""Commands an operator can give, as plain dictionaries, and what makes each of them valid.

A command is ``{"name": ..., **arguments}``. ``validate`` is the one gate: the ``ctl`` command, the console's dialogs
and the supervisor all call it, so a bad value gets the same line everywhere and changes nothing. What only the
training can know (is there a scaler, does the restore point exist) is refused by the ranks, before any applies it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from fp8console.protocol.numbers import number

#: Smallest and largest loss scale accepted: float32's normal numbers whose reciprocal is finite too.
SCALE_MIN = 2.0**-126
SCALE_MAX = 2.0**126

#: Least backoff_factor: one overflow must not take the scale through all of float32 at once.
BACKOFF_MIN = 2.0**-24

#: Commands for people. The supervisor has two more of its own: snapshot_every and an unasked checkpoint.
NAMES = ("pause", "resume", "step", "checkpoint", "rollback", "set", "stop", "kill")
SETTINGS = (
    "scale",
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "hysteresis",
    "refill",
    "floor",
    "cap",
    "smoothing",
    "margin",
    "underflow_tolerance",
    "saturation_tolerance",
    "patience",
    "lr_scale",
    "clip_norm",
    "clip_z",
)
#: When a scaler with hysteresis counts the overflows that it tolerates anew.
REFILLS = ("on_growth", "every_clean_step")
#: Settings that torch's own GradScaler has, or that can be kept for it from outside; others need a scaler with them.
STOCK_SETTINGS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "floor", "cap")
ROLLBACK_WORDS = ("best", "last-good")


class CommandError(ValueError):
    """A command that can't be; its text is one line for the operator."""


def _finite(name: str, value: Any, words: str = "") -> float:
    try:
        parsed = number(value)
        if parsed is None and isinstance(value, str):
            parsed = float(value)
    except OverflowError:
        raise CommandError(f"{name} is too large a number") from None
    except ValueError:
        parsed = None
    if parsed is None:
        raise CommandError(f"{name} must be a number{words}, not {value!r}")
    if not math.isfinite(parsed):
        raise CommandError(f"{name} must be a finite number, not {parsed:g}")
    return parsed


def _scale(name: str, value: Any, words: str = "") -> float:
    parsed = _finite(name, value, words)
    if parsed <= 0:
        raise CommandError(f"{name} must be over 0, not {parsed:g} (a loss scale of 0 destroys the weights)")
    if not SCALE_MIN <= parsed <= SCALE_MAX:
        raise CommandError(f"{name} must lie between 2^-126 and 2^126, not {parsed:g}")
    return parsed


def _scale_change(name: str, value: Any) -> float | str:
    """A loss scale, or a factor on the present one: "x2" or "/2"."""
    if isinstance(value, str) and (match := re.fullmatch(r"([x*/])\s*(.+)", value.strip())):
        sign, rest = match.groups()
        factor = _scale(f"{name}'s factor", rest)
        return f"{'/' if sign == '/' else 'x'}{factor:.17g}"
    return _scale(name, value)


def _over_one(name: str, value: Any) -> float:
    parsed = _finite(name, value)
    if parsed <= 1:
        raise CommandError(f"{name} must be over 1, not {parsed:g}")
    if parsed < 1 + 2.0**-23:
        raise CommandError(f"{name} must be at least 1 + 2^-23: {parsed!r} is 1 in float32, which scalers use")
    return parsed


def _below_one(name: str, value: Any) -> float:
    parsed = _finite(name, value)
    if not BACKOFF_MIN <= parsed < 1:
        raise CommandError(f"{name} must lie between 0 and 1, and not below 2^-24; not {parsed:g}")
    return parsed


def _positive(name: str, value: Any, words: str = "") -> float:
    parsed = _finite(name, value, words)
    if parsed <= 0:
        raise CommandError(f"{name} must be over 0, not {parsed:g}")
    return parsed


def _count(name: str, value: Any) -> int:
    parsed = _finite(name, value)
    if parsed != int(parsed) or parsed < 1:
        raise CommandError(f"{name} must be a whole number from 1 up, not {value}")
    if parsed > 2**31 - 1:
        raise CommandError(f"{name} must be below 2^31, not {value}")
    return int(parsed)


def _clip_norm(name: str, value: Any, words: str = " or auto") -> float | str:
    """A limit, or "auto": one that follows the norms."""
    return "auto" if value == "auto" else _positive(name, value, words)


def _clip_norm_or_off(name: str, value: Any) -> float | str | None:
    return None if value is None or value == "off" else _clip_norm(name, value, ", auto or off")


def _scale_or_off(name: str, value: Any) -> float | None:
    if value is None or value == "off":
        return None
    return _scale(name, value, " or off")


def _between(low: float, high: float, off: bool = False) -> Callable[[str, Any], float | None]:
    def rule(name: str, value: Any) -> float | None:
        if off and (value is None or value == "off"):
            return None
        parsed = _finite(name, value, " or off" if off else "")
        if not low <= parsed <= high:
            raise CommandError(f"{name} must be from {low:g} to {high:g}{', or off' if off else ''}; not {parsed:g}")
        return parsed

    return rule


def _refill(name: str, value: Any) -> str:
    if value not in REFILLS:
        raise CommandError(f"{name} must be one of {', '.join(REFILLS)}; not {value!r}")
    return str(value)


SETTING_RULES: dict[str, Callable[[str, Any], Any]] = {
    "scale": _scale_change,
    "growth_factor": _over_one,
    "backoff_factor": _below_one,
    "growth_interval": _count,
    "hysteresis": _count,
    "refill": _refill,
    "floor": _scale_or_off,
    "cap": _scale_or_off,
    "smoothing": _between(0.0, 0.999),
    "margin": _between(0.0, 64.0, off=True),
    "underflow_tolerance": _between(0.0, 1.0),
    "saturation_tolerance": _between(0.0, 1.0, off=True),
    "patience": _count,
    "lr_scale": _positive,
    "clip_norm": _clip_norm_or_off,
    "clip_z": _positive,
}


def _tag(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9._-]{1,60}", value) or value.startswith("."):
        raise CommandError(f"tag must be up to 60 letters, digits, '.', '_' or '-', not {value!r}")
    return value


def _unknown(kind: str, given: str, known: tuple[str, ...]) -> CommandError:
    return CommandError(f"unknown {kind} {given!r}; known: {', '.join(known)}")


def validate(command: Any) -> dict[str, Any]:
    """The command with its values parsed. Raises CommandError, one line, for anything wrong."""
    if not isinstance(command, dict) or not isinstance(command.get("name"), str):
        raise CommandError("a command needs a name")
    name = command["name"]
    arguments = {key: value for key, value in command.items() if key != "name"}
    allowed: dict[str, Callable[[Any], Any]]
    if name in ("pause", "resume", "stop", "kill"):
        allowed = {}
    elif name == "step":
        allowed = {"count": lambda value: _count("step count", 1 if value is None else value)}
        arguments.setdefault("count", 1)
    elif name == "checkpoint":
        allowed = {"tag": _tag}
        arguments.setdefault("tag", None)
    elif name == "rollback":
        allowed = {
            "to": _rollback_target,
            "lr_scale": lambda value: None if value is None else _positive("lr_scale", value),
            "scale": lambda value: None if value is None else _scale_change("scale", value),
            "clip_norm": lambda value: None if value is None else _clip_norm("clip_norm", value),
        }
        if "to" not in arguments:
            raise CommandError("rollback needs a step, 'best' or 'last-good'")
    elif name == "set":
        if not arguments:
            raise CommandError(f"set needs NAME=VALUE; names: {', '.join(SETTINGS)}")
        allowed = {key: _setting(key) for key in SETTINGS}
    else:
        raise _unknown("command", name, NAMES)
    for key in arguments:
        if key not in allowed:
            kind = "setting" if name == "set" else f"argument of {name}"
            raise _unknown(kind, key, tuple(allowed) or ("none",))
    parsed = {"name": name, **{key: allowed[key](value) for key, value in arguments.items()}}
    if "clip_z" in parsed and parsed.get("clip_norm", "auto") != "auto":
        raise CommandError("clip_z goes with clip_norm=auto")
    floor, cap = parsed.get("floor"), parsed.get("cap")
    if floor is not None and cap is not None and floor > cap:
        raise CommandError(f"floor {floor:g} is over cap {cap:g}")
    return parsed


def _setting(key: str) -> Callable[[Any], Any]:
    rule = SETTING_RULES[key]
    return lambda value: rule(key, value)


def _rollback_target(value: Any) -> int | str:
    if isinstance(value, str) and value in ROLLBACK_WORDS:
        return value
    try:
        parsed = int(str(value).replace(",", ""))
    except ValueError:
        raise CommandError(f"rollback needs a step, 'best' or 'last-good', not {value!r}") from None
    if parsed < 0:
        raise CommandError(f"rollback needs a step of 0 or more, not {parsed}")
    return parsed


def parse_assignments(words: list[str]) -> dict[str, str]:
    """``["scale=1024", "cap=off"]`` as a dictionary. Raises CommandError on a word without "=" or a name twice."""
    parsed: dict[str, str] = {}
    for word in words:
        key, sign, value = word.partition("=")
        if not sign or not key or not value:
            raise CommandError(f"{word!r} is not NAME=VALUE")
        if key in parsed:
            raise CommandError(f"{key} is given twice")
        parsed[key] = value
    return parsed


def describe(command: dict[str, Any]) -> str:
    """The command as an operator would type it, for events and status lines."""
    name = command["name"]
    if name == "rollback":
        words = [name, f"{command['to']:,}" if isinstance(command["to"], int) else str(command["to"])]
        words += [f"{k}={_text(command[k])}" for k in ("lr_scale", "scale", "clip_norm") if command.get(k) is not None]
    elif name == "set":
        words = [name, *(f"{key}={_text(value)}" for key, value in command.items() if key != "name")]
    elif name == "checkpoint":
        words = [name] + ([f"tag {command['tag']}"] if command.get("tag") else [])
    elif name == "step":
        words = [name, str(command.get("count", 1))]
    else:
        words = [name]
    return " ".join(words)


def _text(value: Any) -> str:
    if value is None:
        return "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
