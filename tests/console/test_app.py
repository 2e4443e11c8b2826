"""The app through Textual's Pilot: sizes, keys, dialogs, commands, troubles."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from synthetic import SyntheticRun
from synthetic_supervisor import supervisor_at
from textual.pilot import Pilot
from textual.widgets import DataTable, Input, OptionList, Static

from fp8console.console.app import ConsoleApp, SnapshotReady
from fp8console.console.screens.quit import QuitScreen
from fp8console.console.screens.retune import RetuneScreen
from fp8console.console.screens.rollback import RollBackScreen
from fp8console.console.snapshot import Snapshot
from fp8console.console.widgets.headline import Headline
from fp8console.console.widgets.panel import Panel
from fp8console.console.widgets.plot import Plot

Make = Callable[..., SyntheticRun]


async def until(pilot: Pilot[str], true: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for something to become true on the screen."""
    for _ in range(int(seconds / 0.02)):
        if true():
            await pilot.pause()
            return
        await pilot.pause(0.02)
    raise AssertionError(f"did not happen within {seconds:g} s")


async def settled(pilot: Pilot[str]) -> ConsoleApp:
    app = pilot.app
    assert isinstance(app, ConsoleApp)
    await until(pilot, lambda: app.snapshot is not None)
    await pilot.pause()
    return app


def screen_text(app: ConsoleApp) -> str:
    """All panels of the current screen as text, line after line."""
    return "\n".join(
        "".join(segment.text for segment in panel.render_line(y))
        for panel in app.screen.query(Panel)
        if panel.display
        for y in range(panel.size.height)
    )


def second_line(app: ConsoleApp) -> str:
    return "".join(segment.text for segment in app.screen.query_one(Headline).render_line(1)).strip()


@pytest.mark.parametrize("size", [(160, 45), (80, 24), (60, 16), (112, 20), (100, 60), (240, 70), (40, 12), (20, 6)])
async def test_every_size_and_a_change_of_it(make_run: Make, size: tuple[int, int]) -> None:
    run = make_run(500, eventfully=True, gpus=4)
    async with ConsoleApp(run.run_dir).run_test(size=size) as pilot:
        app = await settled(pilot)
        if size[0] >= 60:
            assert "running" in screen_text(app)
            assert "step 500" in screen_text(app)
        await pilot.resize_terminal(160, 45)
        await pilot.pause()
        await until(pilot, lambda: "gradient norm (before clip)" in screen_text(app))
        await pilot.resize_terminal(*size)
        await pilot.pause()


async def test_one_plot_at_a_time_where_it_is_narrow(make_run: Make) -> None:
    run = make_run(300)
    async with ConsoleApp(run.run_dir).run_test(size=(80, 24)) as pilot:
        app = await settled(pilot)

        def shown() -> list[str | None]:
            return [plot.id for plot in app.screen.query(Plot) if plot.display]

        assert shown() == ["loss"]
        await pilot.press("3")
        assert shown() == ["scale"]
        await pilot.press("2")
        assert shown() == ["norm"]
        assert "loss scale 2^15" in screen_text(app)


async def test_one_plot_alone_and_back_where_it_is_wide(make_run: Make) -> None:
    run = make_run(300)
    async with ConsoleApp(run.run_dir).run_test(size=(160, 45)) as pilot:
        app = await settled(pilot)
        await pilot.press("2")
        assert [plot.id for plot in app.screen.query(Plot) if plot.display] == ["norm"]
        await pilot.press("2")
        assert len([plot for plot in app.screen.query(Plot) if plot.display]) == 3


async def test_zoom_and_time_cursor(make_run: Make) -> None:
    run = make_run(3_000)
    async with ConsoleApp(run.run_dir).run_test(size=(160, 45)) as pilot:
        app = await settled(pilot)
        await pilot.press("z")
        assert "last 10% of steps" in screen_text(app)
        await pilot.press("left", "left", "shift+left")
        await pilot.pause()
        assert "at step 2," in screen_text(app)
        await pilot.press("escape", "z", "z")
        await pilot.pause()
        assert "at step" not in screen_text(app)
        assert "last 1" not in screen_text(app)


