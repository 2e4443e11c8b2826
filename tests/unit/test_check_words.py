"""The words of ``fp8console check``, and the JUnit file that it writes."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from fp8console.cli import junit
from fp8console.cli.arguments import CommandFailed, UsageError
from fp8console.cli.check_words import parse
from fp8console.cli.junit import Case


def test_a_check_of_the_device_has_its_defaults() -> None:
    given = parse([])
    assert (given.training, given.formats, given.device, given.timeout) == ([], [], None, 300.0)
    given = parse(["--format", "e4m3", "--format=float8_e5m2fnuz", "--device", "cuda:1", "--timeout", "5", "--json"])
    assert (given.formats, given.device, given.timeout, given.json) == (["e4m3fn", "e5m2fnuz"], "cuda:1", 5.0, True)


def test_a_check_of_a_training_leaves_its_words_alone() -> None:
    given = parse(["--steps", "20", "--tolerance", "0.02", "train.py", "--steps", "500", "--json", "--device", "cpu"])
    assert given.training == ["train.py", "--steps", "500", "--json", "--device", "cpu"] and given.kind == "script"
    assert (given.steps, given.tolerance, given.worst_tolerance, given.json) == (20, 0.02, 0.2, False)
    assert (given.seed, given.reference, given.scaling, given.candidate_args) == (0, "as-is", "dynamic", None)
    assert parse(["-m", "pkg.train", "--seed", "3"]).training == ["pkg.train", "--seed", "3"]
    given = parse(["--seed", "7", "--", "torchrun", "train.py"])
    assert (given.kind, given.training, given.seed) == ("command", ["torchrun", "train.py"], 7)


def test_words_for_the_two_runs() -> None:
    given = parse(["--candidate-args", "--precision 'fp8 e5m2'", "--reference-args=--precision bf16", "train.py"])
    assert given.candidate_args == ["--precision", "fp8 e5m2"] and given.reference_args == ["--precision", "bf16"]
    assert parse(["--keep", "head", "--keep", "*.norm", "train.py"]).keep == ["head", "*.norm"]


@pytest.mark.parametrize(
    "words, says",
    [
        (["--steps", "5"], "--steps needs a training"),
        (["--set", "theme=x"], "--set needs a training"),
        (["--device", "cpu", "train.py"], "--device checks the device"),
        (["--format", "e4m3", "--format", "e5m2", "train.py"], "one --format at a time"),
        (["--format", "e3m4"], "--format must be one of e4m3fn, e5m2, e4m3fnuz, e5m2fnuz, not 'e3m4'"),
        (["--steps", "0", "train.py"], "a whole number from 1 up"),
        (["--tolerance", "nan", "train.py"], "a number from 0 up"),
        (["--tolerance", "-1", "train.py"], "a number from 0 up"),
        (["--seed", "-1", "train.py"], "a whole number from 0 up"),
        (["--timeout", "0"], "a number of seconds over 0"),
        (["--steps"], "--steps needs a value"),
        (["--frobnicate"], "--frobnicate"),
        (["--reference", "fp8", "train.py"], "--reference"),
        (["--candidate-args", "'", "train.py"], "--candidate-args"),
        (["--candidate-args", "x", "--scaling", "none", "train.py"], "--scaling is of the emulation"),
        (["--candidate-args", "x", "--format", "e5m2", "train.py"], "--format is of the emulation"),
    ],
)
def test_words_that_make_no_sense_get_one_line(words: list[str], says: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse(words)
    assert says in str(raised.value) and "\n" not in str(raised.value)


def test_a_junit_file_holds_every_verdict(tmp_path: Path) -> None:
    cases = [
        Case("casts.e5m2", "decode", "passed", "all right", 0.25, ["a finding"]),
        Case("casts.e5m2", "encode", "failed", "1 gives <2> & \x1b[31m\x00", 0.5),
        Case("products.e5m2", "forward", "nonfinite", "NaN \ud800"),
        Case("products.e5m2", "NaN", "crashed", "SIGSEGV"),
        Case("layers", "errors", "skipped", "none"),
    ]
    path = tmp_path / "out.xml"
    junit.write(path, "a suite", cases, {"device": "gfx942"})
    suite = ElementTree.parse(path).getroot().find("testsuite")
    assert suite is not None
    counts = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "5", "failures": "2", "errors": "1", "skipped": "1"}
    assert suite.get("name") == "a suite" and suite.get("time") == "0.750"
    assert suite.find("properties/property[@name='device']").get("value") == "gfx942"  # type: ignore[union-attr]
    found = list(suite.iter("testcase"))
    assert [case.get("classname") for case in found] == [case.group for case in cases]
    assert found[0].findtext("system-out") == "all right\na finding"
    failure = found[1].find("failure")
    assert failure is not None and failure.get("message") == "1 gives <2> & ?[31m?"
    assert found[2].find("failure").get("type") == "nonfinite"  # type: ignore[union-attr]
    assert found[3].find("error") is not None and found[4].find("skipped") is not None


def test_a_junit_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="--junit"):
        junit.write(tmp_path, "suite", [], {})
