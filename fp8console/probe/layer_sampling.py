"""Statistics of each layer's weights, activations and their gradients, of every k-th step.

A step that is to be sampled is armed at the boundary before it; at the boundary after it nothing of ours is left in
torch. Each tensor is measured where it is at hand and no reference to it is kept, so that nothing is changed under us
and no memory is held. Of several micro-batches each layer's first is taken.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook

from fp8console.numerics.devices import architecture, hardware_formats
from fp8console.numerics.formats import E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, format_of
from fp8console.numerics.statistics import Statistics
from fp8console.probe.layer_writer import Key, LayerWriter, Sample
from fp8console.probe.layers import Layer, compiling, describe, find_layers, first_tensor
from fp8console.probe.readback import Transfer
from fp8console.protocol.records import LAYER_KINDS
from fp8console.protocol.settings import Settings

#: Layers of a model that are measured; further ones are left out.
MOST_LAYERS = 4096
#: Samples under way from a device at once.
MOST_PENDING = 16
WEIGHT, GRADIENT, ACTIVATION, ACTIVATION_GRADIENT = range(len(LAYER_KINDS))


@dataclass
class _Pending:
    """A sample whose figures are on their way to the host."""

    step: int
    keys: list[Key]
    transfers: list[Transfer]
    scale: Transfer | float | None


class LayerSampling:
    """Samples the layers of one rank. Everything runs on the training's threads, behind the part "layers"."""

    def __init__(self, probe: Any, settings: Settings, run_dir: Any, rank: int) -> None:
        self.every = settings.layer_steps
        self.sampling = False
        self._least = settings.layer_steps
        self._budget = settings.layer_budget
        self._at_once = not settings.read_late
        self._probe = probe
        self._guard = probe.guard
        self._observer = probe.observer
        self._run_dir, self._rank = run_dir, rank
        self._format = settings.layer_format
        self.writer: LayerWriter | None = None
        self._forward_format = self._backward_format = E4M3FN
        self._layers: list[Layer] = []
        self._made_for: Any = None
        self._lock = threading.Lock()  # a device's backward runs on a thread of its own
        self._hook: Any = None
        self._token = 0
        self._said = False  # whether a notice has told that samples come less often than asked
        self._pending: deque[_Pending] = deque()
        self._from_device = False
        self._spent = 0.0
        self._costs: deque[float] = deque(maxlen=3)
        self._plain: deque[float] = deque(maxlen=33)
        self._sampled: deque[float] = deque(maxlen=9)
        self._clear()

    def _clear(self) -> None:
        self._statistics = Statistics(self._at_once)
        self._by_module: dict[int, Layer] = {}
        self._by_parameter: dict[int, tuple[int, ...]] = {}
        self._read: dict[int, tuple[int, Key | None]] = {}  # parameter -> (backward passes before, its row)
        self._first_use: dict[int, int] = {}  # layer -> backward passes before its first forward
        self._weights_read = False

    # -- at the boundary ------------------------------------------------------------------------------------------
    def end_step(self, step: int, duration: float | None) -> None:
        """The step is over: pack what was sampled, take the hooks away, hand on what has arrived."""
        if not self.sampling and not self._pending:
            if duration is not None:
                self._plain.append(duration)
            return
        started = time.perf_counter()
        sampled, self.sampling = self.sampling, False
        self._unhook()
        if sampled:
            self._guard.run("layers", self._finish, step)
        if self._pending:
            self._guard.run("layers", self._poll)
        if duration is not None:
            (self._sampled if sampled else self._plain).append(duration)
        self._spent += time.perf_counter() - started
        if sampled:
            self._guard.run("layers", self._pace)
            self._spent = 0.0

    def begin_step(self, step: int) -> None:
        """The step is about to begin: arm it when it is one to be sampled."""
        if self._least and step % self.every == 0 and self._guard.on("layers"):
            self._guard.run("layers", self._arm)

    def _arm(self) -> None:
        self._find_layers()  # once, and when the models change: not part of what a sample costs
        started = time.perf_counter()
        self._clear()
        alive = [(layer, module) for layer in self._layers if (module := layer.module()) is not None]
        if not alive:
            return
        holders: dict[int, list[int]] = {}
        for layer, module in alive:
            self._by_module[id(module)] = layer
            for name in layer.weights:
                if (parameter := module._parameters.get(name)) is not None:
                    holders.setdefault(id(parameter), []).append(layer.index)
        self._by_parameter = {parameter: tuple(layers) for parameter, layers in holders.items()}
        self._token += 1
        self.sampling = True
        self._observer.sample = self
        if not compiling():
            self._hook = register_module_forward_hook(self._make_hook())
        self._spent = time.perf_counter() - started

    def _unhook(self) -> None:
        self._observer.sample = None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _finish(self, step: int) -> None:
        window = self._observer.window
        packed = self._statistics.pack()
        self._clear()
        if not packed or self.writer is None:
            return
        keys = [key for part, _ in packed for key in part]
        scale = window.scale
        if self._at_once and not isinstance(scale, torch.Tensor) and all(rows.is_cpu for _, rows in packed):
            self.writer.add(Sample(step, keys, [rows for _, rows in packed], scale))
            return
        travelling = Transfer(scale.reshape(1)) if isinstance(scale, torch.Tensor) else scale
        self._from_device = True
        self._pending.append(_Pending(step, keys, [Transfer(rows) for _, rows in packed], travelling))

    def _poll(self) -> None:
        while self._pending:
            sample = self._pending[0]
            transfers = sample.transfers + ([sample.scale] if isinstance(sample.scale, Transfer) else [])
            arrived = [transfer.arrived() for transfer in transfers]  # all are asked: each counts the boundaries
            if not all(arrived) and len(self._pending) <= MOST_PENDING:
                return
            self._pending.popleft()
            self._deliver(sample)

    def drain(self) -> None:
        """Hand on all that is under way, waiting for the device: for a pause and the end of the process."""
        while self._pending:
            self._deliver(self._pending.popleft())

    def _deliver(self, sample: _Pending) -> None:
        scale = sample.scale
        number = scale.values().tolist()[0] if isinstance(scale, Transfer) else scale
        if self.writer is not None:
            self.writer.add(Sample(sample.step, sample.keys, [each.values() for each in sample.transfers], number))

    def flush(self) -> None:
        """Write what was handed on; on the link's thread."""
        if self.writer is not None:
            self._guard.run("layers", self.writer.flush)

    @property
    def problem(self) -> str | None:
        """Why samples can't be written at present, or None."""
        return None if self.writer is None else self.writer.problem

    def let_go(self) -> None:
        """Stop the sample under way: the end of the process, or a fork."""
        self.sampling = False
        self._unhook()

    # -- how often ------------------------------------------------------------------------------------------------
    def _pace(self) -> None:
        """Sample less often until the cost is within the budget; again more often when it has fallen well below it.

        Steps from the setting times a power of 2, so that ranks which differ in cost meet at each rarer sample.
        """
        cost = self._spent
        if self._from_device and len(self._plain) > 8 and len(self._sampled) > 2:
            # A device works on after our calls have returned.
            cost = max(cost, statistics.median(self._sampled) - statistics.median(self._plain))
        # The least of the last few: the first one's memory was new, and a busy moment says nothing about the next.
        self._costs.append(cost)
        if self._budget >= 1:
            return
        durations = self._plain or [duration - cost for duration in self._sampled]
        usual = statistics.median(durations) if durations else 0.0
        if usual <= 0:
            return
        wanted = min(self._costs) / (self._budget * usual)
        every = self._least * 2 ** max(0, math.ceil(math.log2(wanted / self._least)))
        if every > self.every or wanted * 2.5 < self.every:
            self.every = every
            if self._said or every <= self._least:
                return
            self._said = True
            most = f"{self._budget * 100:.3g}% of the time"
            text = f"layers are sampled every {every:,} steps for now, to cost at most {most}"
            times = f"a sample takes {min(self._costs) * 1000:.1f} ms, a step {usual * 1000:.1f} ms"
            self._probe.notice(f"{text}: {times}", "layers")

    def set_pace(self, every: int, budget: float) -> None:
        """From now on a sample every ``every`` steps, or less often where ``budget`` asks for that."""
        self.every = self._least = every
        self._budget = budget

    # -- the layers -----------------------------------------------------------------------------------------------
    def _find_layers(self) -> None:
        optimizers = list(self._observer.optimizers)
        trained = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        modules = [module for ref in self._probe.points.roots().modules if (module := ref()) is not None]
        made_for = (frozenset(map(id, modules)), hash(frozenset(trained)), compiling())
        if made_for == self._made_for:
            return
        self._made_for = made_for
        found = find_layers(modules, trained)
        if len(found) > MOST_LAYERS:
            text = f"the model has {len(found):,} layers with parameters; statistics are of the first {MOST_LAYERS:,}"
            self._probe.notice(text, "layers")
            del found[MOST_LAYERS:]
        if self.writer is None:
            self._choose_formats(found)
            formats = self._forward_format, self._backward_format
            self.writer = LayerWriter(self._run_dir, self._rank, *formats, torch=torch.__version__)
        about = [describe(name, module) for name, module in found]
        self._layers = [
            Layer(index, weakref.ref(module), tuple(layer["weights"]))
            for index, layer, (_, module) in zip(self.writer.describe(about), about, found)
        ]

    def _choose_formats(self, found: list[tuple[str, torch.nn.Module]]) -> None:
        if self._format is not None:
            self._forward_format = format_of(self._format)
        else:
            devices = {p.device for _, module in found for p in module._parameters.values() if p is not None}
            fnuz = any(E4M3FNUZ in hardware_formats(architecture(device)) for device in devices)
            self._forward_format = E4M3FNUZ if fnuz else E4M3FN
        self._backward_format = E5M2FNUZ if self._forward_format.name.endswith("uz") else E5M2

    # -- in the step ----------------------------------------------------------------------------------------------
    def _make_hook(self) -> Any:
        # One function for all modules: torch keeps it beside the modules, so that a model which the script pickles or
        # copies meanwhile holds nothing of ours.
        table = self._by_module

        def hook(module: Any, _inputs: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                return
            layer = table.get(id(module))
            if layer is not None and torch.is_grad_enabled():
                self._guard.run("layers", self._forward, layer, module, output)

        return hook

    def _forward(self, layer: Layer, module: torch.nn.Module, output: Any) -> None:
        if layer.module() is not module or torch._C._get_tracing_state() is not None:
            return
        observer = self._observer
        if not observer.live or not self.sampling or observer.capturing():
            return
        started = time.perf_counter()
        with self._lock:
            # A checkpointed layer runs again inside backward: where its first run was without a graph, that counts.
            if self._first_use.setdefault(layer.index, observer.backwards) != observer.backwards:
                return
            tensor = first_tensor(output)
            if tensor is not None:
                self._statistics.add(Key((layer.index,), ACTIVATION, False), tensor, self._forward_format)
                self._watch_gradient(layer.index, tensor)
            self._spent += time.perf_counter() - started

    def _watch_gradient(self, layer: int, output: torch.Tensor) -> None:
        """Measure the gradient that comes back to ``output``: asked of its node, which in-place changes leave alone."""
        node, place = output.grad_fn, output.output_nr
        if node is None:
            return
        token = self._token

        def gradient(grads: Any) -> None:
            if self._token == token and self.sampling:
                self._guard.run("layers", self._backward, layer, grads[place])

        node.register_prehook(gradient)

    def _backward(self, layer: int, grad: torch.Tensor | None) -> None:
        if grad is None or self._observer.capturing():
            return
        started = time.perf_counter()
        with self._lock:
            key = Key((layer,), ACTIVATION_GRADIENT, self._observer.loss_is_scaled())
            self._statistics.add(key, grad, self._backward_format)
            self._spent += time.perf_counter() - started

    def before_update(self, parameters: Iterable[Any], scaled: bool) -> None:
        """The gradients of ``parameters`` are about to be unscaled, clipped or used; the first of these is told."""
        started = time.perf_counter()
        with self._lock:
            if not self._weights_read:
                self._weights_read = True
                self._read_weights()
            now = self._observer.backwards
            for parameter in parameters:
                layers = self._by_parameter.get(id(parameter))
                if layers is None:
                    continue
                before = self._read.get(id(parameter))
                grad = parameter.grad
                if grad is None or (before is not None and before[0] == now):
                    continue
                if before is not None and before[1] is not None:
                    before[1].stale = True  # more was added to the gradient since
                key = Key(layers, GRADIENT, scaled)
                added = self._statistics.add(key, grad, self._backward_format)
                self._read[id(parameter)] = now, key if added else None
            self._spent += time.perf_counter() - started

    def _read_weights(self) -> None:
        seen = set()
        for layer in self._layers:
            module = layer.module()
            for name in layer.weights if module is not None else ():
                parameter = module._parameters.get(name)  # type: ignore[union-attr]
                layers = self._by_parameter.get(id(parameter))
                if parameter is not None and layers is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    self._statistics.add(Key(layers, WEIGHT, False), parameter, self._forward_format)
