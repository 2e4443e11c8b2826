"""The learning rate that steps are taken with: the script's, times the operator's factor, or a fixed one."""

from __future__ import annotations

from typing import Any

import torch


class LearningRate:
    """Puts another learning rate in place for the length of an optimizer's step, and the script's back after it."""

    def __init__(self) -> None:
        self.factor = 1.0
        self.fixed: float | None = None  # takes the place of the script's
        self.saved: list[tuple[Any, Any, Any]] = []  # (group, script's value, ours) while a step runs

    @property
    def changes(self) -> bool:
        """Whether a step needs ``apply``."""
        return self.factor != 1.0 or self.fixed is not None or bool(self.saved)

    def told(self, lr: Any) -> Any:
        """What to record for a group that shows ``lr``: it is ours already while a step runs."""
        if self.saved:
            return lr
        return lr * self.factor if self.fixed is None else self.fixed

    def apply(self, optimizer: Any) -> None:
        """Before a step of ``optimizer``."""
        self.restore()
        if self.factor == 1.0 and self.fixed is None:
            return
        for group in optimizer.param_groups:
            if group.get("lr") is not None:
                ours = self._ours(group["lr"])
                self.saved.append((group, group["lr"], ours))
                group["lr"] = ours

    def _ours(self, scripts: Any) -> Any:
        if self.fixed is None:
            return scripts * self.factor
        # An optimizer that was made with a tensor for its learning rate goes on having one.
        return torch.full_like(scripts, self.fixed) if isinstance(scripts, torch.Tensor) else float(self.fixed)

    def restore(self) -> None:
        """After the step: the script's value, unless the script has set another meanwhile."""
        for group, scripts, ours in self.saved:
            if group.get("lr") is ours:
                group["lr"] = scripts
        self.saved.clear()
