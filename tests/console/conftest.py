from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from synthetic import SyntheticRun, eventful

from fp8console.console.snapshot import Reader, Snapshot

#: All made-up runs begin here: 2026-11-30 13:00:00 UTC.
START = 1796043600.0


@pytest.fixture(autouse=True)
def _settled_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setenv("LANG", "C.UTF-8")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("LC_ALL", "LC_CTYPE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    time.tzset()
    yield
    os.environ.pop("TZ", None)
    time.tzset()


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[Callable[..., SyntheticRun]]:
    """Makes a run directory of some steps; keyword arguments are SyntheticRun's."""
    made: list[SyntheticRun] = []

    def make(steps: int = 0, eventfully: bool = False, name: str = "char_gpt-1130", **options: object) -> SyntheticRun:
        options.setdefault("start", START)
        run = SyntheticRun(tmp_path / name, **options)  # type: ignore[arg-type]
        made.append(run)
        if eventfully:
            eventful(run, steps)
        else:
            for _ in range(steps):
                run.take()
        return run

    yield make
    for run in made:
        run.close()


@pytest.fixture
def look() -> Callable[..., Snapshot]:
    """A snapshot of a run, taken two seconds after its last step."""

    def look(run: SyntheticRun, after: float = 2.0) -> Snapshot:
        from fp8console.runs.run import Run

        reader = Reader(run.run_dir, lambda answer: None, clock=lambda: run.clock + after)
        return reader.read(Run(run.run_dir))

    return look


@pytest.fixture
def socket_path() -> Iterator[Path]:
    """A place for a socket, short enough for one."""
    with tempfile.TemporaryDirectory(prefix="fp8") as folder:
        yield Path(folder) / "s.sock"
