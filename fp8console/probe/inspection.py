"""What a training is made of, for ``fp8console doctor train.py``: dtypes, optimizers, scalers, shapes of products.

Watches the forwards of linear layers through a global hook, which would split compiled graphs: for runs that were
started for this alone.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import nn

from fp8console.probe import state
from fp8console.probe.emulate import OTHER_LAYERS
from fp8console.probe.layers import plain_name

#: Steps whose forwards are watched before all is said; the last batch of an epoch may be smaller.
WATCHED_STEPS = 3
#: Different numbers of rows kept of a layer.
MOST_ROWS = 8


class Inspection:
    """Says an "inspected" event at the first backward pass, as the script may fail after it, and one when done."""

    def __init__(self, probe: Any) -> None:
        self._probe = probe
        self._rows: weakref.WeakKeyDictionary[nn.Module, list[int]] = weakref.WeakKeyDictionary()
        self._handle: Any = None
        self._asked: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._said = 0  # 1: at a backward pass, 2: finally

    def arm(self) -> None:
        """Watch forwards, and which scalers are asked to be enabled."""
        from torch.nn.modules.module import register_module_forward_pre_hook

        self._handle = register_module_forward_pre_hook(self._before)
        original = torch.amp.GradScaler.__init__
        asked = self._asked

        @functools.wraps(original)
        def __init__(scaler: Any, *args: Any, **kwargs: Any) -> None:
            original(scaler, *args, **kwargs)
            # GradScaler(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled).
            asked[scaler] = bool(kwargs.get("enabled", args[5] if len(args) > 5 else True))

        torch.amp.GradScaler.__init__ = __init__  # type: ignore

    def _before(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and is_product(module):
            self._probe.guard.run("inspection", self._note, module, args)

    def _note(self, module: nn.Module, args: Any) -> None:
        if args and isinstance(args[0], torch.Tensor) and args[0].dim():
            rows = self._rows.setdefault(module, [])
            many = args[0].numel() // max(1, args[0].shape[-1])
            if many not in rows and len(rows) < MOST_ROWS:
                rows.append(many)

    def at_backward(self) -> None:
        """A backward pass begins."""
        if self._said == 0:
            self._said = 1
            if not self._probe.joined:
                self._probe.join()
            self._say()

    def at_boundary(self, step: int) -> None:
        """A step has ended."""
        if step >= WATCHED_STEPS:
            self.at_end()

    def at_end(self) -> None:
        """Enough is known, or no more will be."""
        if self._said == 1:
            self._said = 2
            if self._handle is not None:
                self._handle.remove()
            self._say()

    def _say(self) -> None:
        observer = self._probe.observer
        modules = [root for ref in state.find_modules() if (root := ref()) is not None]
        optimizers = list(observer.optimizers)
        trained = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        models = [m for m in modules if not trained or any(id(p) in trained for p in m.parameters())]
        facts: dict[str, Any] = {
            "parameters": _dtypes(p for p in _unique(models) if not trained or id(p) in trained),
            "optimizers": [_optimizer(optimizer) for optimizer in optimizers],
            "scalers": [self._scaler(scaler) for scaler in observer.scalers],
            "products": [product for model in models for product in self._products(model)],
            "device": str(next(iter(_unique(models)), torch.empty(0)).device),
        }
        words = ", ".join(f"{count:,} {name}" for name, count in facts["parameters"].items()) or "none"
        text = f"parameters: {words}; {len(facts['products'])} linear layers"
        self._probe.event("inspected", text, self._probe.step or None, final=self._said == 2, **facts)

    def _scaler(self, scaler: Any) -> dict[str, Any]:
        return {
            "class": type(scaler).__name__,
            "device": str(getattr(scaler, "_device", "unknown")),
            "enabled": bool(getattr(scaler, "_enabled", False)),
            "asked": self._asked.get(scaler),
            "used": scaler is self._probe.observer.active_scaler(),
        }

    def _products(self, model: nn.Module) -> list[dict[str, Any]]:
        found = []
        for path, module in model.named_modules():
            if module not in self._rows:
                continue
            inputs, outputs = _features(module)
            name = plain_name(path, model) or type(module).__name__
            found.append({"name": name, "inputs": inputs, "outputs": outputs, "rows": self._rows[module]})
        return found


def is_product(module: nn.Module) -> bool:
    """Whether the module is a linear layer, the kind that FP8 libraries convert."""
    if isinstance(module, nn.Linear):
        return True
    return (type(module).__module__, type(module).__name__) in OTHER_LAYERS and hasattr(module, "weight")


def _features(module: nn.Module) -> tuple[int, int]:
    rows, columns = (int(size) for size in module.weight.shape)  # type: ignore[union-attr]
    # torch's Linear has its weight as (outputs, inputs), the others the other way round.
    return (columns, rows) if isinstance(module, nn.Linear) else (rows, columns)


def _unique(models: list[nn.Module]) -> list[torch.Tensor]:
    return list({id(p): p for model in models for p in model.parameters()}.values())


def _dtypes(parameters: Any) -> dict[str, int]:
    counts: dict[str, int] = {}
    for parameter in parameters:
        name = str(parameter.dtype).removeprefix("torch.")
        counts[name] = counts.get(name, 0) + (0 if nn.parameter.is_lazy(parameter) else parameter.numel())
    return counts


def _optimizer(optimizer: Any) -> dict[str, Any]:
    groups = []
    for group in optimizer.param_groups:
        eps = group.get("eps")
        groups.append(
            {
                "dtypes": sorted(_dtypes(group["params"])),
                "eps": float(eps) if isinstance(eps, (int, float)) else None,
                "fused": bool(group.get("fused")),
            }
        )
    return {"class": type(optimizer).__name__, "groups": groups}
