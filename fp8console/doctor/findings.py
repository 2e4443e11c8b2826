"""What a check says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

OK, WARN, FAIL, NOT_APPLICABLE = VERDICTS = ("ok", "warn", "fail", "not applicable")


@dataclass(frozen=True)
class Finding:
    """One check's result. ``evidence`` says what was seen, ``remedy`` which command or setting mends it, if any does.

    What could not be told is NOT_APPLICABLE, with evidence that begins with "not known" and says why.
    """

    group: str
    name: str
    verdict: str
    evidence: str
    remedy: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def not_known(group: str, name: str, why: str, remedy: str | None = None) -> Finding:
    """A check that could not be made."""
    return Finding(group, name, NOT_APPLICABLE, f"not known: {why}", remedy)


def merge(findings: Iterable[tuple[str, Finding]]) -> list[Finding]:
    """Findings of several cards, each with the card's label, as one for all that say the same."""
    groups: dict[Finding, list[str]] = {}
    for label, finding in findings:
        groups.setdefault(finding, []).append(label)
    if len(groups) <= 1:
        return list(groups)
    return [
        Finding(f.group, f.name, f.verdict, f"{', '.join(labels)}: {f.evidence}", f.remedy)
        for f, labels in groups.items()
    ]


def plural(many: int, one: str) -> str:
    """``2 cards``, ``1 card``."""
    return f"{many:,} {one}" + ("" if many == 1 else "s")