async def test_what_is_new_is_shown_and_only_that_is_repainted(make_run: Make) -> None:
    run = make_run(2_000)
    async with ConsoleApp(run.run_dir, refresh_hz=20).run_test(size=(160, 45)) as pilot:
        app = await settled(pilot)
        marked: list[int] = []
        for panel in app.screen.query(Panel):
            before = panel.refresh

            def refresh(*regions: Any, before: Any = before, panel: Panel = panel, **options: Any) -> Panel:
                marked.append(sum(region.height for region in regions) or panel.size.height)
                before(*regions, **options)
                return panel

            panel.refresh = refresh  # type: ignore[method-assign,assignment]
        run.take(loss=1.9)
        await until(pilot, lambda: "step 2,001" in screen_text(app))
        assert 0 < sum(marked) < 40, "of 135 lines of panels"


async def test_a_loss_that_turns_nan_alarms(make_run: Make) -> None:
    run = make_run(811)
    async with ConsoleApp(run.run_dir, refresh_hz=20).run_test(size=(160, 45)) as pilot:
        app = await settled(pilot)
        run.take(loss=math.nan)
        await until(pilot, lambda: "NaN since step 812" in screen_text(app))
        assert "loss not finite since step 812" in second_line(app)


async def test_the_end_stays_on_the_screen_with_the_output_in_place_of_events(make_run: Make) -> None:
    run = make_run(100)
    async with ConsoleApp(run.run_dir, refresh_hz=20).run_test(size=(80, 24)) as pilot:
        app = await settled(pilot)
        run.say("Traceback (most recent call last):")
        run.say("RuntimeError: the sky fell")
        run.end(1, "RuntimeError: the sky fell")
        await until(pilot, lambda: "✗ failed, exit 1: RuntimeError: the sky fell" in screen_text(app))
        assert "Traceback (most recent call last):" in screen_text(app)
        assert not app.screen.query_one("#events").display
        await pilot.press("q")
    assert app.return_value == "ended"


async def test_asked_then_applied_then_quiet(make_run: Make, socket_path: Path) -> None:
    run = make_run(4_210)
    run.info["socket"] = str(socket_path)
    run.write_info()
    async with supervisor_at(socket_path) as supervisor, ConsoleApp(run.run_dir).run_test(size=(160, 45)) as pilot:
        app = await settled(pilot)
        supervisor.go.clear()
        await pilot.press("space")
        await until(pilot, lambda: second_line(app) == "… asked: pause")
        await pilot.press("plus", "c")
        supervisor.go.set()
        await until(pilot, lambda: "✓ applied at step 4,211: " in second_line(app))
        await until(pilot, lambda: len(supervisor.commands) == 3)
        assert {"name": "pause"} in supervisor.commands
        assert {"name": "set", "scale": "x2"} in supervisor.commands


async def test_refused_with_the_reason(make_run: Make, socket_path: Path) -> None:
    run = make_run(100)
    run.info["socket"] = str(socket_path)
    run.write_info()
    async with supervisor_at(socket_path) as supervisor, ConsoleApp(run.run_dir).run_test(size=(160, 45)) as pilot:
        app = await settled(pilot)
        supervisor.refusal = "the training is not paused"
        await pilot.press("n")
        await until(pilot, lambda: "✗ not applied: step 1: the training is not paused" in second_line(app))


async def test_no_supervisor_is_one_clear_line(make_run: Make) -> None:
    run = make_run(100)
    async with ConsoleApp(run.run_dir).run_test(size=(160, 45)) as pilot:
        app = await settled(pilot)
        await pilot.press("c")
        await until(pilot, lambda: "not applied: checkpoint: no supervisor answers" in second_line(app))


