"""The FP8 gradient scaler for sharded trainings (FSDP): all ranks refuse a step or none does."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from fp8console.numerics.formats import Fp8Format
from fp8console.numerics.scaler import Fp8GradScaler


class Fp8ShardedGradScaler(Fp8GradScaler, ShardedGradScaler):
    """Fp8GradScaler over the shards of ``process_group`` (default: all ranks), fused optimizers included.

    torch's ShardedGradScaler agrees on found_inf in ``unscale_`` alone. A fused optimizer that was not unscaled checks
    its own shard: one rank skips, the other steps, and their scales part. Here such a step unscales first. Raises as
    Fp8GradScaler.
    """

    def __init__(
        self,
        device: str = "cuda",
        preset: str = "headroom",
        *,
        fmt: Fp8Format | str | torch.dtype = "e5m2",
        enabled: bool = True,
        process_group: Any = "default",
        **settings: Any,
    ) -> None:
        super().__init__(device, preset, fmt=fmt, enabled=enabled, process_group=process_group, **settings)
        # None is torch's name for the group of all ranks.
        self.process_group = None if process_group == "default" else process_group

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale and agree over the ranks whether any of them is not finite."""
        super().unscale_(optimizer)
        if self._enabled:
            state = self._per_optimizer_states[id(optimizer)]
            # A sum over ranks, of shape (1,): fused optimizers take it as a 0-d count of 0 or 1.
            state["found_inf_per_device"] = {
                device: found_inf.clamp(max=1.0).reshape(())
                for device, found_inf in state["found_inf_per_device"].items()
            }

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale if that was not done yet, then step unless some rank found inf or NaN."""
        fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        if self._enabled and fused and self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            self.unscale_(optimizer)
        result: float | None = super().step(optimizer, *args, **kwargs)
        return result
