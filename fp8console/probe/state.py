"""The state of a training, as one tree: found, copied to the host, put back in place.

A captured tree is plain data in which each tensor is a ``Slot``, an index into a list of tensors. Putting back copies
into the very tensors and dictionaries that the script holds, so that every reference it has stays right.
"""

from __future__ import annotations

import copy
import gc
import random
import sys
import weakref
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Slot:
    """Where a tensor of the tree is kept, and the device it came from."""

    index: int
    device: str


class PartlyRestored(RuntimeError):
    """Some of the script's own objects refused their state; the rest was put back. The text names them."""


@dataclass
class Roots:
    """What a training's state hangs on. Weak references: the probe keeps nothing alive."""

    modules: list[weakref.ref[torch.nn.Module]]
    optimizers: list[weakref.ref[Any]]
    scalers: list[weakref.ref[Any]]
    schedulers: list[weakref.ref[Any]]
    registered: dict[str, Any]


def find_modules() -> list[weakref.ref[torch.nn.Module]]:
    """The modules that are no other module's child and hold parameters or buffers: one scan of live objects.

    ``issubclass(type(x), ...)`` and not isinstance: lazy proxies answer isinstance by running code.
    """
    modules = [
        item for item in gc.get_objects() if issubclass(type(item), torch.nn.Module) and "_modules" in item.__dict__
    ]
    children = {id(child) for module in modules for child in module._modules.values() if child is not None}
    roots = [module for module in modules if id(module) not in children]
    return [weakref.ref(module) for module in roots if _holds_tensors(module)]


def _holds_tensors(module: torch.nn.Module) -> bool:
    try:
        return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None
    except Exception:
        return False  # one that is half made, or answers only at its own time


def capture(roots: Roots) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """The tree of the state as it is now, and the live tensors its slots refer to (not copied)."""
    tensors: list[torch.Tensor] = []
    # The tensors themselves are kept while capturing: one that state_dict() made would free its id for another.
    seen: dict[int, tuple[Slot, torch.Tensor]] = {}

    def slot(tensor: torch.Tensor) -> Slot:
        if id(tensor) not in seen:
            seen[id(tensor)] = Slot(len(tensors), str(tensor.device)), tensor
            tensors.append(tensor.detach())
        return seen[id(tensor)][0]

    def each(references: list[Any], make: Any) -> list[Any]:
        # A root that is gone keeps its place, so that positions go on meaning the same.
        return [None if (item := ref()) is None else make(item, slot) for ref in references]

    tree = {
        "modules": each(roots.modules, _module_tree),
        "optimizers": each(roots.optimizers, _optimizer_tree),
        "scalers": each(roots.scalers, _scaler_tree),
        "schedulers": each(roots.schedulers, lambda item, slot: _flatten(item.state_dict(), slot)),
        "registered": {name: _flatten(item.state_dict(), slot) for name, item in roots.registered.items()},
        "random": _flatten(_random_state(), slot),
    }
    return tree, tensors


def restore(roots: Roots, tree: dict[str, Any], tensors: list[torch.Tensor]) -> None:
    """Put a captured state back in place; ``tree`` must have been captured with these roots, and fit (``misfit``).

    Raises PartlyRestored when a scheduler or a registered object fails; all else is put back then.
    """
    failures: list[str] = []

    def attempt(what: str, load: Any, saved: Any) -> None:
        try:
            load(_unflatten(saved, tensors))
        except Exception as error:
            failures.append(f"{what} ({type(error).__name__}: {error})")

    with torch.no_grad():
        done: set[int] = set()  # a parameter is in its module and in its optimizer: one copy is enough
        for module, saved in _pairs(roots.modules, tree["modules"]):
            _restore_module(module, saved, tensors, done)
        for optimizer, saved in _pairs(roots.optimizers, tree["optimizers"]):
            _restore_optimizer(optimizer, saved, tensors, done)
        for scaler, saved in _pairs(roots.scalers, tree["scalers"]):
            for name, value in saved.items():
                setattr(scaler, name, _put_back(getattr(scaler, name, None), value, tensors))
        for scheduler, saved in _pairs(roots.schedulers, tree["schedulers"]):
            attempt(type(scheduler).__name__, scheduler.load_state_dict, saved)
        for name, saved in tree["registered"].items():
            if name in roots.registered:
                attempt(f"registered {name!r}", roots.registered[name].load_state_dict, saved)
        attempt("random state", _restore_random, tree["random"])
    if failures:
        raise PartlyRestored("put back all but " + ", ".join(failures))