async def test_roll_back(make_run: Make, socket_path: Path) -> None:
    run = make_run(4_000)
    run.point(disk=True)
    for _ in range(100):
        run.take()
    run.point()
    for _ in range(110):
        run.take()
    run.info["socket"] = str(socket_path)
    run.write_info()
    async with supervisor_at(socket_path) as supervisor, ConsoleApp(run.run_dir).run_test(size=(160, 45)) as pilot:
        app = await settled(pilot)
        await pilot.press("r")
        await until(pilot, lambda: isinstance(app.screen, RollBackScreen))
        assert app.screen.query_one(DataTable).row_count == 2
        words = app.screen.query_one("#consequence", Static)
        assert "Loses 110 steps" in str(words.render())
        await pilot.press("down")
        assert "Loses 210 steps" in str(words.render())
        await pilot.press("tab", "0", ".", "5", "tab", "0")
        assert "scale must be over 0" in str(app.screen.query_one("#trouble", Static).render())
        await pilot.press("enter")
        assert isinstance(app.screen, RollBackScreen), "a bad value changes nothing"
        await pilot.press("backspace", "1", "0", "2", "4", "enter")
        await until(pilot, lambda: bool(supervisor.commands))
        assert supervisor.commands == [{"name": "rollback", "to": 4_000, "lr_scale": 0.5, "scale": 1024.0}]


async def test_roll_back_without_restore_points(make_run: Make) -> None:
    run = make_run(10)
    async with ConsoleApp(run.run_dir).run_test(size=(80, 24)) as pilot:
        app = await settled(pilot)
        await pilot.press("r")
        await until(pilot, lambda: isinstance(app.screen, RollBackScreen))
        assert "there is no restore point yet" in str(app.screen.query_one("#trouble", Static).render())
        await pilot.press("enter", "escape")
        assert not isinstance(app.screen, RollBackScreen)


async def test_retune(make_run: Make, socket_path: Path) -> None:
    run = make_run(100)
    run.info["socket"] = str(socket_path)
    run.write_info()
    async with supervisor_at(socket_path) as supervisor, ConsoleApp(run.run_dir).run_test(size=(80, 24)) as pilot:
        app = await settled(pilot)
        await pilot.press("t")
        await until(pilot, lambda: isinstance(app.screen, RetuneScreen))
        app.screen.query_one("#growth_factor", Input).focus()
        await pilot.press("1")
        trouble = app.screen.query_one("#trouble", Static)
        assert str(trouble.render()) == "growth_factor must be over 1, not 1"
        await pilot.press("enter")
        assert isinstance(app.screen, RetuneScreen)
        await pilot.press("backspace", "1", ".", "3", "enter")
        await until(pilot, lambda: supervisor.commands == [{"name": "set", "growth_factor": 1.3}])


@pytest.mark.parametrize(
    ("keys", "left", "given"),
    [
        (["d"], "detached", []),
        (["q", "enter"], "detached", []),
        (["q", "down", "enter"], "stopped", ["stop"]),
        (["q", "down", "down", "enter"], "killed", ["kill"]),
    ],
)
async def test_leaving(make_run: Make, socket_path: Path, keys: list[str], left: str, given: list[str]) -> None:
    run = make_run(100)
    run.info["socket"] = str(socket_path)
    run.write_info()
    async with supervisor_at(socket_path) as supervisor:
        app = ConsoleApp(run.run_dir)
        async with app.run_test(size=(160, 45)) as pilot:
            await settled(pilot)
            for key in keys:
                await pilot.press(key)
                if key == "q":
                    await until(pilot, lambda: isinstance(app.screen, QuitScreen))
                    assert app.screen.query_one(OptionList).highlighted == 0
            for _ in range(200):
                if app._exit:
                    break
                await pilot.pause(0.02)
        assert app.return_value == left
        assert [command["name"] for command in supervisor.commands] == given


async def test_a_stop_that_is_refused_keeps_the_console(make_run: Make, socket_path: Path) -> None:
    run = make_run(100)
    run.info["socket"] = str(socket_path)
    run.write_info()
    async with supervisor_at(socket_path) as supervisor, ConsoleApp(run.run_dir).run_test(size=(160, 45)) as pilot:
        app = await settled(pilot)
        supervisor.refusal = "a rank is restarting"
        await pilot.press("q", "down", "enter")
        await until(pilot, lambda: "a rank is restarting" in second_line(app))
        assert app.return_value is None


