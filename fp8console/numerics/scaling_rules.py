"""How a loss scale follows what a training does: one pure rule over tensors, and the presets it is used with.

``advance`` takes the state before a step's end, what the step showed, and the settings; it returns the state after.
It has no branch on a tensor's value, so it runs on a device without a sync, and it works element by element, so a
batch of simulated trainings is the same call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Limits of a loss scale: float32's normal numbers whose reciprocal is normal too.
SCALE_MIN = 2.0**-126
SCALE_MAX = 2.0**126
REFILLS = ("on_growth", "every_clean_step")

#: Steps that the running estimate of the typical amax looks back over.
WINDOW = 64
#: An amax further than this from the typical one counts with this distance only: a spike of any size weighs the same.
OUTLIER_BITS = 2.0
#: Outliers in a row, all on one side, that are a shift and no spikes.
SHIFT_STEPS = 3
#: Measured headroom minus margin, in bits: the scale grows from GROWTH_ROOM up and steps down below -SLACK. A step of
#: one bit from either end lands between them, so that it doesn't go to and fro.
GROWTH_ROOM = 1.0
SLACK = 0.6
#: An overflow with this much room left was a spike: only SHIFT_STEPS of them in a row back off.
SPIKE_ROOM = 0.25


class SettingRefused(ValueError):
    """A scaler setting that does not exist or can't have the value; its text is one line."""


@dataclass(frozen=True)
class ScalerSettings:
    """What decides how the scale moves; the comment behind each is its unit and meaning.

    Sources: ``growth_*``, ``backoff_factor`` and ``init_scale`` are torch.amp.GradScaler's; ``hysteresis`` refilled
    ``on_growth`` is Megatron-core's, ``every_clean_step`` is apex's; ``floor`` is a must since a scale of 0 destroys
    the weights; the headroom rule (``margin``, ``underflow_tolerance``, ``patience``) is this project's own.
    """

    init_scale: float = 1.0
    growth_factor: float = 2.0  # over 1
    backoff_factor: float = 0.5  # below 1
    growth_interval: int = 2000  # clean steps before a growth that no measurement backs
    hysteresis: int = 1  # overflows before the scale backs off; 1: at the first
    refill: str = "on_growth"  # when the count of tolerated overflows starts anew: one of REFILLS
    floor: float = 2.0**-24  # the scale never goes below it
    cap: float | None = None  # nor above it; None: measured headroom is the only limit
    smoothing: float = 0.0  # share of the old scale in a growth, in log2; backoff is never smoothed
    margin: float | None = (
        3.0  # bits kept between the typical amax and the format's maximum; None: headroom plays no part
    )
    underflow_tolerance: float = 1e-3  # share of nonzero values that may be flushed to 0 without asking for growth
    saturation_tolerance: float | None = (
        1e-3  # share of values beyond the maximum that is an overflow; None: don't look
    )
    patience: int = 5  # refused steps in a row, none overflowing where it is measured, before the scale backs off


PRESETS: dict[str, ScalerSettings] = {
    "headroom": ScalerSettings(),
    "article": ScalerSettings(
        init_scale=128.0,
        growth_factor=1.3,
        backoff_factor=0.8,
        growth_interval=75,
        hysteresis=2,
        cap=2.0**15,
        smoothing=0.3,
        margin=None,
        saturation_tolerance=None,
    ),
    "pytorch": ScalerSettings(init_scale=65536.0, floor=SCALE_MIN, margin=None, saturation_tolerance=None),
}


def preset(name: str, **changes: Any) -> ScalerSettings:
    """The settings of a preset, with ``changes``. Raises SettingRefused for an unknown preset, setting or value."""
    if name not in PRESETS:
        raise SettingRefused(f"unknown preset {name!r}; known: {', '.join(PRESETS)}")
    return changed(PRESETS[name], **changes)


def changed(settings: ScalerSettings, **changes: Any) -> ScalerSettings:
    """``settings`` with ``changes``, all checked before any is taken. Raises SettingRefused."""
    known = [field.name for field in fields(ScalerSettings)]
    checked: dict[str, Any] = {}
    for name, value in changes.items():
        if name not in known:
            raise SettingRefused(f"unknown scaler setting {name!r}; known: {', '.join(known)}")
        checked[name] = _checked(name, value)
    result = replace(settings, **checked)
    if result.cap is not None and result.floor > result.cap:
        raise SettingRefused(f"floor {result.floor:g} is over cap {result.cap:g}")
    return result


