"""What the hooks tell, gathered into the window of the step under way. One per process; runs on the training thread."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from fp8console.probe import norms
from fp8console.probe.clipping import MOST_READINGS, Clipping
from fp8console.probe.cycle import StepCycle
from fp8console.probe.guard import Guard
from fp8console.probe.learning_rate import LearningRate
from fp8console.probe.position import DataPosition
from fp8console.probe.readback import Reading, take
from fp8console.probe.scaled_loss import ScaledLosses
from fp8console.probe.window import Norm, StepWindow, parameter_ids

#: Backward passes without a step after which zero_grad is taken for the boundary although an optimizer exists.
ZERO_GRAD_PATIENCE = 8
#: Micro-batches whose losses are kept apart; later ones are counted but the mean is over the first ones.
MOST_LOSSES = 256


class Observer:
    """Receives the hooks' calls; calls ``at_boundary()`` at the end of each step, ``notice(text, part)`` for news."""

    def __init__(self, guard: Guard, at_boundary: Callable[[], None], notice: Callable[[str, str], None]) -> None:
        self.guard = guard
        self.window = StepWindow()
        self.at_once = True  # False: take CPU values the way a device's are taken
        self.careful = 0  # steps for which norms are taken in float64
        self.live = True  # False in a forked child that trains nothing
        self.lr = LearningRate()
        self.clipping = Clipping(self)
        self.scalers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.schedulers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.scaler: weakref.ref[Any] | None = None  # the enabled scaler in use
        self.explicit = False  # the script says itself where a step ends (run.step)
        self.backwards_without_step = 0
        self.on_scaler_class: Callable[[type], None] = lambda scaler_class: None
        self.on_backward: Callable[[int], None] = lambda without_step: None
        self.on_scale: Callable[[Any], None] | None = None
        self.on_update: Callable[[], None] | None = None
        self.sample: Any = None  # the LayerSampling that is told of gradients, in the steps that it samples
        self.data = DataPosition(guard)
        self._at_boundary = at_boundary
        self._notice = notice
        self._noticed: set[str] = set()
        self._cycle = StepCycle()
        self._backward_depth = 0
        self._scaler_depth = 0
        self._update_depth = 0
        self._stepped_in_backward = False
        self._stepping: list[Any] = []  # optimizers whose step() is running, outermost first
        self._inner_done = False
        self._scaled = ScaledLosses()
        self._backwards = 0  # in this process
        self._evaluated = False  # the closure of the step under way has run backward
        self._since_update: set[int] = set()  # optimizers that stepped since the last scaler update, by id
        self._by_hand: weakref.ref[Any] | None = None  # whose zero_grad ends a step, where no optimizer's step is seen

    # -- backward -------------------------------------------------------------------------------------------------
    def enter_backward(self, tensors: Any, gradients: Any = None) -> bool:
        """True when this is the script's own (outermost) backward; ``leave_backward`` must follow then."""
        if not self.live or self._backward_depth or _capturing():
            return False
        self._backward_depth = 1
        if self._stepping and not any(with_closure for _, with_closure in self._stepping):
            self._stepping.clear()  # left by a step() that raised: without a closure none runs backward
        self._backwards += 1
        self.guard.run("loss", self._note_loss, tensors, gradients)
        return True

    def leave_backward(self) -> None:
        self._backward_depth = 0
        if self._stepped_in_backward:
            self._stepped_in_backward = False
            self._finish_step()

    def _note_loss(self, tensors: Any, gradients: Any) -> None:
        window = self.window
        if self._stepping and self._evaluated:
            # A closure runs backward once per evaluation: the first loss is the step's, a line search's mean is not.
            return
        self._evaluated = bool(self._stepping)
        window.micro_batches += 1
        self.backwards_without_step += 1
        self.on_backward(self.backwards_without_step)
        self.data.backward_begins()
        found = self._scaled.backpropagated(tensors, gradients)
        if found is None or len(window.losses) >= MOST_LOSSES:
            return
        loss, carries_scale = found
        scaler = self.active_scaler() if carries_scale else None
        scale = None if scaler is None else self._scale_now(scaler)
        window.losses.append((take(loss, self.at_once), scale))

    # -- scaler ---------------------------------------------------------------------------------------------------
    def scaler_made(self, scaler: Any, _args: Any) -> None:
        self.guard.run("scaler", self._scaler_made, scaler)

    def _scaler_made(self, scaler: Any) -> None:
        self.scalers.add(scaler)
        self.on_scaler_class(type(scaler))

    def active_scaler(self) -> Any | None:
        return self.scaler() if self.scaler is not None else None

    def before_scale(self, scaler: Any) -> None:
        """``scaler`` is about to scale a loss, with the scale it has then."""
        if self.on_scale is not None and self.live:
            self.guard.run("scaler", self.on_scale, scaler)

    def loss_scaled(self, scaler: Any, outputs: Any, scaled: Any) -> None:
        if self.live:
            self.guard.run("scaler", self._loss_scaled, scaler, outputs, scaled)

    def _loss_scaled(self, scaler: Any, outputs: Any, scaled: Any) -> None:
        if not scaler._enabled:
            self._once("scaler_off", "the script's GradScaler is disabled: no loss scaling takes place", "scaler")
            return
        self._use(scaler)
        self._scaled.note(outputs, scaled)

    def _use(self, scaler: Any) -> None:
        if self.active_scaler() is not scaler:
            self.scaler = weakref.ref(scaler)
            self.scalers.add(scaler)  # one that was copied or unpickled had no __init__ to be seen

    def _scale_now(self, scaler: Any) -> Reading | None:
        return None if scaler._scale is None else take(scaler._scale, self.at_once)

    def before_unscale(self, scaler: Any, optimizer: Any) -> None:
        if self.live and not self._scaler_depth:
            if self.sample is not None and getattr(scaler, "_enabled", False):
                self._sample_gradients(optimizer, True)
            self.window.unscaled = True

    def before_scaler_step(self, scaler: Any, optimizer: Any) -> bool:
        if not self.live or self._scaler_depth or not getattr(scaler, "_enabled", False) or _capturing():
            return False
        self._scaler_depth = 1
        self.guard.run("scaler", self._note_scaler_step, scaler, optimizer)
        return True

    def _note_scaler_step(self, scaler: Any, optimizer: Any) -> None:
        window = self.window
        self._use(scaler)
        window.scaler_used = True
        # A second scaler, or a second update in one iteration, has a scale of its own.
        scale = self._scale_now(scaler)
        if window.scale is None:
            window.scale = scale
        # A refused step never reaches the optimizer's own hooks, so the norm is taken here; gradients carry the scale
        # until unscale_ (stage UNSCALED) has run for this optimizer.
        stage = scaler._per_optimizer_states[id(optimizer)]["stage"]
        scaled = getattr(stage, "name", "READY") == "READY"
        window.optimizers.append(optimizer)
        self._since_update.add(id(optimizer))
        if any(clip.scale is not None for clip in window.clips):
            self._once("scaled_clip", SCALED_CLIP, "clipping")
        if self.sample is not None:
            self._sample_gradients(optimizer, scaled)
        self.guard.run("gradients", self._note_norm, optimizer, scale if scaled else None)
        self.guard.run("lr", self._note_lr, optimizer)

    def after_scaler_step(self, scaler: Any, optimizer: Any) -> None:
        self._scaler_depth = 0
        self.guard.run("scaler", self._note_found_inf, scaler, optimizer)

    def _note_found_inf(self, scaler: Any, optimizer: Any) -> None:
        state = scaler._per_optimizer_states[id(optimizer)]
        self.window.found_inf += [take(value, self.at_once) for value in state["found_inf_per_device"].values()]

    def before_scaler_update(self, scaler: Any) -> bool:
        if not self.live or self._update_depth or not getattr(scaler, "_enabled", False):
            return False
        self._update_depth = 1
        return True

    def leave_scaler_update(self) -> None:
        self._update_depth = 0

    def after_scaler_update(self, scaler: Any) -> None:
        window = self.window
        if not self._since_update:
            return
        window.unscaled = False
        if scaler._growth_tracker is not None:
            window.growth_tracker = self.guard.run("scaler", take, scaler._growth_tracker, self.at_once)
        key, self._since_update = frozenset(self._since_update), set()
        self._update_ended(key)

    # -- clipping -------------------------------------------------------------------------------------------------
    def step_refused(self, optimizer: Any) -> None:
        """It was refused: the attempt ends here, without the optimizer's hooks."""
        if not self.live or _capturing():
            return
        self.guard.run("gradients", self._note_norm, optimizer, None)
        self.guard.run("lr", self._note_lr, optimizer)
        self.window.optimizers.append(optimizer)
        self._update_ended(frozenset((id(optimizer),)))

    def scale_of(self, ids: frozenset[int]) -> Reading | None:
        scaler = self.active_scaler() if self.gradients_are_scaled(ids) else None
        return None if scaler is None else self._scale_now(scaler)

    def gradients_are_scaled(self, ids: frozenset[int]) -> bool:
        """Whether these gradients still carry the loss scale: unscale_ works for one optimizer at a time."""
        scaler = self.active_scaler()
        if not self._scaled.any or scaler is None:
            return False
        if not self.window.unscaled:
            return True
        for optimizer in self.optimizers:
            if any(id(p) in ids for group in optimizer.param_groups for p in group["params"]):
                state = scaler._per_optimizer_states.get(id(optimizer))
                if state is None or getattr(state["stage"], "name", "READY") == "READY":
                    return True
        return False

    # -- gradient norm and learning rate --------------------------------------------------------------------------
    def _note_norm(self, optimizer: Any, scale: Reading | None) -> None:
        window = self.window
        covered: frozenset[int] = frozenset()
        if any(norm.parameters for norm in window.norms):
            own = parameter_ids(p for group in optimizer.param_groups for p in group["params"])
            covered = window.use_norms(own, id(optimizer), unscaled=not self._scaler_depth)
        for outer, _ in self._stepping[:-1]:  # a wrapper's step, which has measured them
            covered |= parameter_ids(p for group in outer.param_groups for p in group["params"])
        grads = norms.gradients(optimizer, covered)
        if not grads:
            return
        parts = norms.l2(grads, self.at_once, careful=self.careful > 0)
        if parts:
            window.norms.append(Norm(parts, scale))
        else:
            window.norm_unknown = True

    def _note_lr(self, optimizer: Any) -> None:
        lr = optimizer.param_groups[0].get("lr")
        if isinstance(lr, torch.Tensor):
            lr = take(lr, self.at_once)
        if lr is not None:
            self.window.lr = self.lr.told(lr)

    # -- optimizer ------------------------------------------------------------------------------------------------
    def optimizer_made(self, optimizer: Any, _args: Any) -> None:
        self.guard.run("boundary", self.optimizers.add, optimizer)

    def before_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if not self.live or _capturing():
            return None
        if self.on_update is not None:
            self.on_update()
        for index, (running, _) in enumerate(self._stepping):
            if running is optimizer:
                del self._stepping[index:]  # its last step() raised
                break
        if not self._stepping:
            self._evaluated = False
        self._stepping.append((optimizer, _closure(args, kwargs) is not None))
        self._inner_done = False
        if not self._scaler_depth:
            if self.sample is not None and not self._stepping[-1][1]:
                self._sample_gradients(optimizer, False)
            if not self._stepping[-1][1] and len(self.window.norms) < MOST_READINGS:
                self.guard.run("gradients", self._note_norm, optimizer, None)
            self.guard.run("lr", self._note_lr, optimizer)
        if self.clipping.norm is not None and not self._stepping[-1][1]:
            self.guard.run("clipping", self.clipping.clip, optimizer, False)
        if self.lr.changes:
            self.guard.run("lr", self.lr.apply, optimizer)
        if self.clipping.norm is None or not self._stepping[-1][1] or len(self._stepping) > 1:
            return None
        evaluate = _closure(args, kwargs)

        def clipped() -> Any:
            result = evaluate()
            if self.clipping.norm is not None:
                self.guard.run("clipping", self.clipping.clip, optimizer, True)
            return result

        if len(args) > 1:
            return (args[0], clipped, *args[2:]), kwargs
        return args, {**kwargs, "closure": clipped}

    def after_optimizer_step(self, optimizer: Any) -> None:
        if not self.live or not self._stepping:
            return
        while self._stepping:
            current, with_closure = self._stepping.pop()
            if current is optimizer:
                break
        if self.lr.saved:
            self.guard.run("lr", self.lr.restore)
        if self._inner_done or self._scaler_depth:
            # A wrapper around an optimizer that has just been counted, or a scaler's step, which ends with its update.
            return
        self._inner_done = bool(self._stepping)
        if with_closure:
            if self.sample is not None:
                self._sample_gradients(optimizer, False)
            self.guard.run("gradients", self._note_norm, optimizer, None)
        if len(self.window.optimizers) < MOST_READINGS:
            self.window.optimizers.append(optimizer)
        if self._backward_depth and not with_closure:
            # Optimizers run by gradient hooks step inside backward; the graph is live until it returns.
            self._stepped_in_backward = True
        elif not self._since_update:
            self._update_ended(frozenset((id(optimizer),)))
        else:
            self._since_update.add(id(optimizer))

    # -- end of a step --------------------------------------------------------------------------------------------
    def before_zero_grad(self, owner: Any) -> None:
        """For scripts that update parameters by hand, or whose optimizer step is compiled whole."""
        if not self.live or self._backward_depth or self._stepping or self.explicit or not self.window.micro_batches:
            return
        if not self.optimizers or self.backwards_without_step > ZERO_GRAD_PATIENCE:
            self._by_hand = weakref.ref(owner)
            if self.sample is not None:
                self._sample_gradients(owner, False)
            self.guard.run("gradients", self._note_norm_by_hand, owner)
            self._finish_step(keep_count=True)

    def explicit_step(self, loss: Any = None) -> None:
        """The script's own boundary (``run.step``)."""
        first = not self.explicit
        self.explicit = True
        window = self.window
        if first and not window.micro_batches and not window.optimizers:
            return  # the hooks have just ended this very step
        if isinstance(loss, (int, float)):
            window.losses = [(float(loss), None)]
        elif isinstance(loss, torch.Tensor) and loss.numel() == 1:
            window.losses = [(take(loss, self.at_once), None)]
        elif loss is not None:
            self._once("step_loss", "run.step(loss=...) needs a number or a tensor of one element; ignored", "loss")
        self._finish_step()

    def _update_ended(self, key: frozenset[int]) -> None:
        if self.explicit:
            return
        self.backwards_without_step = 0  # steps are seen, whether or not this one ends an iteration
        closes = self.guard.run("boundary", self._cycle.closes, key)
        if closes:
            self._finish_step()

    def _finish_step(self, keep_count: bool = False) -> None:
        if not keep_count:
            self.backwards_without_step = 0
        self.window.data_wait, self.data.waited = self.data.waited, 0.0
        self._at_boundary()
        self.window.optimizers.clear()  # a record that still travels must not keep a model alive
        self.window = StepWindow()
        self._scaled.clear()
        if self.careful:
            self.careful -= 1

    def finish_by_hand(self) -> bool:
        """At the end of the process: whether a last step is still open that only a zero_grad would have ended."""
        owner = self._by_hand() if self._by_hand is not None else None
        if owner is None or not self.window.micro_batches or self.window.optimizers:
            return False
        self.guard.run("gradients", self._note_norm_by_hand, owner)
        return True

    def _note_norm_by_hand(self, owner: Any) -> None:
        window = self.window
        if not window.norms and isinstance(owner, torch.nn.Module):
            grads = [parameter.grad for parameter in owner.parameters() if parameter.grad is not None]
            parts = norms.l2(grads, self.at_once, careful=self.careful > 0) if grads else []
            window.norms = [Norm(parts)] if parts else []

    # -- statistics of layers -------------------------------------------------------------------------------------
    @property
    def backwards(self) -> int:
        """Backward passes begun in this process."""
        return self._backwards

    def loss_is_scaled(self) -> bool:
        """Whether the backward passes of this step work on a loss that a scaler has scaled."""
        return self._scaled.any and self.active_scaler() is not None

    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return _capturing()

    def _sample_gradients(self, owner: Any, scaled: bool) -> None:
        """``owner``, an optimizer or a module, is about to use its gradients, or has the scale taken out of them."""
        if isinstance(owner, torch.nn.Module):
            parameters = list(owner.parameters())
        else:
            parameters = [p for group in owner.param_groups for p in group["params"]]
        self.guard.run("layers", self.sample.before_update, parameters, scaled)

    # -- data -----------------------------------------------------------------------------------------------------
    def scheduler_made(self, scheduler: Any, _args: Any) -> None:
        self.guard.run("boundary", self.schedulers.add, scheduler)

    def _once(self, key: str, text: str, part: str) -> None:
        if key not in self._noticed:
            self._noticed.add(key)
            self._notice(text, part)


_HAS_DEVICE = torch.backends.cuda.is_built()  # true of ROCm builds as well


SCALED_CLIP = "the script clips gradients that still carry the loss scale: call scaler.unscale_(optimizer) first"


def _closure(args: Any, kwargs: Any) -> Any:
    return kwargs.get("closure") if len(args) < 2 else args[1]


def _capturing() -> bool:
    # While a CUDA graph is captured, every op of ours would be replayed with it.
    return _HAS_DEVICE and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
