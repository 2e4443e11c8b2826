"""Applies a tuning profile to a training: to its scaler before it scales its first loss, and to clipping."""

from __future__ import annotations

import weakref
from dataclasses import asdict
from typing import Any

from fp8console.numerics import scaling_rules
from fp8console.probe.baseline import device_name, gradient_format

_SCALER_NAMES = ("growth_factor", "backoff_factor", "growth_interval")


class ProfileSettings:
    """Decides once, at the first scaling or backward, whether the profile fits; says later what it did."""

    def __init__(self, probe: Any, profile: dict[str, Any]) -> None:
        self._probe = probe
        self._profile = profile
        self._fits: bool | None = None
        self._said = False
        self._done: weakref.WeakSet[Any] = weakref.WeakSet()
        self._applied: dict[str, Any] = {}
        self._not_applied: list[str] = []

    def before_backward(self) -> None:
        """Decide now, where no scaler's first use came before."""
        if self._fits is None:
            self._decide()

    def before_scale(self, scaler: Any) -> None:
        """An enabled scaler is about to scale a loss: at its first time it gets the profile's settings."""
        if scaler in self._done or not getattr(scaler, "_enabled", False):
            return
        self._done.add(scaler)
        if self._fits is None:
            self._decide()
        if self._fits:
            self._apply(scaler, self._profile["scaler"])

    def _decide(self) -> None:
        probe, profile = self._probe, self._profile
        found = {"device": device_name(probe.observer.optimizers), "format": gradient_format()}
        for what, now in found.items():
            wanted = profile[what]
            if wanted is not None and now is not None and wanted != now:
                self._fits = False
                text = f"profile {profile['file']} not applied: it is for {what} {wanted}, this training has {now}"
                probe.notice(text, "profile")
                return
        self._fits = True
        if profile["clip_norm"] is not None:
            probe.steering.clip_norm = probe.observer.clipping.norm = probe.observer.clipping.at_most = profile[
                "clip_norm"
            ]
            self._applied["clip_norm"] = profile["clip_norm"]

    def _apply(self, scaler: Any, settings: dict[str, Any]) -> None:
        if hasattr(scaler, "retune"):
            self._apply_to_ours(scaler, settings)
            return
        scale = settings.get("init_scale")
        if scale is not None:
            scaler._init_scale = scale
            if scaler._scale is not None:
                scaler._scale.fill_(scale)
            self._applied["init_scale"] = scale
        for name in _SCALER_NAMES:
            if name in settings:
                setattr(scaler, "_" + name, settings[name])
                self._applied[name] = settings[name]
        if scaler._growth_tracker is not None and "growth_interval" in settings:
            # torch grows when the count of clean steps *equals* the interval: a count beyond it never grows again.
            scaler._growth_tracker.clamp_(max=settings["growth_interval"] - 1)
        steering = self._probe.steering
        for name in ("floor", "cap"):
            if name in settings:
                setattr(steering, name, settings[name])
                self._applied[name] = settings[name]
        if "preset" in settings and settings["preset"] != "pytorch":
            self._not_applied.append(f"preset {settings['preset']}: {type(scaler).__name__} has none")

    def _apply_to_ours(self, scaler: Any, settings: dict[str, Any]) -> None:
        """A Fp8GradScaler: the profile's preset, changed by what else the profile says."""
        changes = {name: value for name, value in settings.items() if name not in ("preset", "init_scale")}
        base = scaling_rules.PRESETS.get(settings.get("preset", ""), scaler.settings)
        whole = {name: value for name, value in asdict(base).items() if name != "init_scale"}
        if base.margin is None:
            changes.pop("margin", None)
        scaler.retune(**{**whole, **changes})
        if "preset" in settings:
            scaler.preset = settings["preset"]
            self._applied["preset"] = settings["preset"]
        self._applied.update(changes)
        if "init_scale" in settings:
            scaler.set_scale(settings["init_scale"])
            self._applied["init_scale"] = settings["init_scale"]

    def at_boundary(self, step: int) -> None:
        """Say once what was applied and what was not."""
        if self._said:
            return
        self._said = True
        if not self._fits:
            return
        if not self._done and self._profile["scaler"]:
            self._not_applied.append("the scaler's settings: no enabled GradScaler has scaled a loss")
        words = ", ".join(f"{name} {_text(value)}" for name, value in self._applied.items()) or "nothing"
        text = f"profile {self._profile['file']}: applied {words}"
        if self._not_applied:
            text += "; not applied: " + "; ".join(self._not_applied)
        self._probe.event(
            "profile", text, step, file=self._profile["file"], applied=self._applied, not_applied=self._not_applied
        )


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