def _checked(name: str, value: Any) -> Any:
    if name == "refill":
        if value not in REFILLS:
            raise SettingRefused(f"refill must be one of {', '.join(REFILLS)}, not {_shown(value)}")
        return value
    if value is None and name in ("cap", "margin", "saturation_tolerance"):
        return None
    whole = name in ("growth_interval", "hysteresis", "patience")
    if not _is_number(value) or abs(value) == math.inf:
        raise SettingRefused(f"{name} must be a {'whole' if whole else 'finite'} number, not {_shown(value)}")
    if whole:
        if not 1 <= value < 2**31 or value != int(value):
            raise SettingRefused(f"{name} must be a whole number from 1 to 2^31 - 1, not {_shown(value)}")
        return int(value)
    low, high, words = {
        "init_scale": (SCALE_MIN, SCALE_MAX, "between 2^-126 and 2^126 (a scale of 0 destroys the weights)"),
        "scale": (SCALE_MIN, SCALE_MAX, "between 2^-126 and 2^126 (a scale of 0 destroys the weights)"),
        "floor": (SCALE_MIN, SCALE_MAX, "between 2^-126 and 2^126 (a scale of 0 destroys the weights)"),
        "cap": (SCALE_MIN, SCALE_MAX, "between 2^-126 and 2^126"),
        "growth_factor": (1 + 2.0**-23, 2.0**24, "over 1"),
        "backoff_factor": (2.0**-24, 1 - 2.0**-24, "between 0 and 1"),
        "smoothing": (0.0, 1 - 2.0**-24, "from 0 to below 1"),
        "margin": (0.0, 64.0, "from 0 to 64 bits"),
        "underflow_tolerance": (0.0, 1.0, "from 0 to 1"),
        "saturation_tolerance": (0.0, 1.0, "from 0 to 1"),
    }[name]
    if not low <= value <= high:
        raise SettingRefused(f"{name} must be {words}, not {_shown(value)}")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and bool(value == value)


def _shown(value: Any) -> str:
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python writes out no whole number of more than 4,300 digits
        text = f"a number of {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:60]}..."


def checked_scale(value: Any) -> float:
    """``value`` as a loss scale. Raises SettingRefused."""
    return float(_checked("scale", value))


class ScaleState(NamedTuple):
    """What a scaler remembers between steps: tensors of one shape, float32 but for the counts, which are int32."""

    scale: Tensor
    growth_tracker: Tensor  # clean steps since the last growth in time, or since the scale last backed off
    hysteresis_tracker: Tensor  # overflows still tolerated
    typical: Tensor  # log2 of the typical amax, unscaled, in units of the format's maximum; unknown while measured is 0
    measured: Tensor  # steps in that estimate, up to WINDOW
    outliers: Tensor  # outliers in a row; negative for those below
    spikes: Tensor  # overflowing steps in a row
    refused: Tensor  # refused steps in a row that no overflow explains
    ceiling: Tensor  # limit learnt from such a row; inf without one
    overflows: Tensor  # steps with finite values beyond the maximum, refused or more of them than are tolerated
    bad_steps: Tensor  # refused steps that no overflow explains, where that is measured


class Seen(NamedTuple):
    """What one step showed, all ranks and cast sites together: float32 tensors of the state's shape.

    ``amax``: largest finite magnitude on its way into a cast, loss scale included, in units of the format's maximum; 0
    or NaN when nothing was measured. (Formats may differ from cast to cast; what counts is the distance to their end.)
    ``saturated``: share of the nonzero values that were finite and lie beyond the format's maximum, in the cast site
    where it is largest. ``underflowed``: share of the nonzero values that the cast makes 0, likewise.
    ``found_inf``: over 0 when the step is refused.
    """

    found_inf: Tensor
    amax: Tensor
    saturated: Tensor
    underflowed: Tensor


