"""The loss scale's rule once more, as if and else over Python floats, written from what the rule's text says."""

from __future__ import annotations

import math

import torch

from fp8console.numerics import scaling_rules as rules
from fp8console.numerics.scaling_rules import ScalerSettings, ScaleState, Seen

INF = math.inf
Numbers = dict[str, float]


class Unclear(Exception):
    """A comparison so close that float32 and float64 may answer it differently."""


def over(left: float, right: float) -> bool:
    if left != right and abs(left - right) < 1e-4:
        raise Unclear
    return left > right


def reached(left: float, right: float) -> bool:
    if abs(left - right) < 1e-4:
        raise Unclear
    return left >= right


def expected(now: Numbers, seen: Numbers, s: ScalerSettings) -> Numbers:
    """The state after one step."""
    after = dict(now)
    refused = seen["found_inf"] > 0
    overflow = refused and seen["saturated"] > 0
    if s.saturation_tolerance is not None and seen["saturated"] > s.saturation_tolerance:
        overflow = True
    growth = s.growth_factor ** (1 - s.smoothing)
    if s.margin is None:
        by_count(after, seen, s, refused, overflow, growth)
    else:
        by_headroom(after, seen, s, refused, overflow, growth)
    if after["ceiling"] > torch.finfo(torch.float32).max:
        after["ceiling"] = INF
    high = rules.SCALE_MAX if s.cap is None else s.cap
    after["scale"] = min(max(after["scale"], s.floor), high)
    return after


def by_count(after: Numbers, seen: Numbers, s: ScalerSettings, refused: bool, overflow: bool, growth: float) -> None:
    if s.saturation_tolerance is None:
        overflow = seen["saturated"] > 0
    hit = refused or (overflow and s.saturation_tolerance is not None)
    count_steps(after, s, hit, growth)
    after["overflows"] += overflow
    after["bad_steps"] += refused and not seen["saturated"] > 0 and seen["amax"] > 0


def count_steps(after: Numbers, s: ScalerSettings, hit: bool, growth: float) -> None:
    """Torch's rule with hysteresis."""
    grew = False
    if hit:
        after["growth_tracker"] = 0
        after["hysteresis_tracker"] = max(after["hysteresis_tracker"] - 1, 0)
        if after["hysteresis_tracker"] == 0:
            after["scale"] *= s.backoff_factor
    else:
        after["growth_tracker"] += 1
        if after["growth_tracker"] >= s.growth_interval:
            grew = True
            after["growth_tracker"] = 0
            after["scale"] *= growth
    if grew if s.refill == "on_growth" else not hit:
        after["hysteresis_tracker"] = s.hysteresis


def by_headroom(after: Numbers, seen: Numbers, s: ScalerSettings, refused: bool, overflow: bool, growth: float) -> None:
    bad = refused and not overflow
    anew = False
    if not bad and 0 < seen["amax"] < INF:
        anew = estimate(after, math.log2(seen["amax"]) - math.log2(after["scale"]))
    spikes = after["spikes"]
    if overflow:
        after["overflows"] += 1
        after["spikes"] += 1
    elif not bad:
        after["spikes"] = 0
    if after["measured"] > 0:
        by_measurement(after, seen, s, refused, overflow, growth, anew, spikes)
        return
    # Nothing to go by but the counts, and an overflow of which no amax is known moves nothing.
    after["refused"] = after["refused"] + 1 if bad else after["refused"] if overflow else 0
    if bad or not overflow:
        count_unmeasured(after, s, bad, growth)
    else:
        after["growth_tracker"] = 0
        if s.refill == "every_clean_step":
            after["hysteresis_tracker"] = s.hysteresis


def count_unmeasured(after: Numbers, s: ScalerSettings, bad: bool, growth: float) -> None:
    ceiling = after["ceiling"]
    grows = not bad and after["growth_tracker"] + 1 >= s.growth_interval
    count_steps(after, s, bad, growth)
    if grows:
        after["ceiling"] = ceiling * growth
    after["scale"] = min(after["scale"], after["ceiling"])


