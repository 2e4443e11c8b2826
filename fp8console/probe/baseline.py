"""A tuning baseline: some steps at a tiny learning rate, measured, after which everything is put back as it was.

The state is copied before the first training forward, where weights, buffers and random state are still the script's
own: found by a global forward hook that removes itself there. A training without modules is caught at its first
update.
"""

from __future__ import annotations

import time
import weakref
from typing import Any

import torch

from fp8console.probe import state
from fp8console.probe.restore_points import available_memory
from fp8console.probe.snapshots import Snapshot, compare_live, copy_to_host
from fp8console.protocol.settings import Settings

#: When the state was copied, as the event says it.
BEFORE_FORWARD = "before the first forward"
BEFORE_UPDATE = "before the first update"
AFTER_STEP = "after step 1"


class Baseline:
    """Runs on the training thread; ``probe`` is told to end the training, or to go on, once all is put back."""

    def __init__(self, probe: Any, settings: Settings) -> None:
        assert settings.tune_steps is not None
        self.steps = settings.tune_steps
        self.goes_on = settings.tune_goes_on
        self.over = False
        self._lr = settings.tune_lr
        self._probe = probe
        self._left = self.steps
        self._point: Snapshot | None = None
        self._fresh: list[weakref.ref[Any]] = []  # scalers that had not been used when the state was copied
        self._failed: str | None = None
        self._waiting = False
        self._hook: Any = None

    def arm(self) -> None:
        """Wait for the first training forward, and for the first update where no module's forward comes first."""
        from torch.nn.modules.module import register_module_forward_pre_hook

        self._hook = register_module_forward_pre_hook(self._forward)
        self._probe.observer.on_update = self._update
        self._waiting = True

    def _forward(self, module: Any, args: Any) -> None:
        if not self._waiting or not torch.is_grad_enabled() or not module.training:
            return
        # A loader's worker may run modules too, on data; it was forked with all that is here.
        if self._probe.observer.optimizers and torch.utils.data.get_worker_info() is None:
            self._probe.guard.run("baseline", self._begin, BEFORE_FORWARD)

    def _update(self) -> None:
        if self._waiting:
            self._probe.guard.run("baseline", self._begin, BEFORE_UPDATE)

    def _begin(self, taken: str) -> None:
        self.disarm()
        probe = self._probe
        observer = probe.observer
        if not observer.optimizers:
            self._fail("no optimizer was seen, so the learning rate can't be set")
            return
        roots = _roots(probe)
        self._fresh = [weakref.ref(s) for s in observer.scalers if getattr(s, "_scale", None) is None]
        started = time.perf_counter()
        tree, tensors = state.capture(roots)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if size > available_memory():
            self._fail(f"no memory for a copy of the state, which takes {size / 2**30:.2f} GiB")
            return
        host, events = copy_to_host(tensors, [])
        self._point = Snapshot(probe.step, roots, tree, host, {}, size, time.perf_counter() - started, events)
        observer.lr.fixed = self._lr
        text = f"baseline of {self.steps:,} steps at learning rate {self._lr:g}; state copied {taken}"
        about = {"steps": self.steps, "lr": self._lr, "taken": taken, **_about(probe, roots)}
        probe.event("baseline", text, probe.step or None, what="begun", **about)

    def disarm(self) -> None:
        """Take the hooks away."""
        self._waiting = False
        self._probe.observer.on_update = None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _fail(self, reason: str) -> None:
        self._failed = reason
        self._probe.event("baseline", f"no baseline: {reason}", self._probe.step or None, what="failed", reason=reason)

    def at_boundary(self, step: int) -> bool:
        """Count the step; after the last one put everything back. True when the training is to end here."""
        if self.over:
            return False
        if self._point is None and self._failed is None:
            self._begin(AFTER_STEP)
            if self._failed is None:
                return False
        if self._failed is None:
            self._left -= 1
            if self._left > 0:
                return False
            self._put_back(step)
        self.over = True
        return not self.goes_on

    def _put_back(self, step: int) -> None:
        probe, point = self._probe, self._point
        assert point is not None
        self._point = None
        probe.catch_up()
        probe.observer.lr.fixed = None
        point.wait()
        found: str | None = None
        equal = False
        problem = state.misfit(point.roots, point.tree, point.host)
        if problem is None:
            try:
                state.restore(point.roots, point.tree, point.host)
            except state.PartlyRestored as error:
                problem = str(error)
            self._unused_again(point.roots)
            probe.steering.fit_to_settings()
            found, equal = compare_live(point)
            probe.after_rollback()
            if probe.layers is not None:
                probe.layers.set_pace(Settings.layer_steps, Settings.layer_budget)
        if problem is None and not equal:
            problem = "the state's digest is not what it was"
        text = "baseline over: weights, optimizers and random state put back, verified by digest"
        if problem is not None:
            text = f"baseline over, not everything was put back: {problem}"
        probe.event(
            "baseline",
            text,
            step,
            what="ended",
            steps=self.steps,
            put_back=problem is None,
            digest=found,
            digests_equal=equal,
            goes_on=self.goes_on,
        )
        probe.catch_up()

    def _unused_again(self, roots: state.Roots) -> None:
        """Scalers whose first use fell into the baseline: they make their state anew at the next one."""
        kept = {id(scaler) for ref in roots.scalers if (scaler := ref()) is not None}
        unused = {id(scaler) for ref in self._fresh if (scaler := ref()) is not None}
        for scaler in list(self._probe.observer.scalers):
            if id(scaler) in unused or id(scaler) not in kept:
                scaler._scale = None
                scaler._growth_tracker = None


