from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from synthetic import SyntheticRun

from fp8console.console import lines
from fp8console.console.answers import applied_words
from fp8console.console.glyphs import ASCII, UNICODE, choose
from fp8console.console.screens.output import continuation
from fp8console.console.screens.retune import command_of, settings_for
from fp8console.console.screens.rollback import consequence, newest_first, row
from fp8console.console.snapshot import Snapshot
from fp8console.console.widgets import events, gpus, host
from fp8console.console.widgets.bars import bar
from fp8console.console.widgets.keyline import fitting
from fp8console.console.wording import (
    bytes_text,
    clock_text,
    left_text,
    rate_text,
    scale_text,
    short_number,
    step_time_text,
)

Make = Callable[..., SyntheticRun]
Look = Callable[..., Snapshot]


def texts(body: list[lines.Line]) -> list[str]:
    return [lines.plain(line) for line in body]


def test_gpus_are_as_old_as_they_are_and_unknown_where_unknown(make_run: Make, look: Look) -> None:
    run = make_run(10, gpus=4)
    run.sample()
    sample = look(run).status.hardware
    body = texts(gpus.rows(sample, 0.6, 76, UNICODE, 8))
    assert len(body) == 4
    assert body[0].startswith("0 MI300X  gfx █")
    assert " 87%" in body[0]
    assert "112/192 GB  612 W 61°" in body[0]
    assert "unknown (no answer for 15 s)" in body[3]


def test_more_gpus_than_rows_are_told_by_number(make_run: Make, look: Look) -> None:
    run = make_run(10, gpus=8)
    run.sample()
    body = texts(gpus.rows(look(run).status.hardware, 0.6, 76, UNICODE, 3))
    assert body[-1] == "and 6 more GPUs: g shows all"


def test_no_gpu_is_said_with_the_reason(make_run: Make, look: Look) -> None:
    run = make_run(10)
    assert texts(gpus.rows(look(run).status.hardware, 0, 76, UNICODE, 8)) == [
        "no GPU telemetry yet: no sample has arrived"
    ]
    run.sample()
    assert texts(gpus.rows(look(run).status.hardware, 0, 76, UNICODE, 8)) == [
        "no GPU telemetry: no AMD GPU in /sys/class/drm"
    ]


def test_a_gpu_of_which_nothing_is_known_shows_no_zero() -> None:
    line = lines.plain(gpus.row({"index": 0, "busy": None}, 0.1, 76, UNICODE))
    assert "0%" not in line
    assert "unknown" in line


def test_host(make_run: Make, look: Look) -> None:
    run = make_run(10)
    assert "cpu unknown   memory unknown" in texts(host.rows(look(run), UNICODE, 76, False))[0]
    run.sample()
    body = texts(host.rows(look(run), UNICODE, 76, False))
    assert "memory 61/1024 GB   run directory 798 GB free" in body[0]
    assert "data wait 3.0%" in body[1]


def test_events_are_newest_first_and_routine_ones_are_folded(make_run: Make, look: Look) -> None:
    run = make_run(10)
    run.point()
    run.take()
    run.point()
    run.event("skipped", "step 12 skipped: overflow at scale 2^15", step=12)
    shown = [lines.plain(events.row(event, UNICODE)) for event in events.newest(look(run).events)]
    assert shown[0].startswith("12        × skipped: overflow at scale 2^15")
    assert [row[:2] for row in shown if "◆" in row] == ["11"]


def test_an_answer_that_an_event_of_the_training_tells_is_not_repeated(make_run: Make, look: Look) -> None:
    run = make_run(10)
    for name in ("pause", "set"):
        run.event("applied", f"{name}: applied", supervisor=True, step=10, id=name, command={"name": name})
    assert [event["id"] for event in look(run).events if event["kind"] == "applied"] == ["set"]


def test_other_ranks_do_not_repeat_what_rank_0_says(make_run: Make, look: Look) -> None:
    run = make_run(10)
    run.event("skipped", "step 3 skipped", step=3)
    (run.run_dir / "events.1.jsonl").write_bytes((run.run_dir / "events.0.jsonl").read_bytes())
    assert len([event for event in look(run).events if event["kind"] == "skipped"]) == 1


def test_restore_points_and_what_a_rollback_loses(make_run: Make, look: Look) -> None:
    run = make_run(100)
    run.point(disk=True, tag="v1")
    for _ in range(50):
        run.take()
    run.point()
    snapshot = look(run)
    points = newest_first(snapshot)
    assert [point["step"] for point in points] == [150, 100]
    cells = row(points[1], snapshot.time)
    assert cells[0].strip() == "100"
    assert cells[5:] == ("disk  v1", "verified")
    words = consequence(snapshot, points[1])
    assert "go back to 100" in words
    assert "it goes on with new batches" in words
    assert "Loses 50 steps, about 2." in words


