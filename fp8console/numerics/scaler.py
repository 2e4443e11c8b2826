"""A gradient scaler for FP8: torch.amp.GradScaler's interface, with a scale that follows measured headroom."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from fp8console.numerics import scaling_rules
from fp8console.numerics.counts import COUNT_FIELDS, CastCount, cast_counts
from fp8console.numerics.formats import Fp8Format, format_of
from fp8console.numerics.scaling_rules import SCALE_MAX, SCALE_MIN, ScalerSettings, ScaleState, Seen, SettingRefused

#: Layers whose output gradients are measured in a model that counts no casts itself.
MEASURED_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_STATE = {name: f"_{name}" for name in ScaleState._fields}
_WHOLE = {"growth_tracker", "hysteresis_tracker"} | {
    name for name in ScaleState._fields if name not in ("scale", "growth_tracker", "typical", "ceiling")
}


class Fp8GradScaler(torch.amp.GradScaler):
    """A GradScaler whose scale keeps a margin below the edge of an FP8 format, or follows another preset's rule.

    ``preset`` names where the settings start from ("headroom", "article", "pytorch"); ``settings`` change some of them
    (scaling_rules.ScalerSettings). ``fmt`` is the format of the gradients, for layers that do not say it themselves.
    ``process_group``: the ranks that must agree on what was measured; "default" takes all, None keeps it to itself.
    ``watch(model)`` has to be called once for the headroom to be known; until then, and without a margin, the rule is
    torch's with hysteresis. Adds no device sync; under torch.distributed one all-reduce of four numbers a step. Raises
    SettingRefused, and UnknownFormat.
    """

    _hysteresis_tracker: Tensor
    _ceiling: Tensor
    _refused: Tensor
    #: The tensors that make the state of this scaler, for those who copy it and put it back in place.
    state_tensors = tuple(_STATE.values())

    def __init__(
        self,
        device: str = "cuda",
        preset: str = "headroom",
        *,
        fmt: Fp8Format | str | torch.dtype = "e5m2",
        enabled: bool = True,
        process_group: Any = "default",
        **settings: Any,
    ) -> None:
        self._settings = scaling_rules.preset(preset, **settings)
        self.preset = preset
        self.fmt = format_of(fmt)
        self.measuring_group = process_group
        self._counts: list[CastCount] = []
        self._limits: Tensor | None = None  # maximum of each count's format
        self._measures = False  # whether anything was ever measured, by this scaler or the one it was loaded from
        self._hooks: list[Any] = []
        self._loaded: dict[str, float] = {}  # state to begin with, by field
        # torch makes these for an enabled scaler only.
        self._scale: Tensor | None = None
        self._growth_tracker: Tensor | None = None
        self._init_scale, self._init_growth_tracker = self._settings.init_scale, 0
        super().__init__(
            device,
            init_scale=self._settings.init_scale,
            growth_factor=self._settings.growth_factor,
            backoff_factor=self._settings.backoff_factor,
            growth_interval=self._settings.growth_interval,
            enabled=enabled,
        )

    # -- settings -------------------------------------------------------------------------------------------------
    @property
    def settings(self) -> ScalerSettings:
        """The settings in force."""
        return self._settings

    def retune(self, **changes: Any) -> None:
        """Change settings, not ``init_scale``, of a running training. Raises SettingRefused; nothing changed then."""
        if "init_scale" in changes:
            raise SettingRefused("init_scale can't be retuned: it is where a scaler begins; set the scale instead")
        self._settings = scaling_rules.changed(self._settings, **changes)
        if "hysteresis" in changes:
            self._loaded.pop("hysteresis_tracker", None)
            if self._scale is not None:
                self._hysteresis_tracker.fill_(self._settings.hysteresis)
        if self._scale is not None:
            # Whatever was put into the state from outside comes within the settings too.
            self._hysteresis_tracker.clamp_(max=self._settings.hysteresis)
            self._scale.clamp_(self._settings.floor, SCALE_MAX if self._settings.cap is None else self._settings.cap)

    def set_scale(self, value: float) -> None:
        """Set the loss scale, within floor and cap; what earlier refused steps taught of a limit is forgotten."""
        value = scaling_rules.within_limits(scaling_rules.checked_scale(value), self._settings)
        self._forget_limit()
        if self._scale is None:
            self._init_scale, self._init_growth_tracker = value, 0
            return
        self._scale.fill_(value)
        assert self._growth_tracker is not None
        self._growth_tracker.zero_()

    def _forget_limit(self) -> None:
        for name in ("ceiling", "refused"):
            self._loaded.pop(name, None)
        if self._scale is not None:
            self._ceiling.fill_(math.inf)
            self._refused.zero_()

    # torch's own places for three of them: others read and write these.
    _growth_factor = property(
        lambda self: self._settings.growth_factor, lambda self, value: self.retune(growth_factor=value)
    )
    _backoff_factor = property(
        lambda self: self._settings.backoff_factor, lambda self, value: self.retune(backoff_factor=value)
    )
    _growth_interval = property(
        lambda self: self._settings.growth_interval, lambda self, value: self.retune(growth_interval=value)
    )

    # -- measuring ------------------------------------------------------------------------------------------------
    def watch(self, *models: nn.Module) -> None:
        """Measure the gradients of these models from now on, in place of those watched before.

        Reads the counts that the model's own casts keep (``grad_counts``: Fp8Linear, fp8_grad_cast). In a model that
        counts nothing, the gradients of the outputs of its linear and convolution layers are counted as if they were
        cast to ``fmt``. Under torch.distributed every rank must watch, or none. Raises ValueError for a model with
        neither, and for one whose casts all have a scale of their own: the loss scale has no part in their headroom.
        """
        counts: list[CastCount] = []
        measured: list[tuple[nn.Module, CastCount]] = []
        for model in models:
            own = cast_counts(model)
            if not own and any(isinstance(getattr(m, "grad_counts", None), CastCount) for m in model.modules()):
                raise ValueError(
                    f"{type(model).__name__} scales each gradient by itself, so no loss scale brings it nearer to the "
                    "format's edge: train it without watch(), with preset 'pytorch' or without a scaler"
                )
            if not own:
                layers = [item for item in model.named_modules() if isinstance(item[1], MEASURED_LAYERS)]
                if not layers:
                    raise ValueError(
                        f"{type(model).__name__} has no layer to measure: give a model with linear or convolution "
                        "layers, or with modules that count their casts"
                    )
                measured += [(layer, CastCount(name, self.fmt)) for name, layer in layers]
                own = [count for _, count in measured[-len(layers) :]]
            counts += own
        self.unwatch()
        self._counts = counts
        self._hooks = [layer.register_forward_hook(_OutputGradient(count)) for layer, count in measured]

    def unwatch(self) -> None:
        """Stop measuring; the scale goes on by what is known and by refused steps."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._counts, self._limits = [], [], None

    def _see(self, found_inf: Tensor) -> Seen:
        """What the step showed, over all casts and ranks; the counts start anew."""
        counted = [count for count in self._counts if count.values is not None]
        if not counted:
            if not self._counts:
                zero = torch.zeros_like(found_inf)
                return Seen(found_inf, zero, zero, zero)
            packed = torch.stack((found_inf, *found_inf.new_zeros(3).unbind()))
        else:
            values = torch.stack(
                [c.values.to(found_inf.device, non_blocking=True) for c in counted if c.values is not None]
            )
            torch._foreach_zero_([c.values for c in counted if c.values is not None])
            if self._limits is None or len(self._limits) != len(counted) or self._limits.device != values.device:
                limits = torch.tensor([count.fmt.max for count in counted], dtype=torch.float32)
                self._limits = limits.to(values.device)
            peak = (values[:, _AMAX] / self._limits).amax()
            # The worst place counts: a small layer that is flushed whole is nothing among millions of sound values.
            shares = (values / values[:, _NONZERO].clamp_min(1.0).unsqueeze(1)).amax(0)
            packed = torch.stack((found_inf, peak, shares[_SATURATED], shares[_UNDERFLOWED]))
        if self._ranks_agree():
            group = None if self.measuring_group == "default" else self.measuring_group
            torch.distributed.all_reduce(packed, op=torch.distributed.ReduceOp.MAX, group=group)
        return Seen(*packed.unbind())

    def _ranks_agree(self) -> bool:
        if self.measuring_group is None or not torch.distributed.is_available():
            return False
        if not torch.distributed.is_initialized():
            return False
        group = None if self.measuring_group == "default" else self.measuring_group
        return bool(torch.distributed.get_world_size(group) > 1)

    # -- torch's interface ----------------------------------------------------------------------------------------
    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        begin = scaling_rules.initial(self._settings, torch.zeros((), device=dev))
        for name, attribute in _STATE.items():
            tensor = getattr(begin, name)
            if name in self._loaded:
                tensor.fill_(self._loaded[name])
            setattr(self, attribute, tensor)
        assert self._scale is not None and self._growth_tracker is not None
        self._scale.fill_(scaling_rules.within_limits(self._init_scale, self._settings))
        self._growth_tracker.fill_(self._init_growth_tracker)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale by what the step showed, or set it to ``new_scale``; the count of clean steps then goes on.

        ``new_scale`` is a number, or a tensor of one element on any device; a tensor's value is brought within floor
        and cap, and one that is not finite is passed over. Raises SettingRefused for a number that is no loss scale,
        AssertionError (as torch does) when no step was checked.
        """
        if not self._enabled:
            return
        scale, tracker = self._check_scale_growth_tracker("update")
        with torch.no_grad():
            if new_scale is not None:
                self._take_scale(scale, new_scale)
            else:
                found = [
                    value.to(scale.device, non_blocking=True).reshape(())
                    for state in self._per_optimizer_states.values()
                    for value in state["found_inf_per_device"].values()
                ]
                if not found:
                    raise AssertionError("No inf checks were recorded prior to update.")
                found_inf = found[0] if len(found) == 1 else torch.stack(found).amax()
                after = scaling_rules.advance(self._state(), self._see(found_inf), self._rule())
                scale.copy_(after.scale)
                tracker.copy_(after.growth_tracker)
                for name in ScaleState._fields[2:]:
                    setattr(self, _STATE[name], getattr(after, name))
        self._per_optimizer_states = defaultdict(_fresh_state)

    def _rule(self) -> ScalerSettings:
        """The settings to go by: while nothing was ever measured, margin and saturation cost time and tell nothing."""
        if self._counts or self._loaded.get("measured"):
            self._measures = True
        if self._measures:
            return self._settings
        return replace(self._settings, margin=None, saturation_tolerance=None)

    def _take_scale(self, scale: Tensor, new_scale: float | Tensor) -> None:
        if not isinstance(new_scale, Tensor):
            scale.fill_(scaling_rules.within_limits(scaling_rules.checked_scale(new_scale), self._settings))
        elif new_scale.numel() != 1 or new_scale.requires_grad:
            raise AssertionError("new_scale must be a number or a tensor of one element that requires no gradient")
        else:
            wanted = new_scale.detach().reshape(()).to(scale.device, torch.float32, non_blocking=True)
            wanted = torch.where(wanted.isfinite() & (wanted > 0), wanted, scale)
            cap = SCALE_MAX if self._settings.cap is None else self._settings.cap
            scale.copy_(wanted.clamp(self._settings.floor, cap))
        self._forget_limit()
        for count in self._counts:
            count.clear()  # counted under another scale

    def _state(self) -> ScaleState:
        return ScaleState(*(getattr(self, attribute) for attribute in _STATE.values()))

    def figures(self) -> dict[str, float | int | None]:
        """The state as numbers, by ScaleState's names, and ``headroom`` in bits; waits for the device.

        ``headroom`` is that of the typical amax at the present scale, None while nothing was measured.
        """
        numbers: dict[str, float]
        if self._scale is None:
            begin = scaling_rules.initial(self._settings, torch.zeros(()))._asdict()
            numbers = {name: tensor.item() for name, tensor in begin.items()}
            numbers.update(self._loaded, scale=self._init_scale, growth_tracker=self._init_growth_tracker)
        else:
            values = torch.stack([tensor.double() for tensor in self._state()]).tolist()
            numbers = dict(zip(_STATE, values))
        result: dict[str, float | int | None] = {
            name: int(value) if name in _WHOLE else value for name, value in numbers.items()
        }
        known = numbers["measured"] > 0
        result["headroom"] = -numbers["typical"] - math.log2(numbers["scale"]) if known else None
        result["typical"] = numbers["typical"] if known else None
        return result

    def state_dict(self) -> dict[str, Any]:
        """torch's five entries, and ``"fp8console"`` with the rest: a stock scaler loads it and passes that over."""
        state: dict[str, Any] = super().state_dict()
        if state:
            figures = self.figures()
            figures.pop("headroom")
            state["fp8console"] = {
                "preset": self.preset,
                "format": self.fmt.name,
                "settings": asdict(self._settings),
                "state": {name: value for name, value in figures.items() if value is not None},
            }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` gave, of this class or of a stock scaler; of the latter the measurements start anew.

        Raises RuntimeError for an empty one (torch's wording), SettingRefused for values that can't be; nothing is
        changed then.
        """
        if not self._enabled:
            return
        if not state_dict:
            super().load_state_dict(state_dict)
        missing = [name for name in _STOCK_ENTRIES if name not in state_dict]
        if missing:
            raise SettingRefused(f"no scaler's state: it has no {', '.join(missing)}")
        scale = scaling_rules.checked_scale(state_dict["scale"])
        clean_steps = scaling_rules.checked_state({"growth_tracker": state_dict["_growth_tracker"]})["growth_tracker"]
        changes = {name: state_dict[name] for name in ("growth_factor", "backoff_factor", "growth_interval")}
        preset, fmt, state = self.preset, self.fmt, dict[str, float]()
        if "fp8console" in state_dict:
            ours = state_dict["fp8console"]
            try:
                preset, fmt = str(ours["preset"]), format_of(ours["format"])
                changes = {**ours["settings"], **changes}
                state = scaling_rules.checked_state(ours["state"])
            except (KeyError, TypeError) as error:
                raise SettingRefused(f"the scaler's state is damaged: {type(error).__name__}: {error}") from error
        kept = {name: value for name, value in asdict(self._settings).items() if name not in changes}
        # All are checked together: a loaded floor may lie over the present cap.
        self._settings = scaling_rules.changed(ScalerSettings(floor=SCALE_MIN, cap=None), **kept, **changes)
        self.preset, self.fmt, self._loaded = preset, fmt, state
        self._init_scale, self._init_growth_tracker = scale, int(clean_steps)
        for count in self._counts:
            count.clear()
        if self._scale is not None:
            device, self._scale, self._growth_tracker = self._scale.device, None, None
            self._lazy_init_scale_growth_tracker(device)

    def __getstate__(self) -> dict[str, Any]:
        """The scaler without what it watches: after unpickling, call ``watch`` again."""
        loaded = self._loaded
        if self._enabled:
            loaded = {name: value for name, value in self.figures().items() if name in _STATE and value is not None}
        state: dict[str, Any] = super().__getstate__()
        for attribute in _STATE.values():
            state.pop(attribute, None)
        return {**state, "_loaded": loaded, **_UNWATCHED}


_STOCK_ENTRIES = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
_AMAX, _NONZERO = COUNT_FIELDS.index("amax"), COUNT_FIELDS.index("nonzero")
_SATURATED, _UNDERFLOWED = COUNT_FIELDS.index("saturated"), COUNT_FIELDS.index("underflowed")
_UNWATCHED: dict[str, Any] = {"_counts": [], "_limits": None, "_hooks": [], "_scale": None, "_growth_tracker": None}


def _fresh_state() -> dict[str, Any]:
    return {"stage": torch.amp.grad_scaler.OptState.READY, "found_inf_per_device": {}}


class _OutputGradient:
    """A forward hook that counts the gradient of a layer's output; picklable and copied with the layer."""

    def __init__(self, count: CastCount) -> None:
        self.count = count

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(self.count.add)
