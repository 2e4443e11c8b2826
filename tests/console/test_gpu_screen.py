"""The GPU screen through Textual's Pilot: sizes, keys, the map of utilisation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from synthetic import SyntheticRun
from test_app import screen_text, settled, until

from fp8console.console.app import ConsoleApp

Make = Callable[..., SyntheticRun]


def watched(run: SyntheticRun) -> SyntheticRun:
    """The run on eight MI300X: one hot and behind, one silent; two minutes of samples and the alerts they make."""
    run.machine = "mi300x"
    run.sample_back(120)
    run.alerts()
    return run


@pytest.mark.parametrize("size", [(160, 45), (80, 24), (60, 16), (30, 8), (20, 6)])
async def test_the_gpu_screen_at_every_size(make_run: Make, size: tuple[int, int]) -> None:
    run = watched(make_run(50))
    async with ConsoleApp(run.run_dir, clock=lambda: run.clock + 1).run_test(size=size) as pilot:
        app = await settled(pilot)
        await pilot.press("g")
        await until(pilot, lambda: app.snapshot is not None and app.snapshot.utilisation is not None)
        if size[0] >= 80:
            await until(pilot, lambda: "utilisation, 1 s a column" in screen_text(app))
            text = screen_text(app)
            for index in range(8):
                assert text.count(f"{index} MI300X") == 2, "a row in the table, and one in the map"
            assert "no answer since 1" in text and "heat 3" in text and "balance 0." in text
            assert "step bound by: throttling: GPU 2, heat" in text and "data wait 3.0%" in text
        for key in ("x", "down", "pagedown", "up", "z", "x", "x"):
            await pilot.press(key)
        await pilot.press("escape")
        await until(pilot, lambda: app.snapshot is not None and app.snapshot.utilisation is None)


async def test_the_map_of_64_rows_can_be_seen_whole_in_a_small_terminal(make_run: Make) -> None:
    run = watched(make_run(50))
    async with ConsoleApp(run.run_dir, clock=lambda: run.clock + 1).run_test(size=(80, 24)) as pilot:
        app = await settled(pilot)
        await pilot.press("g")
        await until(pilot, lambda: "7 MI300X    " in screen_text(app))
        assert "XCD 0" not in screen_text(app)
        await pilot.press("x")
        await until(pilot, lambda: "XCD 0" in screen_text(app))
        await pilot.press("x")
        await until(pilot, lambda: "rows 1-8 of 64" in screen_text(app))
        seen = set()
        for _ in range(8):
            seen |= {line.strip() for line in screen_text(app).splitlines() if "XCD" in line}
            await pilot.press("pagedown")
            await pilot.pause()
        assert "rows 57-64 of 64" in screen_text(app) and len(seen) >= 56
        await pilot.press("x")
        await until(pilot, lambda: "XCD" not in screen_text(app))
        for wanted in ("10 s a column", "60 s a column", "the whole run", "1 s a column"):
            await pilot.press("z")
            await until(pilot, lambda wanted=wanted: wanted in screen_text(app))  # type: ignore[misc]


async def test_a_new_sample_is_a_new_column_of_the_map(make_run: Make) -> None:
    run = make_run(50)
    run.machine = "h100"
    run.sample_back(20)
    async with ConsoleApp(run.run_dir, refresh_hz=20, clock=lambda: run.clock).run_test(size=(80, 24)) as pilot:
        app = await settled(pilot)
        await pilot.press("g")

        def columns() -> int:
            found = app.snapshot.utilisation if app.snapshot is not None else None
            return 0 if found is None else found.values.shape[1]

        await until(pilot, lambda: columns() > 0)
        before = columns()
        for _ in range(3):
            run.clock += 1
            run.sample()
        await until(pilot, lambda: columns() == before + 3)


async def test_a_machine_without_gpus_says_why_once(make_run: Make) -> None:
    run = make_run(50)
    run.machine = "none"
    run.sample()
    async with ConsoleApp(run.run_dir, clock=lambda: run.clock).run_test(size=(80, 24)) as pilot:
        app = await settled(pilot)
        await pilot.press("g")
        await until(pilot, lambda: "no AMD GPU in /sys/class/drm" in screen_text(app))
        assert screen_text(app).count("no AMD GPU") == 1 and "step bound by: not known" in screen_text(app)


async def test_the_map_in_plain_ascii_and_sixteen_colours(make_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.setenv("NO_COLOR", "1")
    run = watched(make_run(50))
    async with ConsoleApp(run.run_dir, clock=lambda: run.clock + 1).run_test(size=(160, 45)) as pilot:
        app = await settled(pilot)
        await pilot.press("g")
        await until(pilot, lambda: "@" in screen_text(app))
        assert screen_text(app).isascii() and "?" * 40 in screen_text(app)
