"""What a user can set, with defaults and limits; where the values come from is cli/settings.py's business.

The supervisor stores the values in run.json, and the probe reads them there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

from fp8console.protocol import profile


class SettingError(ValueError):
    """A setting that does not exist or a value it can't have; its text is one line."""


@dataclass(frozen=True)
class Settings:
    """All settings; the comment behind each is its unit and meaning."""

    snapshot_budget: float = 0.01  # share of step time that snapshots may cost; 0 switches them off
    snapshot_memory_gib: float | None = None  # host memory for snapshots, GiB a rank; None: a quarter of what is free
    snapshot_count: int = 12  # most snapshots kept in memory
    checkpoint_minutes: float = 10.0  # between unasked checkpoints on disk; 0 switches them off
    checkpoints_kept: int = 3  # newest unasked and untagged checkpoints kept
    total_steps: int | None = None  # steps the training will take, for the time left
    progress_seconds: float = 5.0  # between progress lines without a terminal
    grace_seconds: float = 30.0  # between SIGTERM and SIGKILL
    refresh_hz: float = 5.0  # screen refreshes a second
    theme: str = "okabe-ito"  # name of a theme
    layer_steps: int = 10  # steps between samples of the layers' statistics; 0 switches them off
    layer_budget: float = 0.01  # share of step time that they may cost; samples come less often until it holds
    layer_format: str | None = None  # FP8 format of weights and activations; None: the one that the device has
    read_late: bool = False  # read CPU values a step late, the way a device's are: for testing that path
    tune_steps: int | None = None  # steps of a baseline that is measured and then put back (fp8console tune)
    tune_lr: float = 1e-6  # learning rate of the baseline
    tune_goes_on: bool = False  # train on after the baseline; else the training ends there
    seed: int | None = None  # random seeds set right after torch's import (fp8console check)
    stop_after: int | None = None  # step after which the training is ended, without a checkpoint
    emulate: str | None = None  # FP8 format whose values the script's Linear and convolution layers work on
    emulate_scaling: str = "dynamic"  # of the emulated casts: dynamic (by each tensor's amax) or none
    emulate_except: str | None = None  # name patterns, with commas between, of layers left out of the emulation
    full_precision: bool = False  # autocast and TF32 switched off in the script
    inspect: bool = False  # say what the training is made of (fp8console doctor)
    gpu_source: str | None = None  # source of GPU values; None: the best one that answers
    profile: dict[str, Any] | None = None  # scaler and clip settings applied from the first step (--profile FILE)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _float_at_least(low: float, high: float = math.inf) -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return "a number"
        return None if low <= value <= high else f"from {low:g}" + (f" to {high:g}" if math.isfinite(high) else " up")

    return check


def _int_at_least(low: int) -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:
        whole = isinstance(value, int) and not isinstance(value, bool)
        return None if whole and value >= low else f"a whole number from {low} up"

    return check


def _optional(inner: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
    return lambda value: None if value is None else inner(value)


def _bool(value: Any) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def _name(value: Any) -> str | None:
    return None if isinstance(value, str) and value else "a name"


#: Names of the FP8 formats, as in numerics/formats.py.
FP8_FORMATS = ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")


def _fp8(value: Any) -> str | None:
    return None if value in FP8_FORMATS else f"one of {', '.join(FP8_FORMATS)}"


#: Names of the sources of GPU values, as in hardware/chain.py.
GPU_SOURCES = ("amdsmi", "sysfs", "amd-smi", "rocm-smi", "nvml")


def _gpu_source(value: Any) -> str | None:
    return None if value in GPU_SOURCES else f"one of {', '.join(GPU_SOURCES)}"


RULES: dict[str, Callable[[Any], str | None]] = {
    "snapshot_budget": _float_at_least(0, 1),
    "snapshot_memory_gib": _optional(_float_at_least(0)),
    "snapshot_count": _int_at_least(1),
    "checkpoint_minutes": _float_at_least(0),
    "checkpoints_kept": _int_at_least(3),
    "total_steps": _optional(_int_at_least(1)),
    "progress_seconds": _float_at_least(0.1),
    "grace_seconds": _float_at_least(0),
    "refresh_hz": _float_at_least(0.1, 30),
    "theme": _name,
    "layer_steps": _int_at_least(0),
    "layer_budget": _float_at_least(0.0001, 1),
    "layer_format": _optional(_fp8),
    "read_late": _bool,
    "tune_steps": _optional(_int_at_least(1)),
    "tune_lr": _float_at_least(0),
    "tune_goes_on": _bool,
    "seed": _optional(_int_at_least(0)),
    "stop_after": _optional(_int_at_least(1)),
    "emulate": _optional(_fp8),
    "emulate_scaling": lambda value: None if value in ("dynamic", "none") else "dynamic or none",
    "emulate_except": _optional(_name),
    "full_precision": _bool,
    "inspect": _bool,
    "gpu_source": _optional(_gpu_source),
    "profile": _optional(profile.setting_rule),
}
NAMES = tuple(field.name for field in fields(Settings))


def check(name: str, value: Any) -> None:
    """Raises SettingError when ``name`` is no setting or ``value`` is not one it can have."""
    if name not in RULES:
        raise SettingError(f"unknown setting {name!r}; known: {', '.join(NAMES)}")
    wanted = RULES[name](value)
    if wanted is not None:
        raise SettingError(f"{name} must be {wanted}, not {value!r}")


def from_json(data: Any) -> Settings:
    """Settings from run.json; what is missing or unusable takes its default (an old run, a newer one)."""
    values = {}
    if isinstance(data, dict):
        for name, value in data.items():
            try:
                check(name, value)
            except SettingError:
                continue
            values[name] = value
    return Settings(**values)
