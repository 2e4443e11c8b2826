"""The operator's adaptive clipping (``clip_norm=auto``) of a training that runs, by numerics' rule."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch

from fp8console.numerics.clipping import STATE, WARMUP, Z, taken_in, z_limit

#: Of the first WARMUP norms of an optimizer, how many have to be finite before it is clipped by them.
LEAST_NORMS = 10
#: A finite number, for which torch's clipping does to norms that are not finite what the script's own limit would do.
NO_LIMIT = torch.finfo(torch.float32).max


class AutoClip:
    """Follows the gradient norms of each optimizer, and clips what is abnormal for it. Never waits for a device."""

    def __init__(self, z: float = Z) -> None:
        self.z = z
        self._followed: weakref.WeakKeyDictionary[Any, Followed] = weakref.WeakKeyDictionary()

    def follow(self, optimizer: Any) -> Followed:
        """What is known of this optimizer's norms."""
        if optimizer not in self._followed:
            self._followed[optimizer] = Followed(self)
        return self._followed[optimizer]

    def scripts_limit(self, max_norm: Any) -> Any:
        """What the script's own clipping is to use: its own limit until ours is known, then none."""
        known = [followed.warm for followed in self._followed.values()]
        return NO_LIMIT if known and all(known) else max_norm


class Followed:
    """The norms of one optimizer's gradients: unscaled, before anybody's clipping."""

    def __init__(self, rule: AutoClip) -> None:
        self._rule = rule
        self._taken = 0
        self._state: torch.Tensor | None = None

    @property
    def warm(self) -> bool:
        """Whether enough norms were taken in to clip by them."""
        return self._taken >= WARMUP

    def limit(self, norm: torch.Tensor) -> torch.Tensor:
        """The limit for gradients of this ``norm`` (0-d), inf while warming up; the norm is taken in."""
        wide = norm.detach().to(torch.float32 if norm.device.type == "mps" else torch.float64)
        if self._state is None or self._state.device != wide.device:
            self._state = torch.zeros(len(STATE), dtype=wide.dtype, device=wide.device)
        limit = torch.full_like(wide, math.inf)
        if self.warm:
            limit = z_limit(wide, self._state, self._rule.z, LEAST_NORMS)
        self._state = taken_in(torch.minimum(wide, limit), self._state)
        self._taken += 1
        return limit
