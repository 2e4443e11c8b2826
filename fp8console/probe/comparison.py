"""What a run does that ``check`` started to compare it with another, or ``doctor`` to look at it; others do not."""

from __future__ import annotations

from typing import Any

from fp8console.probe.importing import AfterImport
from fp8console.protocol.settings import Settings


class Comparison:
    """Seeds, evidence of sameness, FP8 in the layers, full precision, and an early end, each where a setting asks."""

    def __init__(self, probe: Any, settings: Settings) -> None:
        self._probe = probe
        self._settings = settings
        self.inspection: Any = None
        self._parts: list[tuple[str, Any]] = []  # guarded part, and what has arm() and at_boundary(step)

    def begin(self) -> None:
        """Right after torch's import. The numerics are imported here, and only where they are needed."""
        settings, probe = self._settings, self._probe
        if settings.seed is not None:
            from fp8console.probe.sameness import Sameness, seed_everything, seed_numpy

            seed = settings.seed
            seed_everything(seed)
            AfterImport({"numpy": lambda numpy: seed_numpy(numpy, seed)}).arm()
            self._parts.append(("sameness", Sameness(probe)))
        if settings.emulate is not None:
            from fp8console.probe.emulate import Emulation

            spared = tuple(filter(None, (settings.emulate_except or "").split(",")))
            self._parts.append(("emulation", Emulation(probe, settings.emulate, settings.emulate_scaling, spared)))
        if settings.inspect:
            from fp8console.probe.inspection import Inspection

            self.inspection = Inspection(probe)
            self._parts.append(("inspection", self.inspection))
        for part, what in self._parts:
            probe.guard.run(part, what.arm)

    def at_backward(self) -> None:
        """A backward pass begins."""
        if self.inspection is not None:
            self._probe.guard.run("inspection", self.inspection.at_backward)

    def at_end(self) -> None:
        """The process ends."""
        if self.inspection is not None:
            self._probe.guard.run("inspection", self.inspection.at_end)

    def at_boundary(self, step: int) -> bool:
        """At the end of each step; whether the training is to end here."""
        for part, what in self._parts:
            self._probe.guard.run(part, what.at_boundary, step)
        return step == self._settings.stop_after


def wanted(settings: Settings) -> bool:
    """Whether any of this was asked for."""
    return settings.inspect or any(v is not None for v in (settings.seed, settings.emulate, settings.stop_after))
