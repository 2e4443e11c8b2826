"""Commands: one gate for all of them, one line for each wrong one."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8console.protocol import commands
from fp8console.protocol.commands import CommandError, describe, parse_assignments, validate
from fp8console.protocol.numbers import dumps

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)
_WORDS = st.sampled_from([*commands.SETTINGS, "to", "tag", "count", "name", "x"])
_VALUES = _JSON | st.sampled_from(["x2", "/2", "off", "nan", "inf", "-1", "0", "1e400", "x0", "*", "best", "2,300"])


@PATIENT
@given(st.dictionaries(_WORDS, _VALUES, max_size=4), st.sampled_from([*commands.NAMES, "autopilot", ""]))
def test_validate_raises_nothing_but_command_error(arguments: dict[str, Any], name: str) -> None:
    command = {**arguments, "name": name}
    try:
        parsed = validate(command)
    except CommandError as error:
        assert str(error) and "\n" not in str(error)
        return
    # What passes once passes again, unchanged, also after a trip over the wire.
    assert validate(parsed) == parsed
    assert validate(json.loads(dumps(parsed))) == parsed
    assert "\n" not in describe(parsed)


@PATIENT
@given(_JSON)
def test_anything_else_is_refused_in_one_line(thing: Any) -> None:
    if isinstance(thing, dict):
        thing.pop("name", None)
    with pytest.raises(CommandError, match="needs a name"):
        validate(thing)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"scale": "0"}, "scale must be over 0"),
        ({"scale": -1}, "scale must be over 0"),
        ({"scale": "nan"}, "scale must be a finite number, not nan"),
        ({"scale": "inf"}, "scale must be a finite number"),
        ({"scale": "many"}, "scale must be a number, not 'many'"),
        ({"scale": True}, "scale must be a number"),
        ({"cap": "none"}, "cap must be a number or off, not 'none'"),
        ({"saturation_tolerance": "none"}, "saturation_tolerance must be a number or off, not 'none'"),
        ({"scale": "1e300"}, "between 2^-126 and 2^126"),
        ({"scale": "x0"}, "factor must be over 0"),
        ({"scale": 10**400}, "too large"),
        ({"growth_factor": "1"}, "growth_factor must be over 1"),
        ({"growth_factor": 0.5}, "growth_factor must be over 1"),
        ({"backoff_factor": 1}, "between 0 and 1"),
        ({"backoff_factor": 0}, "between 0 and 1"),
        ({"growth_interval": 0}, "whole number from 1"),
        ({"growth_interval": 2.5}, "whole number from 1"),
        ({"growth_interval": 2**31}, "below 2^31"),
        ({"hysteresis": "1.5"}, "whole number"),
        ({"lr_scale": 0}, "lr_scale must be over 0"),
        ({"clip_norm": -1}, "clip_norm must be over 0"),
        ({"floor": 4, "cap": 2}, "floor 4 is over cap 2"),
        ({"momentum": 1}, "unknown setting 'momentum'"),
        ({}, "set needs NAME=VALUE"),
    ],
)
def test_a_bad_setting_is_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(CommandError) as caught:
        validate({"name": "set", **arguments})
    assert words in str(caught.value)


@pytest.mark.parametrize("target", ["soon", "-1", -1, 2.5, None, True, "nan", "9" * 5000])
def test_a_bad_rollback_target_is_refused(target: Any) -> None:
    with pytest.raises(CommandError, match="rollback needs a step"):
        validate({"name": "rollback", "to": target})


def test_good_commands_are_parsed() -> None:
    assert validate({"name": "set", "scale": "1024", "cap": "off", "growth_interval": "500"}) == {
        "name": "set",
        "scale": 1024.0,
        "cap": None,
        "growth_interval": 500,
    }
    assert validate({"name": "set", "scale": "x2"})["scale"] == "x2"
    assert validate({"name": "set", "scale": "* 2.5"})["scale"] == "x2.5"
    assert validate({"name": "set", "scale": " / 4"})["scale"] == "/4"
    assert validate({"name": "rollback", "to": "2,300", "lr_scale": "0.5"}) == {
        "name": "rollback",
        "to": 2300,
        "lr_scale": 0.5,
    }
    assert validate({"name": "rollback", "to": "last-good"})["to"] == "last-good"
    assert validate({"name": "step"}) == {"name": "step", "count": 1}
    assert validate({"name": "checkpoint", "tag": "v1"})["tag"] == "v1"
    assert validate({"name": "pause"}) == {"name": "pause"}


@pytest.mark.parametrize("tag", ["", ".hidden", "a/b", "..", "x" * 61, "a b", 5, "é"])
def test_a_tag_is_a_safe_file_name(tag: Any) -> None:
    with pytest.raises(CommandError, match="tag must be"):
        validate({"name": "checkpoint", "tag": tag})


@pytest.mark.parametrize("extra", [{"count": 3}, {"now": 1}])
def test_an_argument_that_is_not_the_commands_is_refused(extra: dict[str, Any]) -> None:
    with pytest.raises(CommandError, match="unknown argument of pause"):
        validate({"name": "pause", **extra})


def test_assignments() -> None:
    assert parse_assignments(["scale=1024", "cap=off"]) == {"scale": "1024", "cap": "off"}
    for words in (["scale"], ["=1"], ["scale="], ["scale=1", "scale=2"]):
        with pytest.raises(CommandError):
            parse_assignments(words)


def test_describe_reads_like_what_was_typed() -> None:
    assert describe(validate({"name": "rollback", "to": 2300, "lr_scale": 0.5})) == "rollback 2,300 lr_scale=0.5"
    assert describe(validate({"name": "set", "cap": "off", "scale": 1024})) == "set cap=off scale=1024"
    assert describe(validate({"name": "checkpoint", "tag": "v1"})) == "checkpoint tag v1"
    assert describe(validate({"name": "step", "count": 3})) == "step 3"
    assert math.isfinite(commands.SCALE_MAX)
