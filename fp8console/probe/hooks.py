"""Where the probe hears of a training: torch functions wrapped in place, the same way for every script.

Each wrapper calls the original with the caller's own arguments, whatever happens in ours. Forward hooks are not used:
global ones split compiled graphs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from fp8console.numerics.clipping import GradClipper


class Patches:
    """Replaced attributes, so that all can be put back, or wrapped again once torch._dynamo is there."""

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, Any]] = []
        self._traceable: set[tuple[Any, str]] = set()
        self.handles: list[Any] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any], traceable: bool = False) -> None:
        """Put ``make(original)`` in the place of ``owner.name``.

        torch.compile stops at the wrapper, unless it is ``traceable``: then it steps aside while being traced, so that
        a graph which held the original whole still does.
        """
        original = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
        wrapped = functools.wraps(original)(make(original))
        if "torch._dynamo" in sys.modules and not traceable:
            wrapped = _outside_graphs(wrapped)
        setattr(owner, name, wrapped)
        self._done.append((owner, name, original, wrapped))
        if traceable:
            self._traceable.add((owner, name))

    def hide_from_dynamo(self, _module: Any = None) -> None:
        """Keep torch.compile from tracing into our wrappers: called right after torch._dynamo's import."""
        for index, (owner, name, original, wrapped) in enumerate(self._done):
            if (owner, name) in self._traceable or getattr(wrapped, "_torchdynamo_disable", False):
                continue
            hidden = _outside_graphs(wrapped)
            if getattr(owner, name, None) is wrapped or (
                isinstance(owner, type) and owner.__dict__.get(name) is wrapped
            ):
                setattr(owner, name, hidden)
            self._done[index] = (owner, name, original, hidden)

    def undo(self) -> None:
        """Put the originals back, where nobody has wrapped ours since."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        for owner, name, original, wrapped in reversed(self._done):
            if getattr(owner, name, None) is wrapped:
                setattr(owner, name, original)
        self._done.clear()


def _outside_graphs(function: Callable[..., Any]) -> Any:
    disable = getattr(sys.modules["torch._dynamo"], "disable", None)
    return function if disable is None else disable(function)


def install(probe: Any, patches: Patches) -> None:
    """Hook torch for ``probe`` (an Observer, see observer.py)."""
    from torch.optim import lr_scheduler, optimizer
    from torch.utils.data import dataloader

    patches.replace(torch.autograd, "backward", lambda original: _backward(probe, original))
    for owner in (torch.nn.utils.clip_grad, torch.nn.utils):
        if hasattr(owner, "clip_grad_norm_"):
            patches.replace(owner, "clip_grad_norm_", lambda original: _clip(probe, original), traceable=True)
        if hasattr(owner, "clip_grad_value_"):
            patches.replace(owner, "clip_grad_value_", lambda original: _clip_value(probe, original), traceable=True)
        if hasattr(owner, "clip_grads_with_norm_"):  # torch 2.6 and later
            patches.replace(
                owner, "clip_grads_with_norm_", lambda original: _clip_with_norm(probe, original), traceable=True
            )
    for whose in (torch.nn.Module, optimizer.Optimizer):
        patches.replace(whose, "zero_grad", lambda original: _before(probe.before_zero_grad, original), traceable=True)
    # The last three have an __init__ of their own that does not call LRScheduler's.
    for name in ("LRScheduler", "ReduceLROnPlateau", "SequentialLR", "ChainedScheduler"):
        scheduler = getattr(lr_scheduler, name)
        patches.replace(scheduler, "__init__", lambda original: _after(probe.scheduler_made, original))
    patches.replace(optimizer.Optimizer, "__init__", lambda original: _after(probe.optimizer_made, original))
    iterator = dataloader._BaseDataLoaderIter
    patches.replace(iterator, "__init__", lambda original: _after(probe.data.iterator_made, original))
    patches.replace(iterator, "_reset", lambda original: _after(probe.data.iterator_reset, original))
    patches.replace(iterator, "__next__", lambda original: _next(probe.data, original))
    scaler = torch.amp.GradScaler
    patches.replace(scaler, "__init__", lambda original: _after(probe.scaler_made, original))
    hook_scaler_class(probe, patches, scaler)
    patches.replace(GradClipper, "clip_", lambda original: _clipper_clip(probe, original), traceable=True)
    patches.replace(GradClipper, "step", lambda original: _clipper_step(probe, original))
    hooks = _OptimizerHooks(probe)
    patches.handles.append(optimizer.register_optimizer_step_pre_hook(hooks.before))
    patches.handles.append(optimizer.register_optimizer_step_post_hook(hooks.after))


def hook_scaler_class(probe: Any, patches: Patches, scaler_class: type) -> None:
    """Hook the methods that ``scaler_class`` itself defines; for subclasses (ShardedGradScaler) when one is made."""
    for name, make in (("scale", _scale), ("unscale_", _unscale), ("step", _scaler_step), ("update", _scaler_update)):
        if name in scaler_class.__dict__:
            patches.replace(scaler_class, name, functools.partial(make, probe))


class _OptimizerHooks:
    # A compiled optimizer step is left alone: a disabled hook in it would break a graph that was whole.
    def __init__(self, probe: Any) -> None:
        self._probe = probe

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return None
        return self._probe.before_optimizer_step(optimizer, args, kwargs)  # other arguments to use, or None

    def after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._probe.after_optimizer_step(optimizer)


def _backward(probe: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def backward(*args: Any, **kwargs: Any) -> Any:
        # Reentrant checkpointing calls backward inside backward: only the outermost is the script's.
        gradients = args[1] if len(args) > 1 else kwargs.get("grad_tensors")
        if not probe.enter_backward(args[0] if args else kwargs.get("tensors"), gradients):
            return original(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            probe.leave_backward()

    return backward


def _clip(probe: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def clip_grad_norm_(parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(parameters, max_norm, *args, **kwargs)
        if not isinstance(parameters, torch.Tensor):
            parameters = list(parameters)  # may be a generator, which is read once
        norm_type = args[0] if args else kwargs.get("norm_type", 2.0)
        used = probe.clipping.limit(parameters, max_norm, norm_type)
        measured = probe.clipping.before(parameters, norm_type)
        total = original(parameters, used, *args, **kwargs)
        probe.clipping.after(parameters, used, total, measured, used is not max_norm)
        return total

    return clip_grad_norm_


def _clip_value(probe: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def clip_grad_value_(parameters: Any, *args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            original(parameters, *args, **kwargs)
            return
        if not isinstance(parameters, torch.Tensor):
            parameters = list(parameters)
        probe.clipping.before(parameters, None)
        original(parameters, *args, **kwargs)

    return clip_grad_value_


def _clip_with_norm(probe: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def clip_grads_with_norm_(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            original(parameters, max_norm, total_norm, *args, **kwargs)
            return
        if not isinstance(parameters, torch.Tensor):
            parameters = list(parameters)
        used = probe.clipping.limit(parameters, max_norm, 2.0)
        probe.clipping.before(parameters, None)
        original(parameters, used, total_norm, *args, **kwargs)
        probe.clipping.after(parameters, used, total_norm, True, used is not max_norm)

    return clip_grads_with_norm_


def _clipper_clip(probe: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def clip_(self: Any, scale: Any = None) -> Any:
        if torch.compiler.is_compiling():
            return original(self, scale)
        measured = [probe.clipping.before(group.parameters, 2.0) for group in self.groups]
        total = original(self, scale)
        probe.clipping.clipper_clipped(self, scale, measured)
        return total

    return clip_


def _clipper_step(probe: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        probe.clipping.before_clipper_step(self)
        result = original(self, optimizer, *args, **kwargs)
        if self.skipped:
            probe.step_refused(optimizer)
        return result

    return step


def _scale(probe: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def scale(self: Any, outputs: Any) -> Any:
        probe.before_scale(self)
        scaled = original(self, outputs)
        probe.loss_scaled(self, outputs, scaled)
        return scaled

    return scale


def _unscale(probe: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def unscale_(self: Any, optimizer: Any) -> Any:
        probe.before_unscale(self, optimizer)
        return original(self, optimizer)

    return unscale_


def _scaler_step(probe: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        entered = probe.before_scaler_step(self, optimizer)
        try:
            return original(self, optimizer, *args, **kwargs)
        finally:
            if entered:
                probe.after_scaler_step(self, optimizer)

    return step


def _scaler_update(probe: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        entered = probe.before_scaler_update(self)
        try:
            result = original(self, *args, **kwargs)
        finally:
            if entered:
                probe.leave_scaler_update()
        if entered:
            probe.after_scaler_update(self)
        return result

    return update


def _next(data: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def __next__(self: Any) -> Any:
        started = data.batch_asked()
        batch = original(self)
        data.batch_given(self, started)
        return batch

    return __next__


def _before(note: Callable[[Any], None], original: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            note(self)
        return original(self, *args, **kwargs)

    return method


def _after(note: Callable[..., None], original: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        note(self, args)
        return result

    return method
