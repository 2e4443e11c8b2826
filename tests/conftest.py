"""For all tests: threads, and the order in which they run."""

from __future__ import annotations

import os

import pytest

# Two workers run tests side by side, most of them with trainings: more threads each would only get in their way.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts processes or compiles, marked slow, comes after all that is fast."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)  # stable: the files' order stays
