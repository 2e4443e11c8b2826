"""FP8 put into an unedited script's layers: what ``fp8console check train.py`` compares with the script as it is.

Every linear layer and convolution works on a rounded input and a rounded weight, and its output's gradient is rounded
on the way back; sums, biases and everything else stay as they were. This changes the training's results, and is for
runs that were started for that alone. Global forward hooks split compiled graphs, so such a run has torch.compile
switched off.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from fp8console.numerics.casts import fp8_cast, fp8_grad_cast
from fp8console.numerics.formats import E5M2, E5M2FNUZ, Fp8Format, format_of
from fp8console.numerics.tensor_scales import DynamicScale
from fp8console.probe import state

LAYERS = (nn.Linear, nn.modules.conv._ConvNd)
#: Linear layers of libraries that are no nn.Linear: (module, class), with a ``weight`` that they multiply by.
OTHER_LAYERS = (("transformers.pytorch_utils", "Conv1D"),)
_MISSING = object()


class Emulation:
    """Rounds in global forward hooks; ``scaling``: "dynamic" (each tensor's amax goes to the maximum) or "none".

    ``spared`` are name patterns of layers that are left alone. Says at the first boundary which layers it has changed.
    """

    def __init__(self, probe: Any, fmt: str, scaling: str, spared: tuple[str, ...]) -> None:
        self.forward_format = format_of(fmt)
        self.backward_format = _of_gradients(self.forward_format)
        self.scaling = scaling
        self._scales: dict[str, DynamicScale | None] = {
            "forward": DynamicScale(self.forward_format) if scaling == "dynamic" else None,
            "backward": DynamicScale(self.backward_format) if scaling == "dynamic" else None,
        }
        self._spared = spared
        self._probe = probe
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._unnamed = 0
        self._calls: dict[str, int] = {}
        self._shadowed: list[tuple[nn.Module, Any]] = []  # modules whose forward is under way, and what stood there
        self._handles: list[Any] = []
        self._said = False
        self._noted: set[str] = set()

    def arm(self) -> None:
        """Hook every module's forward."""
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

        self._handles = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, always_call=True),
        ]

    # -- forward --------------------------------------------------------------------------------------------------
    def _before(self, module: nn.Module, args: Any) -> Any:
        if not is_layer(module) or not self._probe.guard.on("emulation"):
            return None
        return self._probe.guard.run("emulation", self._round_operands, module, args)

    def _round_operands(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        name = self._name(module)
        if any(fnmatchcase(name, pattern) for pattern in self._spared):
            return None
        if not args or not isinstance(args[0], torch.Tensor) or not args[0].is_floating_point():
            self._note(f"layer {name} gets its input by keyword, or as no floating-point tensor: left as it is")
            return None
        weight = module.weight
        if not isinstance(weight, torch.Tensor):
            return None
        if not weight.is_floating_point() or isinstance(getattr(type(module), "weight", None), property):
            self._note(f"layer {name} makes its weight anew for each use: left as it is")
            return None
        # An instance's own attributes are found before its parameters, so the forward, whosever it is, uses this one.
        self._shadowed.append((module, module.__dict__.get("weight", _MISSING)))
        module.__dict__["weight"] = self._cast(weight)
        self._calls[name] = self._calls.get(name, 0) + 1
        return (self._cast(args[0]), *args[1:])

    def _cast(self, x: torch.Tensor) -> torch.Tensor:
        scale = self._scales["forward"]
        # Under a scale of its own no finite value lies beyond the maximum; inf must not become one.
        return fp8_cast(x, self.forward_format, scale is None, None if scale is None else scale.scale_of(x))

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._shadowed or self._shadowed[-1][0] is not module:
            return None
        _, before = self._shadowed.pop()
        if before is _MISSING:
            module.__dict__.pop("weight", None)
        else:
            module.__dict__["weight"] = before
        return self._probe.guard.run("emulation", self._round_gradient, output)

    def _round_gradient(self, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or not output.requires_grad or not output.is_floating_point():
            return None
        # What is too large, or was inf before, must stay visible to the script's loss scaler.
        cast = fp8_grad_cast(output, self.backward_format, False, scaling=self._scales["backward"])
        return cast.clone()  # the cast gives a view, which an in-place activation could not write to

    # -- names and news -------------------------------------------------------------------------------------------
    def _name(self, module: nn.Module) -> str:
        name = self._names.get(module)
        if name is None:
            for root in (ref() for ref in state.find_modules()):
                if root is not None:
                    for path, child in root.named_modules():
                        self._names.setdefault(child, path or type(child).__name__)
            if module not in self._names:
                self._unnamed += 1
                self._names[module] = f"{type(module).__name__} {self._unnamed}"
            name = self._names[module]
        return name

    def at_boundary(self, step: int) -> None:
        """After the first step: say which layers were in FP8, and which of the models' were not."""
        if self._said:
            return
        self._said = True
        there = {name: module for module, name in self._names.items() if is_layer(module)}
        for pattern in self._spared:
            if not any(fnmatchcase(name, pattern) for name in there):
                self._note(f"no layer has a name like {pattern!r}, the pattern of layers to leave out")
        left = sorted(set(there) - set(self._calls))
        share = self._share([there[name] for name in self._calls if name in there])
        text = f"{len(self._calls)} layers with {share:.1%} of the parameters" if self._calls else "no layer"
        text += f": {self.forward_format.name}, gradients {self._gradients()}"
        if left:
            text += f"; not in FP8: {', '.join(left[:8])}{', ...' if len(left) > 8 else ''}"
        self._probe.event("emulation", text, step, layers=list(self._calls), left=left, share=share)

    def _share(self, layers: list[nn.Module]) -> float:
        """Of all parameters of the models seen, the share that is these layers' weights; shared ones count once."""
        roots = [root for ref in state.find_modules() if (root := ref()) is not None]
        every = {id(p): p.numel() for root in roots for p in root.parameters()}
        ours = {id(layer.weight) for layer in layers}
        return sum(size for key, size in every.items() if key in ours) / max(1, sum(every.values()))

    def _gradients(self) -> str:
        how = "each scaled by its largest magnitude" if self.scaling == "dynamic" else "as they come"
        return f"{self.backward_format.name}, {how}"

    def _note(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self._probe.notice(text, "emulation")


def is_layer(module: nn.Module) -> bool:
    """Whether the emulation knows this module's product."""
    if isinstance(module, LAYERS):
        return True
    return (type(module).__module__, type(module).__name__) in OTHER_LAYERS and hasattr(module, "weight")


def _of_gradients(fmt: Fp8Format) -> Fp8Format:
    """Gradients need range more than digits: E5M2 of the same family, as FP8 training recipes have it."""
    return E5M2FNUZ if fmt.name.endswith("fnuz") else E5M2


def without_low_precision(replace: Callable[..., Any]) -> None:
    """Make every autocast region do nothing, and float32 products be float32: for a reference in full precision.

    ``replace(owner, name, make)`` puts ``make(original)`` in an attribute's place (hooks.Patches). A model that the
    script itself converted stays as converted.
    """

    def make(original: Any) -> Any:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            self._enabled = False

        return __init__

    replace(torch.amp.autocast_mode.autocast, "__init__", make)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
