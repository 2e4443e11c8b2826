"""Settings that an operator changes on a running training: the scaler's, the learning rate's, clipping's."""

from __future__ import annotations

import math
from typing import Any

from fp8console.probe.observer import Observer
from fp8console.protocol.commands import SCALE_MAX, SCALE_MIN

_SCALER_ATTRIBUTES = {
    "growth_factor": "_growth_factor",
    "backoff_factor": "_backoff_factor",
    "growth_interval": "_growth_interval",
}


class Steering:
    """Applies ``set`` commands; floor and cap, which a stock scaler lacks, are kept at each boundary once set."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.floor: float | None = None
        self.cap: float | None = None
        self.lr_scale = 1.0
        self.clip_norm: float | None = None

    def scaler_settings(self, scale: float | None = None) -> dict[str, Any] | None:
        """The scaler's settings, or None without an enabled scaler.

        ``scale`` None: read the scale too, which waits for the device: for commands only, never at a plain boundary.
        """
        scaler = self._observer.active_scaler()
        if scaler is None:
            return None
        if scale is None:
            scale = float(scaler._scale.item()) if scaler._scale is not None else float(scaler._init_scale)
        return {
            "class_name": type(scaler).__name__,
            "scale": scale,
            **{name: getattr(scaler, attribute) for name, attribute in _SCALER_ATTRIBUTES.items()},
            "floor": self.floor,
            "cap": self.cap,
        }

    def refuses(self, command: dict[str, Any]) -> str | None:
        """Why this training can't take the settings, or None. Called by the reader thread: looks, changes nothing."""
        scaler = self._observer.active_scaler()
        wanted = [name for name in ("scale", "floor", "cap", "hysteresis", *_SCALER_ATTRIBUTES) if name in command]
        wanted = [name for name in wanted if command[name] is not None]
        if wanted and scaler is None:
            return f"{wanted[0]} can't be set: this run has no enabled GradScaler in use"
        if "hysteresis" in wanted and not hasattr(scaler, "hysteresis"):
            return f"hysteresis can't be set: {type(scaler).__name__} has none"
        floor = command.get("floor", self.floor)
        cap = command.get("cap", self.cap)
        if floor is not None and cap is not None and floor > cap:
            return f"floor {floor:g} would be over cap {cap:g}"
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
            self.lr_scale = self._observer.lr_factor = now["lr_scale"] = command["lr_scale"]
        if "clip_norm" in command and (command["name"] == "set" or command["clip_norm"] is not None):
            self.clip_norm = self._observer.clip_norm = now["clip_norm"] = command["clip_norm"]
        self.keep_limits()
        if {"scale", "floor", "cap"} & {name for name, value in command.items() if value is not None}:
            settings = self.scaler_settings()
            if settings is not None:
                now["scale"] = settings["scale"]
        return now

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
        self.keep_limits()

    def _set_scale(self, scaler: Any, value: float | str) -> None:
        if isinstance(value, str):
            factor = float(value[1:])
            now = float(scaler._scale.item()) if scaler._scale is not None else float(scaler._init_scale)
            value = now / factor if value[0] == "/" else now * factor
            if not math.isfinite(value):
                value = SCALE_MAX
        value = min(max(value, SCALE_MIN), SCALE_MAX)
        if scaler._scale is not None:
            scaler._scale.fill_(value)
            if scaler._growth_tracker is not None:
                scaler._growth_tracker.zero_()  # clean steps *at this scale*: else the next one might double it
        else:
            scaler._init_scale = value
