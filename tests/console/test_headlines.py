from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from synthetic import SyntheticRun

from fp8console.console import lines
from fp8console.console.glyphs import UNICODE
from fp8console.console.headlines import first_line, no_step_words, precision, second_line
from fp8console.console.snapshot import Snapshot

Make = Callable[..., SyntheticRun]
Look = Callable[..., Snapshot]


def first(snapshot: Snapshot, width: int = 160) -> str:
    line = first_line(snapshot, width, UNICODE)
    assert lines.width_of(line) == width
    return lines.plain(line)


def second(snapshot: Snapshot, width: int = 160) -> str:
    line = second_line(snapshot, width, UNICODE)
    assert lines.width_of(line) == width
    return lines.plain(line)


def test_a_running_training(make_run: Make, look: Look) -> None:
    snapshot = look(make_run(4_210, eventfully=True))
    line = first(snapshot)
    assert line.startswith(" char_gpt.py   fp8-e5m2   ● running   step 4,210   epoch 2  62%   42 ms/step   24")
    assert "1 alert" in line
    health = second(snapshot)
    assert health.startswith(" healthy for 1,770 steps · last: rolled back to 2,273 at step 2,440")
    assert "2 skips in 4,210 steps" in health


@pytest.mark.parametrize("width", [160, 120, 100, 80, 60, 40, 20])
def test_the_state_stands_at_every_width(make_run: Make, look: Look, width: int) -> None:
    line = first(look(make_run(300)), width)
    assert "running" in line
    assert width < 40 or "step 300" in line


def test_paused(make_run: Make, look: Look) -> None:
    run = make_run(4_210)
    run.event("paused", "paused", step=4_210)
    assert "⏸ paused at step 4,210 for 0:42" in first(look(run, after=42.0))


def test_asked_but_not_yet(make_run: Make, look: Look) -> None:
    run = make_run(4_209)
    run.event("asked", "asked: pause", supervisor=True, id="1", command={"name": "pause"})
    assert "pause asked, training is at step 4,209" in first(look(run))


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ((0, None, None), "■ finished, exit 0"),
        ((1, "RuntimeError: the sky fell", None), "✗ failed, exit 1: RuntimeError: the sky fell"),
        ((137, None, "SIGKILL"), "✗ failed, exit 137: ended by SIGKILL"),
    ],
)
def test_ended(make_run: Make, look: Look, end: tuple[int, str | None, str | None], words: str) -> None:
    run = make_run(50)
    run.end(*end)
    assert words in first(look(run))
    assert second(look(run)).startswith(" ran ")


def test_lost(make_run: Make, look: Look) -> None:
    run = make_run(50)
    gone = {"pid": 2**22 + 1, "start": 1, "boot": "another"}
    run.info.update(supervisor=gone, training=gone)
    run.write_info()
    assert "lost" in first(look(run))


def test_nan_alarms(make_run: Make, look: Look) -> None:
    run = make_run(50)
    run.take(loss=math.nan)
    assert second(look(run)).startswith(" loss not finite since step 51")
    assert "! running" in first(look(run))


def test_no_step_yet_explains_itself(make_run: Make, look: Look) -> None:
    run = make_run()
    assert no_step_words(look(run, after=1)) == ["starting, no step yet"]
    assert "the probe has seen no optimizer step" in " ".join(no_step_words(look(run, after=9)))
    run.event("notice", "this script never imported torch", supervisor=True, part="probe")
    assert no_step_words(look(run, after=9))[-1] == "this script never imported torch"


def test_precision_is_read_off_the_command() -> None:
    assert precision(["train.py", "--precision", "bf16"]) == "bf16"
    assert precision(["train.py", "--precision=fp8-e4m3"]) == "fp8-e4m3"
    assert precision(["train.py", "--precision"]) is None
    assert precision(None) is None


def test_a_name_with_control_characters_does_no_harm(make_run: Make, look: Look) -> None:
    run = make_run(3)
    run.info["name"] = "evil\x1b[2J\nname.py"
    run.write_info()
    assert "\x1b" not in first(look(run))
    assert "\n" not in first(look(run))
