"""For tests of what searches the whole process for modules."""

from __future__ import annotations

import gc

import pytest

from fp8console.probe import state


@pytest.fixture
def only_own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search finds what the test makes, not what other tests in this process have left alive."""
    gc.collect()
    search = state.find_modules
    foreign = [module for ref in search() if (module := ref()) is not None]
    monkeypatch.setattr(
        state, "find_modules", lambda: [ref for ref in search() if not any(ref() is module for module in foreign)]
    )
