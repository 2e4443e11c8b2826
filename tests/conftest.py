"""Order of the tests: what starts processes or compiles, marked slow, comes after all that is fast."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)  # stable: the files' order stays