def _roots(probe: Any) -> state.Roots:
    """What the state hangs on, at a time when the probe need not have joined the run yet."""
    observer = probe.observer
    scalers = [scaler for scaler in observer.scalers if getattr(scaler, "_scale", None) is not None]
    return state.Roots(
        modules=state.find_modules(),
        optimizers=[weakref.ref(item) for item in observer.optimizers],
        scalers=[weakref.ref(item) for item in scalers],
        schedulers=[weakref.ref(item) for item in observer.schedulers],
        registered=dict(probe.registered),
    )


def _about(probe: Any, roots: state.Roots) -> dict[str, Any]:
    """What a profile is kept by: the model's class and size, the device, the batch size; None where unknown."""
    trained = {
        id(p) for ref in roots.optimizers if (o := ref()) is not None for g in o.param_groups for p in g["params"]
    }
    model, parameters = None, None
    for ref in roots.modules:
        module = ref()
        own = [] if module is None else [p for p in module.parameters() if id(p) in trained]
        if own and (parameters is None or sum(p.numel() for p in own) > parameters):
            model, parameters = _class_name(module), sum(p.numel() for p in own)
    return {
        "model": model,
        "parameters": parameters,
        "device_name": device_name(probe.observer.optimizers),
        "gradient_format": gradient_format(),
        "batch_size": probe.observer.data.batch_size(),
    }


def _class_name(module: Any) -> str:
    """The model's own class, not that of a wrapper (DistributedDataParallel, a compiled module) around it."""
    for name in ("module", "_orig_mod"):
        inner = getattr(module, name, None)
        if isinstance(inner, torch.nn.Module) and len(list(module.children())) == 1:
            return _class_name(inner)
    return type(module).__name__


def device_name(optimizers: Any) -> str | None:
    """Where the parameters are: "cpu", a GPU's architecture (gfx942) on ROCm, its name on CUDA; None when unknown."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                device = parameter.device
                if device.type != "cuda":
                    return str(device.type)
                properties = torch.cuda.get_device_properties(device)
                if torch.version.hip is not None:
                    return str(properties.gcnArchName).split(":")[0]
                return str(properties.name)
    return None


def gradient_format() -> str | None:
    """The format to which this training's modules cast gradients (``grad_counts``), or None where none says so."""
    for ref in state.find_modules():
        root = ref()
        for module in [] if root is None else root.modules():
            counts = getattr(module, "grad_counts", None)
            name = getattr(getattr(counts, "fmt", None), "name", None)
            if isinstance(name, str):
                return name
    return None
