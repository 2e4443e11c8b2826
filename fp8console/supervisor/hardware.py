"""Hardware samples on their way to the file: episodes of trouble become events, the sample says which are under way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fp8console.diagnosis.cards import WINDOW, balance, recent
from fp8console.diagnosis.hardware import HardwareEpisodes
from fp8console.protocol.hardware import dump
from fp8console.protocol.line_file import LineFile


class HardwareWatch:
    """Follows one run's samples; ``event`` writes an event. What fails here is said once and costs no sample."""

    def __init__(self, event: Callable[..., None]) -> None:
        self._event = event
        self._episodes = HardwareEpisodes()
        self._recent: list[dict[str, Any]] = []
        self._failed = False

    def take(self, sample: dict[str, Any], step: int | None) -> None:
        """Adds ``balance`` and ``episodes`` to the sample and writes the events of what began or ended with it."""
        if self._failed:
            return
        try:
            found = self._episodes.take(sample)
            self._recent = recent([*self._recent, sample], WINDOW)
            sample["balance"], sample["episodes"] = balance(self._recent), self._episodes.open
        except Exception as error:  # a record of a form that nobody thought of
            self._failed = True
            reason = f"hardware alerts are off: {type(error).__name__}: {error}"
            self._event("fault", reason, part="hardware alerts", reason=reason)
            return
        for fields in found:
            self._event(fields.pop("kind"), fields.pop("text"), step, **fields)


class HardwareFile:
    """The run's samples, appended a line each. A full disk costs samples and nothing else: each one is tried."""

    def __init__(self, path: Path) -> None:
        self._lines = LineFile(path)

    def write(self, sample: dict[str, Any]) -> None:
        """Raises nothing."""
        try:
            self._lines.append(dump(sample).encode())
        except (OSError, TypeError, ValueError):
            return

    def close(self) -> None:
        self._lines.close()
