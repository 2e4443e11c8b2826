"""What became of a command, in words for the second line."""

from __future__ import annotations

from typing import Any

from fp8console.console.wording import scale_text, short_number
from fp8console.protocol.numbers import number

SECONDS = 6.0
#: A rollback says more, and it is worth reading.
ROLLBACK_SECONDS = 20.0


def applied_words(command: dict[str, Any], words: str, answer: dict[str, Any]) -> tuple[str, str, float]:
    """The text, its role, and for how many seconds it stands."""
    step, detail = answer.get("step"), answer.get("detail")
    at = f" at step {step:,}" if isinstance(step, int) else ""
    if command["name"] != "rollback" or not isinstance(detail, dict):
        return f"applied{at}: {words}", "good", SECONDS
    to = detail.get("to")
    text = f"rolled back to {to:,}{at}" if isinstance(to, int) else f"applied{at}: {words}"
    text += ": " + ", ".join(changes(detail.get("before"), detail.get("after")))
    equal = detail.get("digests_equal")
    rewound = "weights and data rolled back" if detail.get("data_rewound") else "weights rolled back, data not"
    if equal is False:
        return f"{text} · DIGESTS DIFFER: the restore point is not what was saved", "alarm", ROLLBACK_SECONDS
    return f"{text} · {'digests equal · ' if equal else ''}{rewound}", "good", ROLLBACK_SECONDS


def changes(before: Any, after: Any) -> list[str]:
    """ "loss 9.81 -> 2.04" for each value that both sides know."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return []
    found = []
    for name, title, text in (
        ("loss", "loss", short_number),
        ("scale", "scale", scale_text),
        ("lr", "lr", short_number),
    ):
        old, new = number(before.get(name)), number(after.get(name))
        if old is not None and new is not None:
            found.append(f"{title} {text(old)} -> {text(new)}")
    return found
