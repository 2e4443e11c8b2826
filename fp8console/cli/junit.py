"""A JUnit file of checks, as CI systems read it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from fp8console.cli.arguments import CommandFailed

#: What XML 1.0 can't hold at all.
_NO_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Case:
    """One check. ``verdict``: "passed", "skipped", or the kind of failure; "crashed" is an error in JUnit's sense."""

    group: str
    name: str
    verdict: str
    detail: str
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return self.verdict in ("passed", "skipped")


def write(path: Path, suite: str, cases: Sequence[Case], about: dict[str, str]) -> None:
    """Write the cases to ``path``, ``about`` as properties. Raises CommandFailed when it can't be written."""
    root = ElementTree.Element("testsuites")
    counts = {
        "tests": str(len(cases)),
        "failures": str(sum(not case.good and case.verdict != "crashed" for case in cases)),
        "errors": str(sum(case.verdict == "crashed" for case in cases)),
        "skipped": str(sum(case.verdict == "skipped" for case in cases)),
        "time": f"{sum(case.seconds for case in cases):.3f}",
    }
    element = ElementTree.SubElement(root, "testsuite", {"name": suite, **counts})
    properties = ElementTree.SubElement(element, "properties")
    for name, value in about.items():
        ElementTree.SubElement(properties, "property", {"name": _clean(name), "value": _clean(value)})
    for case in cases:
        _add(element, case)
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="unicode", xml_declaration=True)
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise CommandFailed(f"--junit {path}: {error.strerror}") from None


def _add(suite: ElementTree.Element, case: Case) -> None:
    about = {"classname": _clean(case.group), "name": _clean(case.name), "time": f"{case.seconds:.3f}"}
    element = ElementTree.SubElement(suite, "testcase", about)
    if case.verdict == "skipped":
        ElementTree.SubElement(element, "skipped", {"message": _clean(case.detail)})
    elif not case.good:
        kind = "error" if case.verdict == "crashed" else "failure"
        ElementTree.SubElement(element, kind, {"type": case.verdict, "message": _clean(case.detail)})
    said = ([case.detail] if case.verdict == "passed" and case.detail else []) + case.notes
    if said:
        ElementTree.SubElement(element, "system-out").text = _clean("\n".join(said))


def _clean(text: str) -> str:
    return _NO_XML.sub("?", text)