async def test_screens_open_and_close(make_run: Make) -> None:
    run = make_run(300, eventfully=True, gpus=2)
    run.say("hello from the training")
    async with ConsoleApp(run.run_dir).run_test(size=(100, 30)) as pilot:
        app = await settled(pilot)
        for key, name in (
            ("o", "OutputScreen"),
            ("g", "GpusScreen"),
            ("a", "AlertsScreen"),
            ("question_mark", "HelpScreen"),
        ):
            await pilot.press(key)
            await until(pilot, lambda name=name: type(app.screen).__name__ == name)  # type: ignore[misc]
            assert "running" in screen_text(app), "the first line stands on every screen"
            await pilot.press("escape")
            assert type(app.screen).__name__ == "MainScreen"
        await pilot.press("o", "g")
        await until(pilot, lambda: type(app.screen).__name__ == "GpusScreen")
        assert len(app.screen_stack) == 2
        await pilot.press("g")
        assert len(app.screen_stack) == 1


async def test_every_key_is_in_the_command_palette(make_run: Make) -> None:
    run = make_run(30)
    async with ConsoleApp(run.run_dir).run_test(size=(100, 30)) as pilot:
        app = await settled(pilot)
        commands = [command.title for command in app.get_system_commands(app.screen)]
        for word in ("Pause", "Checkpoint", "Roll back", "Retune", "Detach", "Gradient norm", "Zoom", "Theme", "Help"):
            assert any(title.startswith(word) for title in commands), word
        await pilot.press("ctrl+p")
        await pilot.pause(0.3)
        await pilot.press("escape")


async def test_a_run_directory_that_is_not_there(tmp_path: Path) -> None:
    async with ConsoleApp(tmp_path / "gone").run_test(size=(100, 30)) as pilot:
        app = await settled(pilot)
        assert "lost" in screen_text(app)
        await pilot.press("left", "z", "1", "r", "escape", "t", "escape", "space", "o", "escape", "q")
    assert app.return_value == "ended"


async def test_reading_that_fails_is_said_and_nothing_stops(make_run: Make, look: Callable[..., Snapshot]) -> None:
    run = make_run(30)
    async with ConsoleApp(run.run_dir, refresh_hz=0.5).run_test(size=(100, 30)) as pilot:
        app = await settled(pilot)
        app.post_message(SnapshotReady(OSError(5, "Input/output error")))
        await until(pilot, lambda: "Input/output error" in second_line(app))
        app.post_message(SnapshotReady(look(run)))
        await pilot.pause()
        await pilot.press("z")


async def test_hostile_text_from_a_run_does_no_harm(make_run: Make) -> None:
    run = make_run(30)
    run.event("notice", "[bold]\x1b]0;gotcha\x07[/nonsense] \u202e", part="probe")
    run.say("[red]not markup[/] \x1b[2J\x1b[31mred")
    run.end(1, "ValueError: [/] \x1b[2J")
    async with ConsoleApp(run.run_dir).run_test(size=(100, 30)) as pilot:
        app = await settled(pilot)
        assert "\x1b" not in screen_text(app)
        await pilot.press("o")
        await pilot.pause(0.2)
        await pilot.press("escape", "a")
        await pilot.pause(0.2)


async def test_an_unknown_theme_is_said_and_the_default_taken(make_run: Make) -> None:
    run = make_run(30)
    app = ConsoleApp(run.run_dir, theme="mauve")
    assert app.theme == "okabe-ito"
    async with app.run_test(size=(100, 30)) as pilot:
        await settled(pilot)


async def test_a_change_of_theme_changes_every_panel(make_run: Make) -> None:
    run = make_run(300, eventfully=True)
    async with ConsoleApp(run.run_dir, refresh_hz=0.5).run_test(size=(160, 45)) as pilot:
        app = await settled(pilot)

        def colours() -> list[set[object]]:
            return [{s.style.bgcolor for s in panel.render_line(0) if s.style} for panel in app.screen.query(Panel)]

        before = colours()
        app.theme = "okabe-ito-light"
        await pilot.pause(0.2)
        assert all(not (old & new) for old, new in zip(before, colours()))


async def test_no_color(make_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    run = make_run(300, eventfully=True)
    app = ConsoleApp(run.run_dir)
    assert app.native_ansi_color
    async with app.run_test(size=(100, 30)) as pilot:
        await settled(pilot)
        assert "×" in screen_text(app)


def test_nothing_heavy_before_the_first_paint() -> None:
    code = (
        "import sys, fp8console.console.app; "
        "print([name for name in ('numpy', 'torch', 'psutil', 'plotext', 'textual.widgets._data_table', "
        "'textual.widgets._log') if name in sys.modules])"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "[]"
