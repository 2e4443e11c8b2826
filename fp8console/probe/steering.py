"""Settings that an operator changes on a running training: the scaler's, the learning rate's, clipping's."""

from __future__ import annotations

import math
from typing import Any

from fp8console.numerics import scaling_rules
from fp8console.numerics.clipping import Z
from fp8console.probe.adaptive import AutoClip
from fp8console.probe.observer import Observer
from fp8console.protocol.commands import SCALE_MAX, SCALE_MIN, SETTINGS, STOCK_SETTINGS

_SCALER_ATTRIBUTES = {
    "growth_factor": "_growth_factor",
    "backoff_factor": "_backoff_factor",
    "growth_interval": "_growth_interval",
}
#: Settings that only a scaler of ours has (numerics/scaler.py), through its ``retune``.
_OWN_SETTINGS = tuple(name for name in SETTINGS if name not in (*STOCK_SETTINGS, "lr_scale", "clip_norm", "clip_z"))


class Steering:
    """Applies ``set`` commands; floor and cap, which a stock scaler lacks, are kept at each boundary once set."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.floor: float | None = None
        self.cap: float | None = None
        self.lr_scale = 1.0
        self.clip_norm: float | str | None = None  # "auto": AutoClip's
        self.clip_z = Z

    def scaler_settings(self, scale: float | None = None) -> dict[str, Any] | None:
        """The scaler's settings, or None without an enabled scaler.

        ``scale`` None: read the scale too, which waits for the device: for commands only, never at a plain boundary.
        """
        scaler = self._observer.active_scaler()
        if scaler is None:
            return None
        if scale is None:
            scale = float(scaler._scale.item()) if scaler._scale is not None else float(scaler._init_scale)
        settings = {
            "class_name": type(scaler).__name__,
            "scale": scale,
            **{name: getattr(scaler, attribute) for name, attribute in _SCALER_ATTRIBUTES.items()},
            "floor": self.floor,
            "cap": self.cap,
        }
        if hasattr(scaler, "retune"):
            own = scaler.settings
            settings |= {"preset": scaler.preset, "floor": own.floor, "cap": own.cap}
            settings |= {name: getattr(own, name) for name in _OWN_SETTINGS if hasattr(own, name)}
        elif hasattr(scaler, "hysteresis"):
            settings["hysteresis"] = scaler.hysteresis
        return settings

    def has_floor(self) -> bool:
        """Whether something keeps the loss scale from 0."""
        return self.floor is not None or hasattr(self._observer.active_scaler(), "retune")

    def refuses(self, command: dict[str, Any]) -> str | None:
        """Why this training can't take the settings, or None. Called by the reader thread: looks, changes nothing."""
        scaler = self._observer.active_scaler()
        given = [name for name in (*STOCK_SETTINGS, *_OWN_SETTINGS) if name in command]
        wanted = [name for name in given if command[name] is not None or name in _OWN_SETTINGS]
        if wanted and scaler is None:
            return f"{wanted[0]} can't be set: this run has no enabled GradScaler in use"
        ours = hasattr(scaler, "retune")
        for name in wanted:
            if name in _OWN_SETTINGS and not ours and not (name == "hysteresis" and hasattr(scaler, name)):
                return f"{name} can't be set: {type(scaler).__name__} has none"
        if ours and "floor" in command and command["floor"] is None:
            return "floor can't be off: a scale that reaches 0 destroys the weights; set a small one"
        floor = command.get("floor", scaler.settings.floor if scaler is not None and ours else self.floor)
        cap = command.get("cap", scaler.settings.cap if scaler is not None and ours else self.cap)
        if floor is not None and cap is not None and floor > cap:
            return f"floor {floor:g} would be over cap {cap:g}"
        if scaler is not None and ours:
            names = (*_OWN_SETTINGS, *_SCALER_ATTRIBUTES, "floor", "cap")
            try:
                scaling_rules.changed(scaler.settings, **{name: command[name] for name in names if name in command})
            except ValueError as error:  # a narrower range than the command's
                return str(error)
        scale = command.get("scale")
        if isinstance(scale, float):
            if cap is not None and scale > cap:
                return f"scale {scale:g} is over the cap {cap:g}; raise the cap first"
            if floor is not None and scale < floor:
                return f"scale {scale:g} is under the floor {floor:g}; lower the floor first"
        return None

    def apply(self, command: dict[str, Any]) -> dict[str, Any]:
        """Apply a validated ``set`` (or the settings in a rollback); the values now in effect, by name."""
        scaler = self._observer.active_scaler()
        now: dict[str, Any] = {}
        own = [name for name in (*_OWN_SETTINGS, "floor", "cap") if name in command]
        if own and hasattr(scaler, "retune"):
            assert scaler is not None
            now = {name: command[name] for name in own}
            scaler.retune(**now)
            command = {name: value for name, value in command.items() if name not in own}
        for name, attribute in _SCALER_ATTRIBUTES.items():
            if name in command and scaler is not None:
                setattr(scaler, attribute, command[name])
                now[name] = command[name]
        if "growth_interval" in now and scaler is not None and scaler._growth_tracker is not None:
            # torch grows when the count of clean steps *equals* the interval: a count beyond it would never grow again.
            scaler._growth_tracker.clamp_(max=command["growth_interval"] - 1)
        if "hysteresis" in command and scaler is not None:
            scaler.hysteresis = now["hysteresis"] = command["hysteresis"]
        for name in ("floor", "cap"):
            if name in command:
                setattr(self, name, command[name])
                now[name] = command[name]
        if command.get("scale") is not None and scaler is not None:
            self._set_scale(scaler, command["scale"])
        if command.get("lr_scale") is not None:
            self.lr_scale = self._observer.lr.factor = now["lr_scale"] = command["lr_scale"]
        if "clip_norm" in command and (command["name"] == "set" or command["clip_norm"] is not None):
            now |= self._set_clipping(command["clip_norm"], command.get("clip_z"))
        elif command.get("clip_z") is not None:
            now |= self._set_clipping("auto", command["clip_z"], afresh=self.clip_norm != "auto")
        self.keep_limits()
        if {"scale", "floor", "cap"} & {name for name, value in {**command, **now}.items() if value is not None}:
            settings = self.scaler_settings()
            if settings is not None:
                now["scale"] = settings["scale"]
        return now

    def _set_clipping(self, clip_norm: float | str | None, z: float | None, afresh: bool = True) -> dict[str, Any]:
        self.clip_norm, self.clip_z = clip_norm, self.clip_z if z is None else z
        observer = self._observer
        if clip_norm != "auto":
            observer.clipping.norm = None if clip_norm is None else float(clip_norm)
            return {"clip_norm": clip_norm}
        if afresh or not isinstance(observer.clipping.norm, AutoClip):
            observer.clipping.norm = AutoClip()
        observer.clipping.norm.z = self.clip_z
        return {"clip_norm": clip_norm, "clip_z": self.clip_z}

    def keep_limits(self) -> None:
        """Bring the scale within floor and cap; on the device, without reading it."""
        if self.floor is None and self.cap is None:
            return
        scaler = self._observer.active_scaler()
        if scaler is not None and scaler._scale is not None:
            scaler._scale.clamp_(min=self.floor, max=self.cap)

    def fit_to_settings(self) -> None:
        """After a rollback: the state is an earlier one, the settings are today's."""
        for scaler in list(self._observer.scalers):
            if getattr(scaler, "_growth_tracker", None) is not None:
                scaler._growth_tracker.clamp_(max=scaler._growth_interval - 1)  # see apply()
            if hasattr(scaler, "retune"):
                scaler.retune()
        self.keep_limits()

    def _set_scale(self, scaler: Any, value: float | str) -> None:
        if isinstance(value, str):
            factor = float(value[1:])
            now = float(scaler._scale.item()) if scaler._scale is not None else float(scaler._init_scale)
            value = now / factor if value[0] == "/" else now * factor
            if not math.isfinite(value):
                value = SCALE_MAX
        value = min(max(value, SCALE_MIN), SCALE_MAX)
        if hasattr(scaler, "set_scale"):
            scaler.set_scale(value)
        elif scaler._scale is not None:
            scaler._scale.fill_(value)
            if scaler._growth_tracker is not None:
                scaler._growth_tracker.zero_()  # clean steps *at this scale*: else the next one might double it
        else:
            scaler._init_scale = value
