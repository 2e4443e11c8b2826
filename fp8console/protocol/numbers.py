"""Numbers through JSON: NaN and the infinities as the strings "NaN", "Infinity" and "-Infinity".

JSON has no token for them, and ``json.dumps`` writes bare ``NaN``, which strict parsers refuse. As strings they stay
readable and distinct, any parser takes the text, and ``float(text)`` in Python gives the number back.
"""

from __future__ import annotations

import json
import math
from typing import Any

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_jsonable(value: Any) -> Any:
    """The same value with each non-finite float replaced by its name; containers are copied."""
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        if math.isnan(value):
            return "NaN"
        return "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_jsonable(item) for item in value]
    return value


def dumps(value: Any, indent: int | None = None) -> str:
    """Strict JSON text of ``value``; non-finite floats by name."""
    separators = None if indent is not None else (",", ":")
    return json.dumps(to_jsonable(value), indent=indent, separators=separators, allow_nan=False)


def number(value: Any) -> float | None:
    """The float behind a JSON value: a number, a non-finite name, or None for anything else (bool included)."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, str):
        return NON_FINITE.get(value)
    return None