def by_measurement(
    after: Numbers,
    seen: Numbers,
    s: ScalerSettings,
    refused: bool,
    overflow: bool,
    growth: float,
    anew: bool,
    spikes: float,
) -> None:
    assert s.margin is not None
    after["hysteresis_tracker"] = s.hysteresis  # no part in it once there is a measurement
    if refused and not overflow:
        after["refused"] += 1
        after["bad_steps"] += 1
        if after["refused"] >= s.patience:
            after["scale"] *= s.backoff_factor
            after["ceiling"] = min(after["ceiling"], after["scale"])
            after["growth_tracker"] = 0
        after["scale"] = min(after["scale"], after["ceiling"])
        tick(after, s, 0, growth)
        return
    best = -s.margin - after["typical"]
    room = best - math.log2(after["scale"])
    asks = not refused and not overflow and seen["underflowed"] > s.underflow_tolerance
    wider = max(0.0, math.log2(growth) - 1, -math.log2(s.backoff_factor) - 1)
    if anew and best != round(best) and abs(best - round(best)) < 1e-4:
        raise Unclear
    target = 2.0 ** min(max(math.floor(best), -126), 127)
    too_high = over(-rules.SLACK, room) or (
        overflow and (over(rules.SPIKE_ROOM, room) or spikes >= rules.SHIFT_STEPS - 1)
    )
    if anew and ((asks and target > after["scale"]) or target < after["scale"] * s.backoff_factor):
        after["scale"] = target
    elif asks and reached(room, rules.GROWTH_ROOM + wider):
        after["scale"] *= growth
    elif too_high:
        after["scale"] *= s.backoff_factor
    if overflow and too_high:
        after["growth_tracker"] = 0
    elif overflow:  # a spike: no reason to begin anew
        tick(after, s, 0 if refused else 1, growth)
    else:
        after["refused"] = 0
        tick(after, s, 1, growth)
    after["scale"] = min(after["scale"], after["ceiling"])


def tick(after: Numbers, s: ScalerSettings, clean: int, growth: float) -> None:
    """Count a step; after ``growth_interval`` clean ones the learnt ceiling is tried again, one growth higher."""
    after["growth_tracker"] += clean
    if after["growth_tracker"] >= s.growth_interval:
        after["growth_tracker"] = 0
        after["ceiling"] *= growth


def estimate(after: Numbers, observed: float) -> bool:
    """Huber's running mean; True when it started anew."""
    off = observed - after["typical"]
    if after["measured"] == 0:
        after.update(typical=observed, measured=1, outliers=0)
        return True
    if over(abs(off), rules.OUTLIER_BITS):
        side = 1 if off > 0 else -1
        after["outliers"] = after["outliers"] + side if after["outliers"] * side > 0 else side
        if abs(after["outliers"]) >= rules.SHIFT_STEPS:
            after.update(typical=observed, measured=1, outliers=0)
            return True
    else:
        after["outliers"] = 0
    after["measured"] = min(after["measured"] + 1, rules.WINDOW)
    after["typical"] += min(max(off, -rules.OUTLIER_BITS), rules.OUTLIER_BITS) / after["measured"]
    return False


# -- hysteresis as it is elsewhere --------------------------------------------------------------------------------
def megatron(found: str, hysteresis: int, interval: int) -> list[float]:
    """Scales after each step, as Megatron-core's dynamic scaler: refilled by a growth alone."""
    scale, left, clean, scales = 1024.0, hysteresis, 0, []
    for step in found:
        if step == "x":
            clean, left = 0, left - 1
            if left <= 0:
                scale *= 0.5
        else:
            clean += 1
            if clean == interval:
                scale, left, clean = scale * 2, hysteresis, 0
        scales.append(scale)
    return scales


def apex(found: str, hysteresis: int, interval: int) -> list[float]:
    """The same as apex's update_scale_hysteresis kernel: refilled by every clean step."""
    scale, left, clean, scales = 1024.0, hysteresis, 0, []
    for step in found:
        if step == "x":
            left, clean = left - 1, 0
            if left <= 0:
                scale *= 0.5
        else:
            clean, left = clean + 1, hysteresis
            if clean == interval:
                scale, clean = scale * 2, 0
        scales.append(scale)
    return scales


# -- between tensors and numbers -----------------------------------------------------------------------------------
def seen_of(found_inf: float = 0.0, amax: float = 0.0, saturated: float = 0.0, underflowed: float = 0.0) -> Seen:
    return Seen(*(torch.tensor(value, dtype=torch.float32) for value in (found_inf, amax, saturated, underflowed)))


def numbers(tensors: ScaleState | Seen) -> Numbers:
    return {name: value.item() for name, value in tensors._asdict().items()}


def begin(s: ScalerSettings, scale: float | None = None) -> ScaleState:
    state = rules.initial(s, torch.zeros(()))
    return state if scale is None else state._replace(scale=torch.tensor(scale))


def rows(tensors: ScaleState | Seen) -> list[Numbers]:
    """The numbers of each element of a batch."""
    lists = [value.tolist() for value in tensors]
    return [dict(zip(tensors._fields, row)) for row in zip(*lists)]