def misfit(roots: Roots, tree: dict[str, Any], tensors: list[torch.Tensor]) -> str | None:
    """Why the state can't be put into what the roots are now, or None when it can. Looks, changes nothing."""
    for module, saved in _pairs(roots.modules, tree["modules"]):
        parameters = dict(module.named_parameters(remove_duplicate=False))
        buffers = dict(module.named_buffers(remove_duplicate=False))
        for name, slot in saved.items():
            shape = tuple(tensors[slot.index].shape)
            if name in parameters and tuple(parameters[name].shape) != shape:
                return f"{type(module).__name__}.{name} has shape {tuple(parameters[name].shape)} now, {shape} then"
            if name not in parameters and name not in buffers:
                return f"{type(module).__name__} has no {name} now"
    for optimizer, saved in _pairs(roots.optimizers, tree["optimizers"]):
        shapes = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"]]
        then = [tuple(tensors[slot.index].shape) for slot in saved["params"]]
        if shapes[: len(then)] != then or len(optimizer.param_groups) < len(saved["groups"]):
            return f"{type(optimizer).__name__} holds other parameters now"
    return None


def _pairs(references: list[Any], saved: list[Any]) -> list[tuple[Any, Any]]:
    return [(item, state) for ref, state in zip(references, saved) if state is not None and (item := ref()) is not None]


def plain_part(tree: dict[str, Any], like: dict[str, Any] | None = None) -> dict[str, Any]:
    """What of a tree goes into its digest beside the tensors; only what ``like`` (an earlier tree) has, if given."""
    known = (like or tree)["random"]
    part = {key: value for key, value in tree.items() if key != "registered"}
    part["random"] = {key: value for key, value in tree["random"].items() if key in known}
    return part


def common_part(tree: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """``tree`` without what ``other`` may lack: modules that have since gone, random state that was not there yet.

    A module that is trained lives on in its optimizer's parameters; that an optimizer has gone is a difference.
    """
    part = dict(tree)
    part["modules"] = [None if there is None else here for here, there in zip(tree["modules"], other["modules"])]
    part["random"] = {name: value for name, value in tree["random"].items() if name in other["random"]}
    return part


def slots(value: Any) -> list[int]:
    """The indices of a tree's tensors, each once, in the order in which ``capture`` came upon them."""
    found: dict[int, None] = {}
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, Slot):
            found.setdefault(item.index)
        elif isinstance(item, dict):
            pending.extend(reversed(item.values()))
        elif isinstance(item, (list, tuple)):
            pending.extend(reversed(item))
    return list(found)


# -- modules ------------------------------------------------------------------------------------------------------
def _module_tree(module: torch.nn.Module, slot: Any) -> dict[str, Slot]:
    named: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    named.update(module.named_buffers(remove_duplicate=False))
    return {name: slot(tensor) for name, tensor in named.items() if _has_values(tensor)}


def _has_values(tensor: torch.Tensor) -> bool:
    """False for parameters that are not initialised yet, on the meta device, or fake (torch.export)."""
    return not (torch.nn.parameter.is_lazy(tensor) or tensor.is_meta or hasattr(tensor, "fake_mode"))


def _restore_module(
    module: torch.nn.Module, saved: dict[str, Slot], tensors: list[torch.Tensor], done: set[int]
) -> None:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    for name, slot in saved.items():
        if name in parameters:
            _copy_once(parameters[name], slot, tensors, done)
        elif name in buffers and buffers[name].shape == tensors[slot.index].shape:
            _copy_once(buffers[name], slot, tensors, done)
        elif name in buffers:
            # A cache that has grown since, such as rotary angles: the module gets the earlier one back.
            path, _, last = name.rpartition(".")
            earlier = tensors[slot.index].to(buffers[name].device, copy=True)
            module.get_submodule(path)._buffers[last] = earlier


def _copy_once(live: torch.Tensor, slot: Slot, tensors: list[torch.Tensor], done: set[int]) -> None:
    if slot.index not in done:
        _copy_into(live, tensors[slot.index])
        done.add(slot.index)


def _copy_into(live: torch.Tensor, source: torch.Tensor) -> None:
    target = live.detach()
    for dim, (size, stride) in enumerate(zip(target.shape, target.stride())):
        if stride == 0 and size > 1:  # expanded: all along this dimension is one and the same number
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    if target.is_inference():
        with torch.inference_mode():
            target.copy_(source)
    else:
        target.copy_(source)


