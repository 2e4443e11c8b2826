"""What a run is doing, from its directory's files alone; cheap enough to ask for many times a second.

Sums over records and events are kept with the run (``Run.memo``) and carried on from where they stand, so a call on a
run of a million steps looks only at what is new.
"""

from __future__ import annotations

import math
import socket
import time as clock
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8console.diagnosis import bounds, cards
from fp8console.protocol.identity import ProcessIdentity, is_alive
from fp8console.protocol.numbers import number, to_jsonable
from fp8console.runs.reader import StepRecords
from fp8console.runs.run import Run
from fp8console.runs.stability import StabilityFigures
from fp8console.runs.tally import Tally

#: Speed is told over the steps of the last seconds, and over at least and at most so many steps.
SPEED_SECONDS = 5.0
SPEED_STEPS = (20, 10_000)
CLIPPED_OVER = 1_000
#: A run on another machine counts as alive while its files are younger than this, in seconds.
FOREIGN_SILENCE = 60.0


@dataclass
class RunStatus:
    """A run at a glance. None is unknown; NaN and inf are values that were measured."""

    id: str
    name: str | None
    state: str  # starting | running | paused | stopping | finished | failed | lost
    run_dir: str
    pid: int | None = None
    command: list[str] | None = None
    cwd: str | None = None
    host: str | None = None
    torch: str | None = None
    world_size: int | None = None
    created: float | None = None  # seconds since the epoch, as all times here
    ended: float | None = None
    exit_status: int | None = None
    signal: str | None = None
    error: str | None = None
    supervised: bool | None = None  # whether the supervisor lives; None when that can't be told from here
    # newest step
    step: int | None = None
    step_time: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    clip_coef: float | None = None
    clip_limit: float | None = None
    lr: float | None = None
    scale: float | None = None
    growth_tracker: int | None = None
    micro_batches: int | None = None
    device_memory: int | None = None  # bytes
    epoch: int | None = None
    epoch_batch: int | None = None
    epoch_batches: int | None = None
    # speed
    step_seconds: float | None = None
    steps_per_second: float | None = None
    silent_seconds: float | None = None  # since the last step, when that is far longer than steps take
    data_wait_share: float | None = None
    total_steps: int | None = None
    seconds_left: float | None = None
    # health
    skipped: int | None = None  # skipped steps so far
    clipped_share: float | None = None  # of the last thousand steps
    healthy_since: int | None = None
    healthy_steps: int | None = None
    nan_since: dict[str, int | None] = field(default_factory=lambda: {"loss": None, "grad_norm": None})
    last_incident: str | None = None
    stability: StabilityFigures = field(default_factory=StabilityFigures)
    notes: list[str] = field(default_factory=list)
    # steering
    asked: dict[str, Any] | None = None
    paused_at: int | None = None
    paused_since: float | None = None
    restore_points: list[dict[str, Any]] = field(default_factory=list)
    scaler: dict[str, Any] | None = None
    scaler_note: str | None = None
    lr_scale: float | None = None
    clip_norm: float | str | None = None  # the operator's: a norm, "auto", or None for the script's own
    clip_z: float | None = None  # of "auto"
    floor: float | None = None
    cap: float | None = None
    # hardware
    hardware: dict[str, Any] | None = None  # the newest sample
    balance: float | None = None  # lowest over highest mean busy of the run's cards; see diagnosis/cards.py
    bounds: list[dict[str, Any]] | None = None  # what bounds the step: what, text, evidence; None: not known
    hardware_alerts: list[dict[str, Any]] = field(default_factory=list)  # episodes under way

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values; NaN and the infinities as "NaN", "Infinity" and "-Infinity"."""
        data: dict[str, Any] = to_jsonable(asdict(self))
        return data


#: A running training is silent when its last step is older than both: seconds, and times the usual step.
SILENCE = 10.0
SILENT_STEPS = 20.0


def status(run: Run, now: float | None = None) -> RunStatus:
    """The status of ``run`` as of its last ``refresh``; ``now`` is for tests."""
    now = clock.time() if now is None else now
    tally: Tally = run.memo.setdefault("tally", Tally())
    steps = run.rank(0)
    tally.update(steps, run.events)
    info = run.info
    result = RunStatus(id=run.id, name=_text(info.get("name")), state="lost", run_dir=str(run.run_dir))
    _launch(result, info, tally)
    _newest(result, steps)
    _speed(result, steps)
    _health(result, steps, tally)
    result.state = _state(run, result, tally, now)
    _steering(result, tally)
    if result.state == "running" and result.step_time is not None and result.step_seconds is not None:
        silent = now - result.step_time
        if silent > max(SILENCE, SILENT_STEPS * result.step_seconds):
            result.silent_seconds, result.steps_per_second = silent, None
            result.notes.append(f"no step for {silent:.0f} s; a step takes {result.step_seconds:.3g} s")
    if result.total_steps is None:
        result.total_steps = _total_steps(info, tally)
    moving = result.silent_seconds is None and result.state in ("running", "paused")
    if moving and None not in (result.total_steps, result.step, result.step_seconds):
        assert result.total_steps is not None and result.step is not None and result.step_seconds is not None
        result.seconds_left = max(0, result.total_steps - result.step) * result.step_seconds
    _hardware(result, run, tally, now)
    result.notes = [*(note for note in (run.problem, steps.problem) if note), *tally.notes, *result.notes]
    return result


def _hardware(result: RunStatus, run: Run, tally: Tally, now: float) -> None:
    """The newest sample and what follows from the last ones; of a run that has ended, as it was then."""
    result.hardware = run.hardware.latest
    over = result.state in ("finished", "failed", "lost")
    result.hardware_alerts = [] if over else tally.hardware_alerts
    samples = cards.recent(run.hardware.history)
    newest = number(samples[-1].get("time")) if samples else None
    if newest is not None and not over and now - newest > cards.STALE:
        samples = []
    moving = result.state in ("running", "stopping", "finished", "failed") and result.silent_seconds is None
    share = result.data_wait_share
    share = math.floor(100 * share) / 100 if share is not None and math.isfinite(share) else None
    # Asked for many times a second, and new once a second.
    asked = run.hardware.taken, bool(samples), share, moving
    if run.memo.get("hardware", (None,))[0] != asked:
        found = bounds.bounds(samples, share) if moving else []
        run.memo["hardware"] = asked, cards.balance(samples), [asdict(bound) for bound in found] or None
    _, result.balance, result.bounds = run.memo["hardware"]


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _launch(result: RunStatus, info: dict[str, Any], tally: Tally) -> None:
    command = info.get("command")
    result.command = [str(word) for word in command] if isinstance(command, list) else None
    result.cwd = _text(info.get("cwd"))
    result.host = _text(info.get("host"))
    versions = info.get("versions")
    result.torch = _text(versions.get("torch")) if isinstance(versions, dict) else None
    result.torch = result.torch or tally.torch
    result.world_size = _whole(info.get("world_size")) or tally.world_size
    result.created = number(info.get("created"))
    training = ProcessIdentity.from_json(info.get("training"))
    result.pid = training.pid if training is not None else tally.pid
    end = tally.ended or {}
    result.exit_status = _first(_whole(info.get("exit_status")), _whole(end.get("exit_status")))
    result.signal = _text(info.get("signal")) or _text(end.get("signal"))
    result.error = _text(info.get("error")) or _text(end.get("error"))
    result.ended = _first(number(info.get("ended")), number(end.get("time")))


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _newest(result: RunStatus, steps: StepRecords) -> None:
    def last(name: str) -> Any:
        return steps.last(name) if name in steps.names else None

    result.step, result.step_time = last("step"), last("time")
    for name in ("loss", "grad_norm", "clip_coef", "clip_limit", "lr", "scale"):
        setattr(result, name, last(name))
    for name in ("growth_tracker", "micro_batches", "device_memory"):
        setattr(result, name, last(name))
    result.epoch, result.epoch_batch, result.epoch_batches = last("epoch"), last("batch"), last("epoch_batches")


def _speed(result: RunStatus, steps: StepRecords) -> None:
    if not len(steps) or "duration" not in steps.names:
        return
    least, most = SPEED_STEPS
    start = max(0, len(steps) - most)
    times = steps.column("time", start)
    recent = int(np.count_nonzero(times >= times[-1] - SPEED_SECONDS))
    start = max(start, len(steps) - max(recent, least))
    durations = _known(steps, "duration", start)
    # The first step of a process carries its start-up (compilation, caches): told only while there is no other.
    if start == 0 and len(durations) > 1:
        durations = durations[1:]
    total = float(durations.sum())
    if len(durations) and total > 0:
        result.step_seconds = total / len(durations)
        result.steps_per_second = len(durations) / total
    if "data_wait" in steps.names:
        both = steps.known("data_wait", start) & steps.known("duration", start)
        whole = float(steps.column("duration", start)[both].sum())
        if whole > 0:
            result.data_wait_share = float(steps.column("data_wait", start)[both].sum()) / whole


def _known(steps: StepRecords, name: str, start: int) -> NDArray[Any]:
    values: NDArray[Any] = steps.column(name, start)[steps.known(name, start)]
    finite: NDArray[Any] = values[np.isfinite(values)]
    return finite


def _health(result: RunStatus, steps: StepRecords, tally: Tally) -> None:
    result.skipped = tally.skipped if len(steps) else None
    result.healthy_since = tally.healthy_since
    if result.step is not None and tally.first_step is not None:
        trouble = tally.last_trouble
        result.healthy_steps = result.step - (trouble if trouble is not None else tally.first_step - 1)
    result.nan_since = dict(tally.nan_since)
    result.last_incident = tally.incident
    result.stability = tally.stability.figures()
    if "clip_coef" in steps.names and "clipped" in steps.flag_names:
        start = max(0, len(steps) - CLIPPED_OVER)
        known = steps.known("clip_coef", start)
        if known.any():
            result.clipped_share = float(steps.flag("clipped", start)[known].mean())


def _state(run: Run, result: RunStatus, tally: Tally, now: float) -> str:
    if result.exit_status is not None or tally.ended is not None:
        return "finished" if result.exit_status == 0 or tally.stopped_by_operator else "failed"
    if not _lives(run, result, now):
        return "lost"
    if tally.stopping:
        return "stopping"
    if tally.paused is not None:
        return "paused"
    return "running" if result.step is not None else "starting"


def _lives(run: Run, result: RunStatus, now: float) -> bool:
    """Whether anything of the run still goes on; sets ``supervised``."""
    supervisor = ProcessIdentity.from_json(run.info.get("supervisor"))
    training = ProcessIdentity.from_json(run.info.get("training"))
    if result.host not in (None, socket.gethostname()):
        latest = run.hardware.latest or {}
        news = [number(value) for value in (result.created, result.step_time, latest.get("time"))]
        age = now - max((value for value in news if value is not None), default=0.0)
        result.notes.append(f"runs on {result.host}; the last news from there is {max(0.0, age):.0f} s old")
        return age < FOREIGN_SILENCE
    result.supervised = supervisor is not None and is_alive(supervisor)
    if result.supervised:
        return True
    if training is not None and is_alive(training):
        result.notes.append(
            f"the supervisor is gone: the training (pid {training.pid}) takes no commands; it goes on, from a pause "
            f"after a minute; to end it: kill {training.pid}"
        )
        return True
    return False


def _steering(result: RunStatus, tally: Tally) -> None:
    over = result.state in ("finished", "failed", "lost")
    result.asked = None if over else tally.asked
    if not over and tally.paused is not None:
        result.paused_at, result.paused_since = tally.paused
    points = [dict(point) for point in tally.points.values() if not (over and point["where"] == "memory")]
    result.restore_points = sorted(points, key=lambda point: (point["step"], point.get("time") or 0.0))
    result.scaler = dict(tally.scaler) if tally.scaler is not None else None
    if result.scaler is not None and result.scale is not None:
        result.scaler["scale"] = result.scale  # the event's is as old as the last change of a setting
    result.scaler_note = tally.scaler_note
    for name in ("lr_scale", "clip_norm", "clip_z", "floor", "cap"):
        setattr(result, name, number(tally.settings.get(name)))
    if tally.settings.get("clip_norm") == "auto":
        result.clip_norm = "auto"
    wanted, now = tally.profile_clip, result.clip_limit
    if wanted is not None and (now is None or now > 0.999 * wanted):
        result.clip_norm = wanted  # where the script clips to less, that stays


def _total_steps(info: dict[str, Any], tally: Tally) -> int | None:
    settings = info.get("settings")
    given = _whole(settings.get("total_steps")) if isinstance(settings, dict) else None
    return given if given is not None else _whole(tally.settings.get("total_steps"))
