"""Stretches of one trouble: an event at the first step and one at the end, not one a step."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from typing import Any

from fp8console.protocol.records import FLAGS

#: Clean steps after which an episode is over.
CLEAN_STEPS = 3
#: Skipped steps in one episode from which on the scale is hardly to blame: it has shrunk by 2^16 with torch's default.
MANY_SKIPS = 16
#: Steps over which clipping is watched; more clipped ones among them than the first share begin an episode, no more
#: than the second end it.
CLIP_WINDOW = 100
CLIPPED_OFTEN, CLIPPED_AGAIN_SELDOM = 0.10, 0.05


class Episodes:
    """Follows skipped steps and non-finite values through the records of one rank."""

    def __init__(self, event: Callable[..., None], has_floor: Callable[[], bool] = lambda: False) -> None:
        self._event = event
        self._has_floor = has_floor
        self._said_zero = False
        self._open: dict[str, tuple[int, int, int]] = {}  # what -> (first step, last step, count)
        self._first_step: int | None = None
        self._clipped: collections.deque[int] = collections.deque()  # clipped steps within the window
        self._clipping_since: int | None = None

    def note(self, step: int, values: dict[str, Any], flags: int) -> None:
        """Called with each finished record, in order."""
        if self._first_step is None:
            self._first_step = step
        if flags & FLAGS["clipped"] or self._clipping_since is not None:
            self._watch_clipping(step, values, bool(flags & FLAGS["clipped"]))
        if not flags and not self._open:
            return
        self._follow("skipped", bool(flags & FLAGS["skipped"]), step, values)
        self._follow("loss", bool(flags & FLAGS["loss_nonfinite"]), step, values)
        self._follow("grad_norm", bool(flags & FLAGS["grad_nonfinite"]), step, values)

    def _watch_clipping(self, step: int, values: dict[str, Any], clipped: bool) -> None:
        """Clipping is for the abnormal: where it is the rule, the limit or the learning rate is wrong."""
        recent = self._clipped
        if clipped:
            recent.append(step)
        while recent and recent[0] <= step - CLIP_WINDOW:
            recent.popleft()
        count, since = len(recent), self._clipping_since
        if since is None and count > CLIPPED_OFTEN * CLIP_WINDOW and step - (self._first_step or 0) >= CLIP_WINDOW - 1:
            self._clipping_since = step
            limit = values.get("clip_limit")
            to = "" if limit is None else f" to norm {value_text(limit)}"
            text = f"clipped {count} of the last {CLIP_WINDOW} steps{to}: raise the limit, or lower the learning rate"
            self._event("clipping", text, step, count=count, window=CLIP_WINDOW, limit=limit)
        elif since is not None and count <= CLIPPED_AGAIN_SELDOM * CLIP_WINDOW:
            self._clipping_since = None
            text = f"clipping is rare again: {count} of the last {CLIP_WINDOW} steps"
            self._event("recovered", text, step, of="clipping", since=since, until=step, count=count)

    def _follow(self, what: str, bad: bool, step: int, values: dict[str, Any]) -> None:
        running = self._open.get(what)
        if bad and running is None:
            self._open[what] = (step, step, 1)
            self._begin(what, step, values)
        elif bad and running is not None:
            self._open[what] = (running[0], step, running[2] + 1)
            if what == "skipped":
                self._warn(step, running[2] + 1, values.get("scale"))
        elif running is not None and step - running[1] >= CLEAN_STEPS:
            del self._open[what]
            first, last, count = running
            if count > 1:
                name = {"skipped": "skipped steps", "loss": "non-finite loss", "grad_norm": "non-finite gradients"}[
                    what
                ]
                text = f"{name} over: {count} from step {first:,} to {last:,}"
                self._event("recovered", text, step, of=what, since=first, until=last, count=count)

    def _warn(self, step: int, count: int, scale: float | None) -> None:
        """Many skips in a row are not mended by a smaller scale, and at 0 the next update ruins the weights."""
        if count == MANY_SKIPS:
            at = f"; the scale is down to {scale_text(scale)}" if scale is not None else ""
            mend = "roll back" if self._has_floor() else "set floor=1 keeps it from 0, or roll back"
            text = f"{count} steps skipped in a row{at}: not the scale's doing; {mend}"
            self._event("skipped", text, step, scale=scale)
        if scale == 0 and not self._said_zero:
            self._said_zero = True
            text = "the loss scale is 0: the next finite step ruins the weights; set scale=65536 floor=1, or roll back"
            self._event("skipped", text, step, scale=scale)
        elif scale:
            self._said_zero = False

    def _begin(self, what: str, step: int, values: dict[str, Any]) -> None:
        scale = values.get("scale")
        if what == "skipped":
            loss = values.get("loss")
            if loss is not None and not math.isfinite(loss):
                # No scale can mend that: the forward pass made it.
                text = f"step skipped: the loss is {value_text(loss)}, whatever the scale"
            else:
                text = "step skipped: overflow" + (f" at scale {scale_text(scale)}" if scale is not None else "")
            self._event("skipped", text, step, scale=scale)
            return
        if what == "grad_norm" and "skipped" in self._open:
            return  # an overflow that the scaler caught: said already
        value = values.get(what)
        name = {"loss": "loss", "grad_norm": "gradient norm"}[what]
        self._event("nonfinite", f"{name} is {value_text(value)}", step, what=what, value=value)


def scale_text(scale: float) -> str:
    """A loss scale as people say it: 2^15 for a power of two."""
    if scale > 0 and math.isfinite(scale) and math.log2(scale) == round(math.log2(scale)):
        return f"2^{round(math.log2(scale))}"
    return f"{scale:g}"


def value_text(value: float | None) -> str:
    if value is None:
        return "unknown"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return f"{value:.4g}"


def setting_text(value: float | int | str | None) -> str:
    """A setting in an event's text; None is off."""
    if isinstance(value, str):
        return value
    return "off" if value is None else f"{value:g}"
