"""Parts of the probe that can fail alone: the first failure of one switches it off and says why."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

#: What each part does; its name and this text go into the event when it is switched off.
PARTS: dict[str, str] = {
    "loss": "loss",
    "gradients": "gradient norm",
    "scaler": "loss scale",
    "clipping": "clip coefficient",
    "lr": "learning rate",
    "data": "data wait and position in the epoch",
    "boundary": "step boundaries",
    "records": "step records",
    "commands": "commands",
    "snapshots": "snapshots",
    "checkpoints": "checkpoints",
    "baseline": "the tuning baseline",
    "profile": "the profile",
    "emulation": "FP8 emulation",
    "sameness": "fingerprints of weights and inputs",
    "inspection": "the doctor's inspection",
    "layers": "statistics of layers",
    "link": "the link to the supervisor",
}


class Guard:
    """Keeps which parts are on. ``report(part, reason)`` is called once for each that fails."""

    def __init__(self, report: Callable[[str, str], None]) -> None:
        self._report = report
        self.off: dict[str, str] = {}

    def on(self, part: str) -> bool:
        return part not in self.off

    def fail(self, part: str, error: BaseException) -> None:
        """Switch ``part`` off because of ``error``; later failures of it are silent."""
        if part in self.off:
            return
        where = traceback.extract_tb(error.__traceback__)
        place = f" at {where[-1].filename.rsplit('/', 1)[-1]}:{where[-1].lineno}" if where else ""
        self.off[part] = f"{type(error).__name__}: {error}{place}"
        try:
            self._report(part, self.off[part])
        except Exception:
            pass

    def run(self, part: str, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``, or None when ``part`` is off or just failed."""
        if part in self.off:
            return None
        try:
            return function(*args)
        except Exception as error:
            self.fail(part, error)
            return None
