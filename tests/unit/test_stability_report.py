"""The tables of bench/stability.py: figures of several runs as one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(scope="module")
def report() -> Any:
    sys.path.insert(0, str(BENCH))
    try:
        return pytest.importorskip("stability_report", reason="no bench folder here")
    finally:
        sys.path.remove(str(BENCH))


def test_runs_without_a_failure_count_for_the_steps_between_failures(report: Any) -> None:
    # 238 clean steps with two failures, 239 with one, 240 without any: 717 clean steps to 3 failures.
    assert report.between_failures([238, 239, 240], [119.0, 239.0, None]) == pytest.approx(239.0)
    assert report.between_failures([240, 240], [None, None]) is None
