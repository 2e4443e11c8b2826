"""Two runs that are to be compared: the same random numbers in both, and evidence that they began and fed alike."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from fp8console.probe import state
from fp8console.probe.digest import digest

#: Steps whose inputs are noted: a different order of the data shows at once.
NOTED_STEPS = 10


def seed_everything(seed: int) -> None:
    """Set the seeds of torch, ``random``, and numpy if it is there; a script that sets its own afterwards wins."""
    torch.manual_seed(seed)
    random.seed(seed)
    seed_numpy(sys.modules.get("numpy"), seed)


def seed_numpy(numpy: ModuleType | None, seed: int) -> None:
    """numpy's global generator, which takes 32 bits; what ``default_rng()`` makes without a seed can't be reached."""
    if numpy is not None and hasattr(numpy, "random"):
        numpy.random.seed(seed % 2**32)


class Sameness:
    """Digests of the weights before the first training forward, and of what the first modules of a step are given.

    Reads values back from the device: for runs that were started to be compared, and there for the first steps only.
    """

    def __init__(self, probe: Any) -> None:
        self._probe = probe
        self._awaited = True  # the forward of the step under way
        self._first = True
        self._handle: Any = None

    def arm(self) -> None:
        """Watch modules' forwards until enough is known."""
        from torch.nn.modules.module import register_module_forward_pre_hook

        self._handle = register_module_forward_pre_hook(self._before)

    def _before(self, module: Any, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._awaited and torch.is_grad_enabled() and self._probe.guard.on("sameness"):
            self._probe.guard.run("sameness", self._note, module, args)

    def _note(self, module: Any, args: Any) -> None:
        if not module.training or not self._probe.observer.live:
            return
        step = self._probe.step + 1
        if self._first:
            self._first = False
            roots = [root for ref in state.find_modules() if (root := ref()) is not None]
            # In the order of their names: a garbage collector's order is its own.
            named = [item for root in roots for item in root.named_parameters()]
            weights = [parameter for _, parameter in sorted(named, key=lambda item: (item[0], tuple(item[1].shape)))]
            self._say(step, "weights", weights)
        given = [item for item in _tensors(args) if item.device.type != "meta"]
        if given:
            self._awaited = False
            self._say(step, "inputs", given)

    def _say(self, step: int, what: str, tensors: Sequence[torch.Tensor]) -> None:
        plain = [tensor for tensor in tensors if not tensor.is_sparse and not hasattr(tensor, "_local_tensor")]
        about = [f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in plain[:4]]
        text = f"{what} at the beginning of step {step}: {', '.join(about)}{', ...' if len(plain) > 4 else ''}"
        self._probe.event("fingerprint", text, step, what=what, digest=digest(plain), about=about)

    def at_boundary(self, step: int) -> None:
        """The next forward begins a new step."""
        self._awaited = step < NOTED_STEPS
        if not self._awaited and self._handle is not None:
            self._handle.remove()
            self._handle = None


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