# -- optimizers ---------------------------------------------------------------------------------------------------
def _optimizer_tree(optimizer: Any, slot: Any) -> dict[str, Any]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    index = {id(parameter): number for number, parameter in enumerate(parameters)}
    return {
        # Parameters that no module holds are state too.
        "params": [slot(parameter) for parameter in parameters],
        "groups": [
            {key: _flatten(value, slot) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ],
        "state": {index[id(key)]: _flatten(value, slot) for key, value in optimizer.state.items() if id(key) in index},
        # Some keep what is common to all parameters under a name.
        "common": {key: _flatten(value, slot) for key, value in optimizer.state.items() if isinstance(key, (str, int))},
    }


def _restore_optimizer(optimizer: Any, saved: dict[str, Any], tensors: list[torch.Tensor], done: set[int]) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter, slot in zip(parameters, saved["params"]):
        _copy_once(parameter, slot, tensors, done)
    for group, values in zip(optimizer.param_groups, saved["groups"]):
        for key, value in values.items():
            group[key] = _put_back(group.get(key), value, tensors)
    for number, parameter in enumerate(parameters):
        if number in saved["state"]:
            optimizer.state[parameter] = _put_back(optimizer.state.get(parameter), saved["state"][number], tensors)
        else:
            optimizer.state.pop(parameter, None)
    common = saved.get("common", {})
    for key in [key for key in optimizer.state if isinstance(key, (str, int)) and key not in common]:
        del optimizer.state[key]
    for key, value in common.items():
        optimizer.state[key] = _put_back(optimizer.state.get(key), value, tensors)


# -- scalers ------------------------------------------------------------------------------------------------------
#: What changes from step to step. The growth settings are the operator's and the script's and stay as they are now.
_SCALER_STATE = ("_scale", "_growth_tracker", "_hysteresis_tracker")


def _scaler_tree(scaler: Any, slot: Any) -> dict[str, Any]:
    names = getattr(scaler, "state_tensors", _SCALER_STATE)
    state = {name: getattr(scaler, name) for name in names if isinstance(getattr(scaler, name, None), torch.Tensor)}
    return {name: slot(value) for name, value in state.items()}


# -- random state -------------------------------------------------------------------------------------------------
def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        # As a dictionary: the older tuple exists for the default generator alone.
        state["numpy"] = _without_arrays(numpy.random.get_state(legacy=False))
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def _without_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_arrays(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def _restore_random(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state_all(state["cuda"])


# -- trees --------------------------------------------------------------------------------------------------------
def _flatten(value: Any, slot: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return slot(value)
    if isinstance(value, dict):
        return _dict_like(value, {key: _flatten(item, slot) for key, item in value.items()})
    if isinstance(value, tuple):
        if all(type(item) in (int, float, str, bool) for item in value):
            return value
        return _tuple_like(value, [_flatten(item, slot) for item in value])
    if isinstance(value, list):
        return [_flatten(item, slot) for item in value]
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return value
    return copy.deepcopy(value)


def _dict_like(value: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """``items`` as a dictionary of the kind of ``value``: a Counter or a defaultdict has methods that a script uses."""
    if type(value) is dict:
        return items
    made = copy.copy(value)
    made.clear()
    made.update(items)
    return made


def _tuple_like(value: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    if hasattr(value, "_fields"):
        return type(value)(*items)
    return tuple(items) if type(value) is tuple else type(value)(items)


def _unflatten(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The saved value with its tensors, each a copy of its own."""
    if isinstance(value, Slot):
        return tensors[value.index].clone()
    if isinstance(value, dict):
        return _dict_like(value, {key: _unflatten(item, tensors) for key, item in value.items()})
    if isinstance(value, tuple):
        return _tuple_like(value, [_unflatten(item, tensors) for item in value])
    if isinstance(value, list):
        return [_unflatten(item, tensors) for item in value]
    return copy.deepcopy(value)


def _put_back(live: Any, saved: Any, tensors: list[torch.Tensor]) -> Any:
    """``saved`` in the place of ``live``: into the same tensor or dictionary where it fits, as a new one elsewhere."""
    if isinstance(saved, Slot):
        source = tensors[saved.index]
        if isinstance(live, torch.Tensor) and live.shape == source.shape and live.dtype == source.dtype:
            _copy_into(live, source)
            return live
        return source.to(live.device if isinstance(live, torch.Tensor) else saved.device, copy=True)
    if isinstance(saved, dict):
        target = live if isinstance(live, dict) else _dict_like(saved, {})
        for key in [key for key in target if key not in saved]:
            del target[key]
        for key, item in saved.items():
            target[key] = _put_back(target.get(key), item, tensors)
        return target
    if isinstance(saved, (list, tuple)):
        old = list(live) if isinstance(live, (list, tuple)) and len(live) == len(saved) else [None] * len(saved)
        new = [_put_back(was, item, tensors) for was, item in zip(old, saved)]
        if isinstance(live, list) and isinstance(saved, list):
            live[:] = new
            return live
        return _tuple_like(saved, new) if isinstance(saved, tuple) else new
    return copy.deepcopy(saved)
