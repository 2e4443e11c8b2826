from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
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
from fp8console.console.widgets import events, gpu_table, gpus, heat_map, host, stability
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
from fp8console.runs.utilisation import History

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
    assert "unknown (no answer since 15 s)" in body[3]


def test_more_gpus_than_rows_are_told_by_number(make_run: Make, look: Look) -> None:
    run = make_run(10, gpus=8)
    run.sample()
    body = texts(gpus.rows(look(run).status.hardware, 0.6, 40, UNICODE, 3))
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


def hardware(run: SyntheticRun, machine: str, seconds: int = 60) -> None:
    """A minute of samples of a machine, and the alerts that the supervisor makes of them."""
    run.machine = machine
    run.hardware.truncate(0)
    run.sample_back(seconds)
    run.alerts()


def test_many_gpus_share_lines_where_there_are_few(make_run: Make, look: Look) -> None:
    run = make_run(10)
    hardware(run, "mi300x")
    body = texts(gpus.rows(look(run).status.hardware, 0.5, 77, UNICODE, 3))
    assert len(body) == 3 and all(len(line) <= 77 for line in body)
    for index in range(8):
        line = body[index // 3]
        assert f" {index} " in line
    assert "? since 14 s" in body[1] and "112G 98° 391W" in body[0]
    assert len(texts(gpus.rows(look(run).status.hardware, 0.5, 30, UNICODE, 3))) == 3, "no room for that: as before"


def test_balance_and_what_bounds_the_step(make_run: Make, look: Look) -> None:
    run = make_run(10)
    assert lines.plain(gpus.summary_spans(look(run))) == "bound by: not known"
    hardware(run, "mi300x")
    snapshot = look(run, after=1.0)
    text = lines.plain(gpus.summary_spans(snapshot))
    assert text.startswith("balance 0.") and "bound by: throttling: GPU 2, heat 3" in text
    assert text.endswith("; imbalance")
    assert lines.plain(gpus.bound_spans(snapshot)).startswith("step bound by: throttling: GPU 2, heat 3")
    assert look(run, after=60.0).status.balance is None, "samples of a minute ago say nothing of now"


def test_hardware_trouble_is_an_alert_until_it_is_over(make_run: Make, look: Look) -> None:
    run = make_run(10)
    hardware(run, "mi300x")
    snapshot = look(run)
    assert snapshot.alerts == 1 and [alert["gpus"] for alert in snapshot.status.hardware_alerts] == [[2]]
    evidence = snapshot.status.hardware_alerts[0]["evidence"][0]
    assert evidence["gpu"] == 2 and evidence["temperature_c"] == 98.0 and 0.2 < evidence["share"] < 0.5
    shown = [lines.plain(events.row(event, UNICODE)) for event in events.newest(snapshot.events)]
    assert any("! GPU 2 is throttled by heat" in row for row in shown)
    run.event("recovered", "GPU 2: over", supervisor=True, episode=1, of="throttling_thermal", gpus=[2])
    assert look(run).status.hardware_alerts == []


@pytest.mark.parametrize("machine", ["mi300x", "h100", "none"])
@pytest.mark.parametrize("width", [156, 76, 40, 10])
def test_the_table_of_gpus_fits(make_run: Make, look: Look, machine: str, width: int) -> None:
    run = make_run(3)
    hardware(run, machine, 12)
    body = texts(gpu_table.table(look(run).status.hardware, 0.2, width, UNICODE, width > 100))
    assert len(body) == {"mi300x": 8, "h100": 2, "none": 1}[machine] + int(width > 100 and machine != "none")
    if width >= 76 and machine != "none":
        assert all(len(row) <= width for row in body)
    if machine == "mi300x" and width == 156:
        for words in (
            "held back",
            "XCDs",
            "ECC un/corr",
            "heat 3",
            "1,410 MHz",
            "391/750 W",
            "98/71°",
            "0/1",
            "cuda:7",
        ):
            assert words in "\n".join(body), words
        assert "no answer since 14 s" in body[6] and "%" not in body[6]
    if machine == "h100":
        assert "XCDs" not in body[0] and "xgmi" not in body[0], "what no card tells has no column"
        if width == 156:
            assert "66/?°" in body[1] and "x8 32 GT/s" in body[1]


def test_cells_of_the_map_tell_unknown_from_idle_and_from_nothing() -> None:
    assert heat_map.cell(0.0, UNICODE) == ("▁", "heat-0")
    assert heat_map.cell(100.0, UNICODE) == ("█", "heat-4")
    assert heat_map.cell(math.nan, UNICODE) == ("?", "faint")
    assert heat_map.cell(None, UNICODE) == (" ", "text")
    marks = [heat_map.cell(percent, ASCII)[0] for percent in range(0, 101, 10)]
    assert marks == sorted(marks, key=ASCII.heat.index) and marks[0] == "." and marks[-1] == "@"
    assert len({heat_map.cell(percent, UNICODE) for percent in range(101)}) >= 8


def test_the_map_unfolds_one_card_or_all(make_run: Make, look: Look) -> None:
    run = make_run(3)
    hardware(run, "mi300x", 100)
    found = History(run.run_dir / "hardware.jsonl", 1.0, 58).look()
    # The dead card has told nothing of XCDs, so it has no rows for them.
    assert [len(heat_map.shown(found, how, found.rows[0].card)) for how in heat_map.UNFOLDED] == [8, 16, 64]
    panel = heat_map.HeatMap()
    panel.glyphs = ASCII
    snapshot = replace(look(run), utilisation=found)
    body = texts(panel.draw(snapshot, 80, 9))
    assert len(body) == 9 and {len(row) for row in body} == {80}
    assert "?" * 50 in body[6] and "0 MI300X" in body[1] and body[0].startswith("+ utilisation, 1 s a column")
    panel.unfolded = "all"
    body = texts(panel.draw(snapshot, 80, 9))
    assert "rows 1-8 of 64" in body[0] and "XCD 6" in body[8]
    panel.top = 1000
    body = texts(panel.draw(snapshot, 80, 9))
    assert "rows 57-64 of 64" in body[0] and "XCD 7" in body[8]
    for width, height in ((4, 2), (10, 3), (1, 1)):
        assert len(panel.draw(snapshot, width, height)) <= height


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


def test_the_retune_form_shows_limits_as_powers_and_the_other_refill(make_run: Make, look: Look) -> None:
    run = make_run(3)
    assert {s.name: s.note(look(run)) for s in settings_for(look(run))}["floor"] == "least scale, or off"
    run.event("scaler", "scaler", refill="on_growth", margin=3.0, floor=512.0, cap=999999.0)
    offered = {setting.name: setting for setting in settings_for(look(run))}
    assert [offered[name].now(look(run)) for name in ("floor", "cap", "refill")] == ["2^9", "999,999", "on_growth"]
    assert offered["refill"].note(look(run)) == "or every_clean_step"
    assert offered["floor"].note(look(run)) == "least scale", "this scaler never goes without"


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


def clauses(snapshot: Snapshot) -> str:
    figures = snapshot.status.stability
    shown = [*stability.failure_clauses(figures), *stability.step_clauses(figures)]
    return "; ".join(lines.plain(clause) for clause in shown)


def test_stability_in_words(make_run: Make, look: Look) -> None:
    run = make_run()
    assert clauses(look(run)) == (
        "between failures unknown; longest unknown; recovered unknown; skips unknown; loss jitter unknown; "
        "clipped unknown"
    ), "before the first step nothing is known, and nothing is 0"
    for _ in range(60):
        run.take(loss=2.0, norm=0.5)
    assert clauses(look(run)) == (
        "no failure in 60 steps; longest 60; recovered no need; skips 0/1,000; loss jitter 0%; clipped 0%, lately 0%"
    )
    run.take(loss=2.0, skipped=True)
    for norm in (0.5, 2.0) * 10:
        run.take(loss=2.0, norm=norm)
    # 80 sound steps, one failure, 10 of the 80 whose clipping is known were clipped.
    assert clauses(look(run)) == (
        "between failures 80 steps; longest 60; recovered 1 of 1; skips 12.3/1,000; loss jitter 0%; "
        "clipped 12%, lately 12%"
    )


@pytest.mark.parametrize(("width", "compact"), [(69, False), (80, True), (40, False), (30, True), (5, True)])
def test_the_stability_panel_fits_whole_clauses(make_run: Make, look: Look, width: int, compact: bool) -> None:
    panel = stability.Stability()
    panel.compact = compact
    drawn = panel.draw(look(make_run(4_210, eventfully=True)), width, 2 if compact else 3)
    assert len(drawn) == (2 if compact else 3)
    assert {lines.width_of(line) for line in drawn} == {width}
    text = "\n".join(texts(drawn))
    if width >= 69:
        for word in ("between failures", "longest", "recovered 3 of 3", "skips", "loss jitter", "clipped"):
            assert word in text, word
    assert width < 20 or "…" not in text


def test_clipping_too_often_is_an_alert(make_run: Make, look: Look) -> None:
    run = make_run(10)
    run.event("clipping", "clipped 30 of the last 100 steps", step=10, count=30, window=100, limit=1.0)
    snapshot = look(run)
    assert snapshot.alerts == 1 and [event["kind"] for event in snapshot.incidents] == ["clipping"]
    shown = [lines.plain(events.row(event, UNICODE)) for event in events.newest(snapshot.events)]
    assert shown[0].startswith("10        ! clipped 30 of the last 100 steps")


def test_adaptive_clipping_in_the_retune_form(make_run: Make, look: Look) -> None:
    run = make_run(3, scaler=False)
    run.event("settings", "settings", lr_scale=1.0, clip_norm="auto", clip_z=2.5, floor=None, cap=None)
    offered = {setting.name: setting.now(look(run)) for setting in settings_for(look(run))}
    assert offered == {"lr_scale": "1.000", "clip_norm": "auto", "clip_z": "2.500"}
    assert command_of({"clip_norm": "auto"}) == ({"name": "set", "clip_norm": "auto"}, "")
    run.event("settings", "settings", lr_scale=1.0, clip_norm=None, clip_z=None, floor=None, cap=None)
    assert [setting.name for setting in settings_for(look(run))] == ["lr_scale", "clip_norm"]