def initial(settings: ScalerSettings, like: Tensor) -> ScaleState:
    """The state before the first step, in the shape and on the device of ``like``; the scale is within its limits."""

    def full(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full_like(like, value, dtype=dtype)

    def count(value: int = 0) -> Tensor:
        return full(value, torch.int32)

    return ScaleState(
        scale=full(within_limits(settings.init_scale, settings)),
        growth_tracker=count(),
        hysteresis_tracker=count(settings.hysteresis),
        typical=full(0.0),
        measured=count(),
        outliers=count(),
        spikes=count(),
        refused=count(),
        ceiling=full(math.inf),
        overflows=count(),
        bad_steps=count(),
    )


def within_limits(scale: float, settings: ScalerSettings) -> float:
    """``scale`` brought within floor and cap."""
    return min(max(scale, settings.floor), SCALE_MAX if settings.cap is None else settings.cap)


def checked_state(values: Any) -> dict[str, float]:
    """Numbers for some of ScaleState's fields, by name; other names are passed over. Raises SettingRefused."""
    if not isinstance(values, dict):
        raise SettingRefused(f"a scaler's state must be a dictionary of numbers, not {_shown(values)}")
    result: dict[str, float] = {}
    for name in ScaleState._fields:
        if name not in values:
            continue
        value = values[name]
        number = _is_number(value)
        if name == "scale":
            value, fits, words = _checked(name, value), True, ""
        elif name == "typical":
            fits, words = number and abs(value) < math.inf, "a finite number"
        elif name == "ceiling":
            fits, words = number and value >= SCALE_MIN, "a loss scale, or inf"
        else:
            low = -SHIFT_STEPS if name == "outliers" else 0
            fits = number and low <= value < 2**31 and value == int(value)
            words = f"a whole number from {low} up"
        if not fits:
            raise SettingRefused(f"{name} in a scaler's state must be {words}, not {_shown(value)}")
        result[name] = value
    return result


def advance(state: ScaleState, seen: Seen, settings: ScalerSettings) -> ScaleState:
    """The state after a step in which ``state.scale`` was in use and ``seen`` was seen.

    Without a margin this is torch's rule (``_amp_update_scale_``) plus hysteresis, smoothing, floor and cap. With one,
    and once something is measured, hysteresis plays no part: the scale follows the headroom, ``-log2(amax)``, of the
    typical amax. It grows while there is room and underflow asks for it, steps down before the typical amax comes near
    the maximum, and backs off at once on an overflow, unless it already stands below what the typical amax allows; then
    only a third overflow in a row does. A first estimate, or one found anew, sets the scale at once to the power of
    two that leaves the margin: upwards only when asked, downwards only by more than one backoff.

    A refused step in which nothing overflowed says nothing about the scale; ``patience`` of them in a row do, and each
    further one backs off again. An overflow neither ends nor lengthens that row. The limit learnt from it rises by one
    growth after each ``growth_interval`` clean steps.
    """
    refused = seen.found_inf > 0
    beyond = seen.saturated > 0
    overflow = refused & beyond
    if settings.saturation_tolerance is not None:
        overflow = overflow | (seen.saturated > settings.saturation_tolerance)
    if settings.margin is None:
        if settings.saturation_tolerance is None:
            overflow = beyond
            hit = refused
        else:
            hit = refused | overflow
        return _by_count(state, hit, overflow, refused & ~beyond & (seen.amax > 0), settings)
    return _by_headroom(state, seen, refused, overflow, settings)


def _by_count(
    state: ScaleState, hit: Tensor, overflow: Tensor, unexplained: Tensor, settings: ScalerSettings
) -> ScaleState:
    left = state.hysteresis_tracker - hit.int()
    backs_off = hit & (left <= 0)
    clean_steps = torch.where(hit, 0, state.growth_tracker + 1)
    grows = clean_steps >= settings.growth_interval
    # A tensor made of numbers would have the default dtype, which is bfloat16 in some scripts.
    scale = torch.where(grows, state.scale * _growth(settings), state.scale)
    scale = torch.where(backs_off, state.scale * settings.backoff_factor, scale)
    refill = grows if settings.refill == "on_growth" else ~hit
    return state._replace(
        scale=scale.clamp(settings.floor, SCALE_MAX if settings.cap is None else settings.cap),
        growth_tracker=torch.where(grows, 0, clean_steps).int(),
        hysteresis_tracker=torch.where(refill, settings.hysteresis, left.clamp_min(0)).int(),
        overflows=state.overflows + overflow,
        bad_steps=state.bad_steps + unexplained,
    )


def _by_headroom(
    state: ScaleState, seen: Seen, refused: Tensor, overflow: Tensor, settings: ScalerSettings
) -> ScaleState:
    bad = refused & ~overflow
    usable = (seen.amax > 0) & (seen.amax < math.inf) & ~bad
    typical, measured, run, jumps = _estimate(state, seen.amax.log2() - state.scale.log2(), usable)
    known = measured > 0

    # What the measurement says, as a factor on the scale.
    best = -(settings.margin or 0.0) - typical  # log2 of the scale that leaves just the margin
    room = best - state.scale.log2()
    grown, backed = _growth(settings), settings.backoff_factor
    asked = (seen.underflowed > settings.underflow_tolerance) & ~refused & ~overflow
    # A step wider than one bit needs as much more room, so that it lands between the two bounds as well.
    wider = max(0.0, math.log2(grown) - 1.0, -math.log2(backed) - 1.0)
    rises = asked & (room >= GROWTH_ROOM + wider)
    too_high = (overflow & ((room < SPIKE_ROOM) | (state.spikes + 1 >= SHIFT_STEPS))) | (room < -SLACK)
    scale = torch.where(rises, state.scale * grown, torch.where(too_high, state.scale * backed, state.scale))
    target = power_of_two(best.floor())
    jumps = jumps & torch.where(target > state.scale, asked, target < state.scale * backed)
    scale = torch.where(jumps, target, scale)
    scale = torch.where(known & ~bad, scale, state.scale)

    # What refused steps say that no overflow explains, or while nothing is measured.
    row = torch.where(bad, state.refused + 1, torch.where(overflow, state.refused, 0))
    left = state.hysteresis_tracker - (bad & ~known).int()
    gives_way = bad & torch.where(known, row >= settings.patience, left <= 0)
    scale = torch.where(gives_way, state.scale * backed, scale)
    # Neither a refused step that says nothing about the scale nor a spike starts the count anew.
    backs_off = gives_way | (overflow & (too_high | ~known)) | (refused & ~known)
    clean_steps = torch.where(backs_off, 0, state.growth_tracker + (~refused).int())
    in_time = clean_steps >= settings.growth_interval
    scale = torch.where(in_time & ~known, state.scale * grown, scale)
    ceiling = torch.where(in_time, state.ceiling * grown, state.ceiling)
    ceiling = torch.where(gives_way & known, torch.minimum(scale, ceiling), ceiling)
    refill = in_time | known if settings.refill == "on_growth" else ~bad

    return ScaleState(
        scale=torch.minimum(scale, ceiling).clamp(settings.floor, SCALE_MAX if settings.cap is None else settings.cap),
        growth_tracker=torch.where(in_time, 0, clean_steps).int(),
        hysteresis_tracker=torch.where(refill, settings.hysteresis, left.clamp_min(0)).int(),
        typical=typical,
        measured=measured,
        outliers=run,
        spikes=torch.where(overflow, state.spikes + 1, torch.where(bad, state.spikes, 0)).int(),
        refused=row.int(),
        ceiling=ceiling,
        overflows=state.overflows + overflow,
        bad_steps=state.bad_steps + (bad & known),
    )


def _estimate(state: ScaleState, observed: Tensor, usable: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(typical, measured, outliers, whether the typical amax was found anew) with one more step's log2 amax.

    A running mean over WINDOW steps whose increments are bounded (Huber's M-estimate of location, one step at a time);
    SHIFT_STEPS outliers on one side start it anew from the last of them.
    """
    off = observed - state.typical
    fresh = state.measured == 0
    wide = (off.abs() > OUTLIER_BITS) & ~fresh
    side = torch.where(off > 0, 1, -1)
    run = torch.where(wide, torch.where(state.outliers * side > 0, state.outliers + side, side), 0)
    shifted = fresh | (run.abs() >= SHIFT_STEPS)
    measured = torch.where(shifted, 1, (state.measured + 1).clamp_max(WINDOW))
    typical = torch.where(shifted, observed, state.typical + off.clamp(-OUTLIER_BITS, OUTLIER_BITS) / measured)
    return (
        torch.where(usable, typical, state.typical),
        torch.where(usable, measured, state.measured).int(),
        torch.where(usable, torch.where(shifted, 0, run), state.outliers).int(),
        usable & shifted,
    )


def power_of_two(exponent: Tensor) -> Tensor:
    """2 to the power of whole numbers, exact in float32; out of its normal range: 2^-126 or 2^127."""
    bits = (exponent.clamp(-126, 127).int() + 127) << 23  # exp2 is an approximation on some devices
    return bits.view(torch.float32)


def _growth(settings: ScalerSettings) -> float:
    """The factor of one growth, smoothed: ``log2 new = smoothing * log2 old + (1 - smoothing) * log2 proposed``."""
    return float(settings.growth_factor ** (1.0 - settings.smoothing))
