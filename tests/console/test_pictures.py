"""Pictures of screens, compared with those kept beside this file (pytest --snapshot-update makes them anew)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from synthetic import SyntheticRun
from textual.pilot import Pilot

from fp8console.console.app import ConsoleApp

Make = Callable[..., SyntheticRun]


@pytest.mark.parametrize(("size", "theme"), [((160, 45), "okabe-ito"), ((80, 24), "okabe-ito-light")])
def test_main_screen(make_run: Make, snap_compare: Any, size: tuple[int, int], theme: str) -> None:
    run = make_run(4_210, eventfully=True, gpus=4)
    app = ConsoleApp(run.run_dir, theme=theme, clock=lambda: run.clock + 2.0)

    async def ready(pilot: Pilot[str]) -> None:
        for _ in range(500):
            if app.snapshot is not None:
                break
            await pilot.pause(0.02)
        await pilot.pause(0.1)

    assert snap_compare(app, terminal_size=size, run_before=ready)


@pytest.mark.parametrize(("size", "theme"), [((160, 45), "okabe-ito"), ((80, 24), "okabe-ito-light")])
def test_gpu_screen(make_run: Make, snap_compare: Any, size: tuple[int, int], theme: str) -> None:
    run = make_run(200, machine="mi300x")
    run.sample_back(180)
    run.alerts()
    app = ConsoleApp(run.run_dir, theme=theme, clock=lambda: run.clock + 0.5)

    async def ready(pilot: Pilot[str]) -> None:
        for _ in range(500):
            if app.snapshot is not None:
                break
            await pilot.pause(0.02)
        await pilot.press("g")
        for _ in range(500):
            if app.snapshot is not None and app.snapshot.utilisation is not None:
                break
            await pilot.pause(0.02)
        await pilot.pause(0.3)

    assert snap_compare(app, terminal_size=size, run_before=ready)
