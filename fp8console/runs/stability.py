"""How stable a run is: figures over its attempts to update, carried on as records come in.

``stability`` takes whole arrays of any run, recorded by the console or not; ``Stability`` takes them piece by piece
and gives the same figures, so that a screen can ask for them several times a second.

Words, the same in all figures:

- *bad attempt*: the scaler refused it (skipped), or its loss or its gradient norm is known and not finite.
- *failure*: a stretch of bad attempts that follow each other, whether it is one or a thousand.
- *rollback*: every attempt was made and took its time, so attempts on a stretch that a rollback abandoned count like
  all others, and so do their failures; the rollback itself is none. But what lies on both sides of it is not compared:
  it ends a stable stretch and a failure, no loss difference is taken across it, and no earlier loss serves as a band
  after it.
- *unknown*: an attempt of which neither loss nor gradient norm was seen and no scaler was in use says nothing: it is
  left out, and it interrupts nothing. A figure that can't be had is None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from fp8console.runs.reader import StepRecords

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

#: Attempts over which loss jitter is told, and those of the recent clip frequency.
JITTER_STEPS = 1_000
CLIP_STEPS = 100
#: A failure is mended when, within so many attempts of its beginning, the median of so many sound losses in a row is no
#: higher than the highest of so many sound losses before it.
RECOVERY_STEPS = 100
RECOVERY_MEDIAN = 5
BAND_STEPS = 20


@dataclass(frozen=True)
class StabilityFigures:
    """The figures of one run; see the module for its words. None is unknown.

    - ``steps``: attempts that say whether they were sound.
    - ``failures``: stretches of bad attempts.
    - ``mean_steps_between_failures`` (steps): sound attempts / failures. What stands after the last failure counts as
      well, which makes it the usual estimate (maximum likelihood) where failures come at a constant rate. None without
      a failure: all that is known then is ``mean_steps_at_least``, the sound attempts so far, a lower bound.
    - ``loss_jitter`` (share of the loss): median of ``|loss[i] - loss[i-1]|`` over successive attempts with finite
      losses, divided by the median of ``|loss|``, both over the newest 1,000 attempts. Successive differences leave the
      trend out (von Neumann et al., "The Mean Square Successive Difference", 1941), the median leaves spikes out. For
      independent normal noise it is 0.954 of the noise's standard deviation. None with a median loss of 0.
    - ``recovery_rate`` (share of ``judged``): failures after which the loss came back by itself. Its band reaches up to
      the highest of the (at most 20) sound losses before the failure; it is back when the median of 5 successive sound
      losses is within the band, less than 100 attempts after the failure's first. A rollback before that: not
      recovered. Failures without a sound loss before them, or too young to tell, are not judged.
    - ``longest_stable_stretch`` (steps): most sound attempts in a row.
    - ``skips_per_1000_steps``: attempts that the scaler refused, of 1,000.
    - ``clip_frequency``, ``clip_frequency_recent`` (share): attempts whose gradients clipping made smaller, of those of
      which it is known, over the run and over the newest 100 attempts. None where nothing clips.
    """

    steps: int = 0
    failures: int | None = None
    mean_steps_between_failures: float | None = None
    mean_steps_at_least: int | None = None
    loss_jitter: float | None = None
    recovery_rate: float | None = None
    recovered: int = 0
    judged: int = 0
    longest_stable_stretch: int | None = None
    skips_per_1000_steps: float | None = None
    clip_frequency: float | None = None
    clip_frequency_recent: float | None = None


#: The figures' units, in the order in which they are told.
UNITS = {
    "steps": "steps",
    "failures": "failures",
    "mean_steps_between_failures": "steps",
    "mean_steps_at_least": "steps",
    "loss_jitter": "share of the loss",
    "recovery_rate": "share of judged failures",
    "recovered": "failures",
    "judged": "failures",
    "longest_stable_stretch": "steps",
    "skips_per_1000_steps": "skips",
    "clip_frequency": "share of steps",
    "clip_frequency_recent": "share of steps",
}


def stability(
    losses: Any,
    skipped: Any = None,
    grad_norms: Any = None,
    clipped: Any = None,
    restored: Any = None,
    *,
    jitter_steps: int | None = JITTER_STEPS,
) -> StabilityFigures:
    """The figures of a whole run from arrays of one value an attempt, all of shape (attempts,), in order.

    ``losses`` and ``grad_norms`` are numbers: NaN and inf are what was measured; an unknown one is None (in a list).
    ``skipped`` and ``restored`` (the first attempt after a rollback) are booleans, False when left out; without
    ``skipped`` no scaler is taken to be in use. ``clipped`` may hold None for unknown. ``jitter_steps`` None: loss
    jitter over the whole run. Raises ValueError for arrays of different lengths.
    """
    loss, loss_known = _numbers(losses)
    count = len(loss)
    norm, norm_known = (np.zeros(count), np.zeros(count, np.bool_)) if grad_norms is None else _numbers(grad_norms)
    clip, clip_known = (np.zeros(count), np.zeros(count, np.bool_)) if clipped is None else _numbers(clipped)
    none = np.zeros(count, np.bool_)
    skips = none if skipped is None else np.asarray(skipped, np.bool_)
    back = none if restored is None else np.asarray(restored, np.bool_)
    for name, array in (("grad_norms", norm), ("clipped", clip), ("skipped", skips), ("restored", back)):
        if array.shape != loss.shape:
            raise ValueError(f"{name} must have one value for each of the {count} losses, not shape {array.shape}")
    made = Stability(jitter_steps)
    in_use = none if skipped is None else ~none
    made.add(
        loss,
        skips,
        known=in_use | loss_known | norm_known,
        loss_known=loss_known,
        bad=skips | (loss_known & ~np.isfinite(loss)) | (norm_known & ~np.isfinite(norm)),
        clipped=clip.astype(np.bool_),
        clip_known=clip_known,
        restored=back,
    )
    return made.figures()


def _numbers(values: Any) -> tuple[Floats, Bools]:
    """Values and which of them are known; unknown ones are 0."""
    if isinstance(values, np.ndarray) and values.dtype != object:
        if values.ndim != 1:
            raise ValueError(f"one value for each attempt is needed, not an array of shape {values.shape}")
        return values.astype(np.float64), np.ones(len(values), np.bool_)
    listed = list(values)
    known = np.array([value is not None for value in listed], np.bool_)
    return np.array([0.0 if value is None else float(value) for value in listed], np.float64), known


class Stability:
    """Sums over the attempts so far. Memory: a few thousand numbers, whatever the run's length."""

    def __init__(self, jitter_steps: int | None = JITTER_STEPS) -> None:
        self._jitter_steps = jitter_steps
        self._count = 0  # attempts, known or not
        self._known = 0
        self._bad = 0
        self._skipped = 0
        self._failures = 0
        self._trajectory = 0  # rollbacks so far
        self._last_known = (False, 0)  # whether the newest known attempt was bad, and its trajectory
        self._stretch = 0  # sound attempts in the stretch under way
        self._longest = 0
        self._clip_known = 0
        self._clipped = 0
        self._recent_clips = np.empty((2, 0), np.bool_)  # (known, clipped) of the newest attempts
        self._tail_loss: Floats = np.empty(0)  # of the newest attempts; NaN where unknown
        self._tail_restored: Bools = np.empty(0, np.bool_)
        self._recovery = Recoveries()

    def add(
        self,
        loss: Any,
        skipped: Bools,
        *,
        known: Bools,
        loss_known: Bools,
        bad: Bools,
        clipped: Bools,
        clip_known: Bools,
        restored: Bools,
    ) -> None:
        """The next attempts, in order; all arrays of one length. Values that are not known are not looked at."""
        count = len(known)
        if not count:
            return
        bad = bad & known
        self._skipped += int(np.count_nonzero(skipped))
        self._known += int(np.count_nonzero(known))
        self._bad += int(np.count_nonzero(bad))
        self._stretches(known, bad, restored)
        begins = self._begins(known, bad, restored)
        self._failures += len(begins)
        sound_loss = loss_known & ~bad
        at = np.flatnonzero(sound_loss)
        self._recovery.add(
            at + self._count,
            np.asarray(loss[at], np.float64),
            begins + self._count,
            np.flatnonzero(restored) + self._count,
            self._count + count,
        )
        self._clip_known += int(np.count_nonzero(clip_known))
        self._clipped += int(np.count_nonzero(clipped & clip_known))
        recent = np.stack((clip_known[-CLIP_STEPS:], clipped[-CLIP_STEPS:]))
        self._recent_clips = np.concatenate((self._recent_clips, recent), axis=1)[:, -CLIP_STEPS:]
        keep = slice(None) if self._jitter_steps is None else slice(-self._jitter_steps, None)
        finite = np.where(loss_known[keep], loss[keep], np.nan)
        self._tail_loss = np.concatenate((self._tail_loss, finite))[keep]
        self._tail_restored = np.concatenate((self._tail_restored, restored[keep]))[keep]
        self._count += count

    def _begins(self, known: Bools, bad: Bools, restored: Bools) -> NDArray[np.int64]:
        """Where failures begin: at a bad attempt after a sound one, or the first one after a rollback."""
        where = np.flatnonzero(known)
        trajectory = np.cumsum(restored) + self._trajectory
        self._trajectory = int(trajectory[-1])
        if not len(where):
            return where
        states, trajectories = bad[where], trajectory[where]
        before, same = self._last_known
        begins: NDArray[np.int64] = where[
            states
            & ~(np.concatenate(([before], states[:-1])) & (np.concatenate(([same], trajectories[:-1])) == trajectories))
        ]
        self._last_known = bool(states[-1]), int(trajectories[-1])
        return begins

    def _stretches(self, known: Bools, bad: Bools, restored: Bools) -> None:
        """Sound attempts in a row: a bad one ends the row, a rollback ends it before its first attempt."""
        sound = np.concatenate(([0], np.cumsum(known & ~bad)))
        ends = np.flatnonzero(bad | restored)
        if not len(ends):
            self._stretch += int(sound[-1])
        else:
            until = sound[ends]
            self._longest = max(self._longest, self._stretch + int(until[0]), int(np.diff(until).max(initial=0)))
            self._stretch = int(sound[-1] - until[-1])
        self._longest = max(self._longest, self._stretch)

    def figures(self) -> StabilityFigures:
        """The figures as of the attempts so far."""
        if not self._count:
            return StabilityFigures()
        told = self._known > 0
        sound = self._known - self._bad
        judged, recovered = self._recovery.judged, self._recovery.recovered
        clip_known, clipped = self._recent_clips
        recent = int(np.count_nonzero(clip_known))
        return StabilityFigures(
            steps=self._known,
            failures=self._failures if told else None,
            mean_steps_between_failures=sound / self._failures if self._failures else None,
            mean_steps_at_least=sound if told and not self._failures else None,
            loss_jitter=self._jitter(),
            recovery_rate=recovered / judged if judged else None,
            recovered=recovered,
            judged=judged,
            longest_stable_stretch=self._longest if told else None,
            skips_per_1000_steps=1000 * self._skipped / self._known if told else None,
            clip_frequency=self._clipped / self._clip_known if self._clip_known else None,
            clip_frequency_recent=int(np.count_nonzero(clipped & clip_known)) / recent if recent else None,
        )

    def _jitter(self) -> float | None:
        loss = self._tail_loss
        finite = np.isfinite(loss)
        pairs = finite[1:] & finite[:-1] & ~self._tail_restored[1:]
        if not pairs.any():
            return None
        with np.errstate(over="ignore", invalid="ignore"):  # losses near float64's limits, and beside infinite ones
            level = float(np.median(np.abs(loss[finite])))
            change = float(np.median(np.abs(np.diff(loss)[pairs])))
        return change / level if 0 < level < np.inf and change < np.inf else None


