"""Which modules of a training are its layers, what they are called, and what stands for each."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fp8console.protocol.records import LAYER_KINDS


@dataclass
class Layer:
    """A module that holds parameters of its own. ``weights``: those that stand for it, by name."""

    index: int
    module: weakref.ref[torch.nn.Module]
    weights: tuple[str, ...]


def find_layers(roots: Iterable[torch.nn.Module], trained: Collection[int]) -> list[tuple[str, torch.nn.Module]]:
    """The modules with parameters of their own, and their names, of the models that hold a trained parameter.

    ``trained``: ids of the optimizers' parameters; empty when there is no optimizer, then all models count.
    """
    chosen = [root for root in roots if not trained or any(id(p) in trained for p in root.parameters())]
    found: dict[int, tuple[str, torch.nn.Module]] = {}
    names: set[str] = set()
    for root in chosen:
        for name, module in root.named_modules():
            # A scripted module runs its children without Python, and takes no hooks.
            if id(module) in found or isinstance(module, torch.jit.ScriptModule):
                continue
            if all(p is None for p in module._parameters.values()):
                continue
            name = plain_name(name, root)
            if len(chosen) > 1 or not name:
                owner = type(bare(root)).__name__
                name = f"{owner}.{name}" if name else owner
            unique, copies = name, 2
            while unique in names:
                unique, copies = f"{name}#{copies}", copies + 1
            names.add(unique)
            found[id(module)] = unique, module
    return list(found.values())


def describe(name: str, module: torch.nn.Module) -> dict[str, Any]:
    """A layer's entry in layers.json. ``shape`` is that of the first of its ``weights``; ``parameters`` counts all."""
    own = {key: p for key, p in module._parameters.items() if p is not None}
    weights = standing_for(own)
    return {
        "name": name,
        "type": type(module).__name__,
        "shape": _shape(own[weights[0]]),
        "parameters": sum(math.prod(_shape(p)) for p in own.values()),
        "kinds": list(LAYER_KINDS[:2] if compiling() else LAYER_KINDS),
        "weights": list(weights),
    }


def compiling() -> bool:
    """Whether the script uses torch.compile: then no hook of ours may come near a module, for it would compile anew."""
    dynamo, counts = (sys.modules.get(f"torch._dynamo.{name}") for name in ("eval_frame", "utils"))
    if any(map(callable, getattr(dynamo, "cached_backends", {}).values())):
        return True
    counters = getattr(counts, "counters", None)
    return counters is not None and bool(counters["frames"])


def first_tensor(output: Any) -> torch.Tensor | None:
    """The first floating-point tensor of what a module returned; None when there is none."""
    if isinstance(output, torch.Tensor):
        return output if output.is_floating_point() else None
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, (tuple, list)):
        for item in output:
            if (found := first_tensor(item)) is not None:
                return found
    return None


def standing_for(parameters: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Which of a module's own parameters its statistics are of: the matrices, else the largest."""
    matrices = tuple(name for name, p in parameters.items() if len(_shape(p)) > 1)
    return matrices or (max(parameters, key=lambda name: math.prod(_shape(parameters[name]))),)


_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def plain_name(name: str, root: torch.nn.Module) -> str:
    """A module's name without what wrappers (DDP, FSDP, torch.compile) put into it."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    if parts and parts[0] == "module" and _is_parallel(root):
        parts = parts[1:]
    return ".".join(parts)


def bare(root: torch.nn.Module) -> torch.nn.Module:
    """The module inside its wrappers."""
    inner = getattr(root, "_orig_mod", None) or (root._modules.get("module") if _is_parallel(root) else None)
    return bare(inner) if isinstance(inner, torch.nn.Module) else root


def _is_parallel(root: torch.nn.Module) -> bool:
    return type(root).__name__ in ("DistributedDataParallel", "DataParallel")


def _shape(parameter: torch.Tensor) -> list[int]:
    # One that is not initialised yet has none.
    return [0] if torch.nn.parameter.is_lazy(parameter) else list(parameter.shape)
