"""Clipping: what the script's own does to the gradients, and the operator's in its place or on top of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fp8console.probe import norms
from fp8console.probe.adaptive import AutoClip
from fp8console.probe.readback import take
from fp8console.probe.window import Clip, Norm, parameter_ids

if TYPE_CHECKING:
    from fp8console.probe.observer import Observer

#: Clips and optimizer steps kept in one window: a script whose boundary is never found must not fill the memory.
MOST_READINGS = 4096


class Clipping:
    """Told by the hooks of each clip; notes it in the observer's window. On the training thread."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.norm: float | AutoClip | None = None  # the operator's
        self.at_most: float | None = None  # a norm of this value leaves the script's own limit where that is smaller

    def limit(self, parameters: Any, max_norm: Any, norm_type: Any) -> Any:
        """The maximum that clipping is to use: the operator's L2 one if there is one, else the script's own."""
        if self.norm is None or not self._observer.live:
            return max_norm
        if isinstance(self.norm, AutoClip):  # clips at the optimizer's step, where it knows the norm
            return self.norm.scripts_limit(max_norm) if float(norm_type) == 2.0 else max_norm
        ours = self._observer.guard.run("clipping", self._operators_limit, parameters, norm_type)
        if ours is not None and self.norm == self.at_most:
            ours = self._observer.guard.run("clipping", _smaller, max_norm, ours)
        return max_norm if ours is None else ours

    def _operators_limit(self, parameters: Any, norm_type: Any) -> Any:
        if float(norm_type) != 2.0:
            return None
        scaler = (
            self._observer.active_scaler() if self._observer.gradients_are_scaled(parameter_ids(parameters)) else None
        )
        if scaler is None or scaler._scale is None:
            return self.norm
        listed = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        first = next((parameter.grad for parameter in listed if parameter.grad is not None), scaler._scale)
        return scaler._scale.to(first.device, non_blocking=True) * self.norm

    def before(self, parameters: Any, norm_type: Any) -> bool:
        """Measure what clipping is about to change, unless its own result will tell: then False."""
        if not self._observer.live or len(self._observer.window.norms) >= MOST_READINGS or self._observer.capturing():
            return True
        if self._observer.sample is not None:
            self._observer.guard.run("layers", self._sample, parameters)
        return bool(self._observer.guard.run("gradients", self._measure, parameters, norm_type))

    def _measure(self, parameters: Any, norm_type: Any) -> bool:
        window, ids = self._observer.window, parameter_ids(parameters)
        left = window.unmeasured(ids, self._observer.backwards)
        if not left:
            return True
        if left == ids and norm_type is not None and float(norm_type) == 2.0:
            return False
        listed = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        grads = [p.grad for p in listed if id(p) in left and p.grad is not None]
        parts = norms.l2(grads, self._observer.at_once, careful=self._observer.careful > 0) if grads else []
        if parts:
            window.norms.append(Norm(parts, self._observer.scale_of(ids), left, self._observer.backwards))
        return True

    def after(self, parameters: Any, max_norm: Any, total: Any, measured: bool, ours: bool) -> None:
        if self._observer.live and len(self._observer.window.clips) < MOST_READINGS and not self._observer.capturing():
            self._observer.guard.run("clipping", self._note_clip, parameters, max_norm, total, measured, ours)

    def _note_clip(self, parameters: Any, max_norm: Any, total: Any, measured: bool, ours: bool) -> None:
        if not isinstance(total, torch.Tensor) or hasattr(total, "_local_tensor"):
            return
        ids = parameter_ids(parameters)
        ours = ours and not isinstance(self.norm, AutoClip)
        scale, norm = self._observer.scale_of(ids), take(total, self._observer.at_once)
        limit = take(max_norm, self._observer.at_once) if isinstance(max_norm, torch.Tensor) else float(max_norm)
        self._observer.window.clips.append(Clip(norm, limit, scale, ids, self._observer.backwards, ours))
        if not measured:
            self._observer.window.norms.append(Norm([norm], scale, ids, self._observer.backwards))

    def clipper_clipped(self, clipper: Any, scale: Any, measured: list[bool]) -> None:
        """A GradClipper has clipped its groups; ``scale``: what the gradients still carry."""
        if self._observer.live and len(self._observer.window.clips) < MOST_READINGS and not self._observer.capturing():
            self._observer.guard.run("clipping", self._note_clipper, clipper, scale, measured)

    def _note_clipper(self, clipper: Any, scale: Any, measured: list[bool]) -> None:
        for group, norm, limit, known in zip(clipper.groups, clipper.norms, clipper.limits, measured):
            if all(parameter.grad is None for parameter in group.parameters):
                continue
            ids = parameter_ids(group.parameters)
            norm, limit = take(norm, self._observer.at_once), take(limit, self._observer.at_once)
            by = self._observer.scale_of(ids) if scale is None else None  # else the clipper has taken it out
            self._observer.window.clips.append(Clip(norm, limit, by, ids, self._observer.backwards, exact=True))
            if not known:
                self._observer.window.norms.append(Norm([norm], by, ids, self._observer.backwards))

    def before_clipper_step(self, clipper: Any) -> None:
        """A GradClipper runs an optimizer's step, or refuses it for a norm that is not finite."""
        if self._observer.live and clipper.found_inf is not None and not self._observer.capturing():
            reading = self._observer.guard.run("clipping", take, clipper.found_inf, self._observer.at_once)
            self._observer.window.found_inf += [] if reading is None else [reading]

    def _sample(self, parameters: Any) -> None:
        listed = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        self._observer.sample.before_update(listed, self._observer.gradients_are_scaled(parameter_ids(listed)))

    def clip(self, optimizer: Any, in_closure: bool) -> None:
        """Clip for a script that doesn't, at the operator's wish."""
        assert self.norm is not None
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        own = parameter_ids(parameters)
        if any(
            clip.operators and clip.backwards == self._observer.backwards and clip.parameters & own
            for clip in self._observer.window.clips
        ):
            return  # the script's own clipping has used the operator's limit
        if in_closure:  # the gradients are this evaluation's, measured before they change
            self._measure(parameters, None)
        limit: Any = self.norm
        if isinstance(limit, AutoClip):
            followed = limit.follow(optimizer)
            measured = None if followed.warm else self._observer.window.norm_before_clips(own, self._observer.backwards)
            if measured is not None:  # still the script's clipping: only its norm is taken in
                followed.limit(measured)
                return
            limit = followed.limit
        exact = callable(limit)
        # A fused optimizer's gradients still carry the loss scale at this point.
        carried = getattr(optimizer, "grad_scale", None)
        clipped = norms.clip(norms.gradients(optimizer), limit, carried)
        if clipped is not None:
            unscaled = clipped if carried is None else [value / carried.to(value.device) for value in clipped]
            total, limit = (take(value, self._observer.at_once) for value in unscaled)
            self._observer.window.clips.append(Clip(total, limit, None, own, self._observer.backwards, True, exact))


def _smaller(scripts: Any, ours: Any) -> Any:
    if not isinstance(scripts, torch.Tensor) and not isinstance(ours, torch.Tensor):
        return scripts if scripts <= ours else ours
    # On the device: which of them it is, is not asked.
    like = ours if isinstance(ours, torch.Tensor) else scripts
    return torch.minimum(*(torch.as_tensor(value, dtype=like.dtype, device=like.device) for value in (scripts, ours)))
