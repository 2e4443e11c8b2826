"""What the plots draw, as text."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from synthetic import SyntheticRun

from fp8console.console import lines
from fp8console.console.glyphs import ASCII, UNICODE, Glyphs
from fp8console.console.snapshot import Snapshot
from fp8console.console.widgets.axes import fit
from fp8console.console.widgets.plot import LOSS, NORM, SCALE, Plot, Role, Series, View

Make = Callable[..., SyntheticRun]
Look = Callable[..., Snapshot]


ALL, WHOLE = View(), Role()


def text(
    snapshot: Snapshot,
    series: Series = LOSS,
    width: int = 80,
    height: int = 16,
    glyphs: Glyphs = UNICODE,
    view: View = ALL,
    role: Role = WHOLE,
) -> list[str]:
    plot = Plot(series, role, glyphs=glyphs)
    plot.view = view
    drawn = plot.draw(snapshot, width, height)
    assert len(drawn) == height
    assert all(lines.width_of(line) == width for line in drawn)
    return [lines.plain(line) for line in drawn]


def test_the_value_and_its_trend_stand_in_the_title(make_run: Make, look: Look) -> None:
    run = make_run()
    for step in range(200):
        run.take(loss=4 - step / 100)
    assert text(look(run))[0].startswith("┌ loss ─")
    assert text(look(run))[0].endswith("─ 2.010 ▼ ┐")


def test_nan_is_marked_and_named_in_the_title(make_run: Make, look: Look) -> None:
    run = make_run(50)
    for _ in range(50):
        run.take(loss=math.nan)
    drawn = text(look(run))
    assert "NaN since step 51" in drawn[0]
    assert sum(row.count("!") for row in drawn[1:-1]) > 10
    braille = [max((x for x, c in enumerate(row) if 0x2800 <= ord(c) < 0x2900), default=0) for row in drawn]
    assert max(braille) < 60, "nothing is drawn where there was nothing finite"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_run_of_only_non_finite_losses(make_run: Make, look: Look, value: float) -> None:
    run = make_run()
    for _ in range(100):
        run.take(loss=value, norm=value)
    for series in (LOSS, NORM, SCALE):
        text(look(run), series)
    assert "!" in "".join(text(look(run))[1:-1])


@pytest.mark.parametrize("value", [0.0, 1e-300, 1e300, -5.0, 1.0])
def test_constant_curves_of_any_size(make_run: Make, look: Look, value: float) -> None:
    run = make_run()
    for _ in range(64):
        run.take(loss=value, norm=abs(value))
    for series in (LOSS, NORM):
        drawn = text(look(run), series)
        assert any(0x2800 < ord(c) < 0x2900 for row in drawn for c in row)


def test_the_gradient_norm_gets_decades_where_the_range_asks(make_run: Make, look: Look) -> None:
    run = make_run()
    for step in range(100):
        run.take(norm=0.01 * 10 ** (step / 20))
    drawn = text(look(run), NORM)
    assert any("1e3" in row for row in drawn)
    assert any("1e-2" in row for row in drawn)


def test_the_loss_scale_is_in_powers_of_two(make_run: Make, look: Look) -> None:
    run = make_run(20)
    run.take(skipped=True)
    for _ in range(20):
        run.take()
    drawn = text(look(run), SCALE)
    assert drawn[0].endswith("2^14 ▼ ┐")
    assert any("2^16" in row for row in drawn)
    assert any("×" in row for row in drawn[1:-1])


def test_without_a_scaler_the_third_plot_shows_step_time_and_says_why(make_run: Make, look: Look) -> None:
    drawn = text(look(make_run(50, scaler=False)), SCALE, width=100)
    assert drawn[0].startswith("┌ step time · no loss scale: this run has no enabled GradScaler")
    assert " ms" in drawn[0]


def test_a_rollback_is_marked_and_what_it_abandoned_is_dimmed(make_run: Make, look: Look) -> None:
    run = make_run(600)
    run.point(disk=True)
    for _ in range(200):
        run.take()
    run.roll_back(600)
    for _ in range(200):
        run.take()
    plot = Plot(LOSS)
    drawn = plot.draw(look(run), 120, 16)
    rug = next(row for row in map(lines.plain, drawn[1:-1]) if "◆" in row)
    assert "◆┄┄┄┄┄┄" in rug
    assert "┄◂" in rug
    assert any(role == "abandoned" and text.strip() for line in drawn[1:11] for text, role in line)


def test_the_time_cursor_shows_the_values_of_its_step(make_run: Make, look: Look) -> None:
    run = make_run(100)
    run.take(loss=7.25)
    for _ in range(99):
        run.take()
    drawn = text(look(run), view=View(cursor=100))
    assert drawn[0].endswith("at step 101: 7.250 ┐")
    beside = text(look(run), view=View(cursor=130))
    assert sum("│" in row[10:-1] for row in beside) > 5


def test_zoom_shows_the_newest_steps(make_run: Make, look: Look) -> None:
    drawn = text(look(make_run(5_000)), view=View(share=0.1), height=16)
    assert "last 10% of steps" in drawn[0]
    assert " 4,600 " in drawn[-2]


def test_steps_that_go_on_after_a_restart_keep_their_numbers(make_run: Make, look: Look) -> None:
    run = make_run(100)
    run.step = 5_000
    for _ in range(100):
        run.take()
    assert "5,100" in text(look(run))[-2]


def test_an_empty_plot_says_why(make_run: Make, look: Look) -> None:
    plot = Plot(LOSS)
    plot.empty = ("no step yet after 0:09", "the script has not imported torch so far")
    drawn = [lines.plain(line) for line in plot.draw(look(make_run()), 100, 16)]
    assert any("no step yet after 0:09" in row for row in drawn)


def test_ascii_draws_in_ascii(make_run: Make, look: Look) -> None:
    drawn = text(look(make_run(400, eventfully=True)), glyphs=ASCII)
    assert all(row.isascii() for row in drawn)
    assert sum(row.count("|") + row.count("'") + row.count(".") for row in drawn[1:-2]) > 60


def test_other_plots_leave_their_values_in_the_title(make_run: Make, look: Look) -> None:
    drawn = text(look(make_run(100)), role=Role(others=(NORM, SCALE)))
    assert "gradient norm " in drawn[0]
    assert "loss scale 2^15" in drawn[0]


@pytest.mark.parametrize("size", [(4, 1), (10, 2), (20, 3), (21, 4), (30, 30), (300, 5)])
def test_any_size_is_drawn(make_run: Make, look: Look, size: tuple[int, int]) -> None:
    snapshot = look(make_run(300, eventfully=True))
    for series in (LOSS, NORM, SCALE):
        text(snapshot, series, *size)


@pytest.mark.parametrize(
    ("low", "high", "kind"),
    [(1.9, 4.2, "linear"), (0.01, 90.0, "log10"), (-3.0, 400.0, "linear"), (0.0, 0.0, "linear")],
)
def test_axes_hold_their_values(low: float, high: float, kind: str) -> None:
    axis = fit(low, high)
    assert axis is not None
    assert axis.kind == kind
    labels = axis.labels(12)
    assert len(set(labels.values())) == len(labels)


def test_an_axis_for_nothing_is_none() -> None:
    assert fit(None, None) is None
    assert fit(math.nan, math.nan) is None