def test_the_retune_form_checks_as_it_is_typed(make_run: Make, look: Look) -> None:
    assert command_of({"scale": "", "cap": ""}) == (None, "")
    assert command_of({"growth_factor": "1"}) == (None, "growth_factor must be over 1, not 1")
    command, trouble = command_of({"scale": "1,024", "lr_scale": "0.5", "clip_norm": "off"})
    assert trouble == ""
    assert command == {"name": "set", "scale": 1024.0, "lr_scale": 0.5, "clip_norm": None}
    assert len(settings_for(look(make_run(3)))) == 8


def test_without_a_scaler_only_learning_rate_and_clipping_are_offered(make_run: Make, look: Look) -> None:
    assert [s.name for s in settings_for(look(make_run(3, scaler=False)))] == ["lr_scale", "clip_norm"]


@pytest.mark.parametrize(
    ("equal", "words"), [(True, "digests equal · weights rolled back, data not"), (False, "DIGESTS DIFFER")]
)
def test_a_rollback_is_told_before_and_after(equal: bool, words: str) -> None:
    detail: dict[str, Any] = {
        "to": 2300,
        "before": {"loss": "NaN", "scale": 4096.0, "lr": 3e-4},
        "after": {"loss": 2.04, "scale": 2048.0, "lr": 3e-4},
        "digests_equal": equal,
        "data_rewound": False,
    }
    text, _, _ = applied_words({"name": "rollback"}, "rollback 2,300", {"step": 2380, "detail": detail})
    assert text.startswith("rolled back to 2,300 at step 2,380: loss NaN -> 2.040, scale 2^12 -> 2^11")
    assert words in text


def test_output_goes_on_where_it_was() -> None:
    assert continuation((), ("a", "b")) == ["a", "b"]
    assert continuation(("a", "b"), ("a", "b", "c")) == ["c"]
    assert continuation(("a", "b", "c"), ("c", "d")) == ["d"]
    assert continuation(("a", "b"), ("x", "y")) is None


def test_bars_fill_to_an_eighth() -> None:
    assert lines.plain(bar(0.5, 10, UNICODE)) == "█████░░░░░"
    assert lines.plain(bar(0.0, 4, UNICODE)) == "░░░░"
    assert lines.plain(bar(9.9, 4, UNICODE)) == "████"
    assert lines.plain(bar(0.5, 4, ASCII)) == "##.."


def test_keys_give_way_by_importance() -> None:
    keys = (("space", "pause", "a", 0), ("z", "zoom", "b", 9), ("q", "quit", "c", 0))
    assert [key[0] for key in fitting(keys, 80)] == ["space", "z", "q"]
    assert [key[0] for key in fitting(keys, 22)] == ["space", "q"]


def test_numbers_read_well() -> None:
    assert short_number(1.96412) == "1.964"
    assert short_number(12345.6) == "12,346"
    assert short_number(math.nan) == "NaN"
    assert short_number(-math.inf) == "-inf"
    assert short_number(None) == "unknown"
    assert short_number(3e-4) == "0.0003"
    assert scale_text(4096.0) == "2^12"
    assert scale_text(3000.0) == "2^11.6"
    assert clock_text(42) == "0:42"
    assert left_text(48 * 60) == "0h 48m"
    assert left_text(3 * 86400 + 4 * 3600) == "3d 4h"
    assert step_time_text(0.041) == "41 ms"
    assert rate_text(24.39) == "24.4/s"
    assert rate_text(0.05) == "3.0/min"
    assert bytes_text(798e9) == "798 GB"
    assert bytes_text(None) == "unknown"


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({"LANG": "en_US.UTF-8"}, UNICODE),
        ({"LC_ALL": "C", "LANG": "en_US.UTF-8"}, ASCII),
        ({"LANG": "C", "LC_CTYPE": "C.UTF-8"}, ASCII),
        ({"LC_CTYPE": "C.UTF-8"}, UNICODE),
        ({"LANG": "POSIX"}, ASCII),
        ({}, ASCII),
    ],
)
def test_the_locale_decides_about_braille(environment: dict[str, str], wanted: object) -> None:
    assert choose(environment) is wanted


def test_a_line_is_cut_with_an_ellipsis_and_padded() -> None:
    line: lines.Line = [("abc", "text"), ("defgh", "value")]
    assert lines.plain(lines.fit(line, 6, "…")) == "abcde…"
    assert lines.plain(lines.fit(line, 10)) == "abcdefgh  "
    assert lines.width_of(lines.fit([("日本語", "text")], 4, "…")) == 4