def read(records: StepRecords, start: int, stop: int, into: Stability) -> None:
    """Take in the records ``start`` to ``stop`` of a run; columns that its layout lacks are unknown."""
    none = np.zeros(stop - start, np.bool_)

    def values(name: str) -> tuple[Any, Bools]:
        if name not in records.names:
            return none, none
        return records.column(name, start, stop), records.known(name, start, stop)

    def flag(name: str) -> Bools:
        return records.flag(name, start, stop) if name in records.flag_names else none

    loss, loss_known = values("loss")
    norm, norm_known = values("grad_norm")
    skipped = flag("skipped")
    bad = skipped | (loss_known & ~np.isfinite(loss)) | (norm_known & ~np.isfinite(norm))
    into.add(
        loss,
        skipped,
        known=bad | loss_known | norm_known | values("scale")[1],
        loss_known=loss_known,
        bad=bad,
        clipped=flag("clipped"),
        clip_known=values("clip_coef")[1],
        restored=flag("restored"),
    )


class Recoveries:
    """Judges each failure: did the loss come back into its band within ``RECOVERY_STEPS`` attempts."""

    def __init__(self) -> None:
        self.judged = 0
        self.recovered = 0
        self._at = np.empty(0, np.int64)  # attempts with a sound loss that may still be needed, and their losses
        self._loss: Floats = np.empty(0)
        self._open = np.empty(0, np.int64)  # first attempts of failures not judged yet
        self._rollbacks = np.empty(0, np.int64)

    def add(self, at: Any, losses: Floats, begins: Any, rollbacks: Any, count: int) -> None:
        """New sound losses (attempt, value), failures and rollbacks, by attempt; ``count`` attempts are known now."""
        self._at = np.concatenate((self._at, at))
        self._loss = np.concatenate((self._loss, losses))
        self._open = np.concatenate((self._open, begins))
        self._rollbacks = np.concatenate((self._rollbacks, rollbacks))
        if len(self._open):
            self._judge(count)
        needed = self._open[0] if len(self._open) else count
        keep = max(0, int(np.searchsorted(self._at, needed)) - BAND_STEPS)
        self._at, self._loss = self._at[keep:], self._loss[keep:]
        # The newest rollback stays: it bounds the band of failures to come.
        last = max(0, int(np.searchsorted(self._rollbacks, needed, side="right")) - 1)
        self._rollbacks = self._rollbacks[last:]

    def _judge(self, count: int) -> None:
        begins, at, losses = self._open, self._at, self._loss
        place = np.searchsorted(self._rollbacks, begins, side="right")
        bounds = np.concatenate(([-1], self._rollbacks, [np.iinfo(np.int64).max]))
        since, rolled_back = bounds[place], bounds[place + 1]
        after = np.searchsorted(at, begins)  # each failure's first sound loss after it
        first = np.maximum(after - BAND_STEPS, np.searchsorted(at, since))
        edge = _highest(losses, first, after)
        end = np.minimum(begins + RECOVERY_STEPS, rolled_back)
        last = np.searchsorted(at, end)
        has_band = after > first
        recovered = np.zeros(len(begins), np.bool_)
        reach = after + RECOVERY_MEDIAN
        steps = np.arange(RECOVERY_MEDIAN)
        while True:
            looked = np.flatnonzero(has_band & ~recovered & (reach <= last))
            if not len(looked):
                break
            medians = np.median(losses[(reach[looked] - RECOVERY_MEDIAN)[:, None] + steps], axis=1)
            recovered[looked] = medians <= edge[looked]
            reach[looked] += 1
        decided = recovered | (end <= count)
        self.recovered += int(np.count_nonzero(recovered))
        self.judged += int(np.count_nonzero(decided & has_band))
        self._open = begins[~decided]


def _highest(losses: Floats, first: Any, end: Any) -> Floats:
    """The largest of ``losses[first:end]`` for each pair, at most ``BAND_STEPS`` values; -inf for none."""
    places = end[:, None] - 1 - np.arange(BAND_STEPS)
    values = np.where(places >= first[:, None], losses[np.maximum(places, 0)] if len(losses) else -np.inf, -np.inf)
    highest: Floats = values.max(axis=1)
    return highest
