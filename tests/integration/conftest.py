"""Runs that a test started end with it, whatever happened."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import running

from fp8console.protocol import identity, paths


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[running.Run]]:
    """A list for runs that were launched detached: their processes are killed, by identity, after the test."""
    runs: list[running.Run] = []
    yield runs
    for run in runs:
        info = run.info()
        for name, group in (("training", True), ("supervisor", False)):
            who = identity.ProcessIdentity.from_json(info.get(name))
            if who is not None:
                identity.send_signal(who, signal.SIGKILL, group=group)
        # What a killed supervisor can't clear away itself.
        for left in (paths.socket_path(run.run_dir), *(paths.spool_file(run.run_dir, rank) for rank in range(4))):
            left.unlink(missing_ok=True)
