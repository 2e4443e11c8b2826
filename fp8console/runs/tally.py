"""Sums over a run's records and events, carried on from call to call."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8console.protocol.numbers import number
from fp8console.runs import stability
from fp8console.runs.reader import EventLog, StepRecords, is_primary

BLOCK = 65_536
NOTES_KEPT = 5


class Tally:
    """What has to be known of every record and event so far. ``update`` takes in what is new."""

    def __init__(self) -> None:
        self._restart_records(-1)
        self._restart_events(-1)

    def _restart_records(self, generation: int) -> None:
        self._records_generation = generation
        self._records_done = 0
        self.first_step: int | None = None
        self.skipped = 0
        self.trouble_step: int | None = None  # newest record that was skipped or not finite
        self.nan_since: dict[str, int | None] = {"loss": None, "grad_norm": None}
        self.stability = stability.Stability()

    def _restart_events(self, generation: int) -> None:
        self._events_generation = generation
        self._events_done = 0
        self.pid: int | None = None
        self.torch: str | None = None
        self.world_size: int | None = None
        self.ended: dict[str, Any] | None = None
        self.stopping: str | None = None
        self.stopped_by_operator = False
        self.paused: tuple[int | None, float] | None = None
        self.rolled_back_at: int | None = None
        self.incident: str | None = None
        self.notes: list[str] = []
        self.profile_clip: float | None = None  # until the operator sets one
        self.points: dict[tuple[str, int, str | None], dict[str, Any]] = {}
        self.scaler: dict[str, Any] | None = None
        self.scaler_note: str | None = None
        self.settings: dict[str, Any] = {}
        self._open_commands: dict[Any, dict[str, Any]] = {}
        self._open_hardware: dict[Any, dict[str, Any]] = {}

    @property
    def hardware_alerts(self) -> list[dict[str, Any]]:
        """The episodes of hardware trouble under way, the oldest first."""
        return list(self._open_hardware.values())

    @property
    def asked(self) -> dict[str, Any] | None:
        """The newest command that was neither applied nor refused yet."""
        return next(reversed(self._open_commands.values()), None)

    @property
    def last_trouble(self) -> int | None:
        """The newest step that was skipped, not finite or rolled back from; None when there was none."""
        known = [step for step in (self.trouble_step, self.rolled_back_at) if step is not None]
        return max(known, default=None)

    @property
    def healthy_since(self) -> int | None:
        """The step of the last trouble, else the first step; None before that."""
        return self.last_trouble if self.last_trouble is not None else self.first_step

    def update(self, steps: StepRecords, log: EventLog) -> None:
        """Takes in the records and events that were not seen before."""
        if steps.generation != self._records_generation:
            self._restart_records(steps.generation)
        if log.generation != self._events_generation:
            self._restart_events(log.generation)
        large = len(steps) - self._records_done > BLOCK
        while self._records_done < len(steps):
            stop = min(len(steps), self._records_done + BLOCK)
            self._block(steps, self._records_done, stop)
            self._records_done = stop
            if large:
                steps.release_pages()
        while self._events_done < len(log.arrived):
            event = log.arrived[self._events_done]
            self._events_done += 1
            if is_primary(event):
                self._event(event)

    def _block(self, steps: StepRecords, start: int, stop: int) -> None:
        numbers = steps.column("step", start, stop)
        if self.first_step is None:
            self.first_step = int(numbers[0])
        trouble = np.zeros(stop - start, np.bool_)
        if "skipped" in steps.flag_names:
            skipped = steps.flag("skipped", start, stop)
            self.skipped += int(np.count_nonzero(skipped))
            trouble |= skipped
        for name in self.nan_since:
            if name not in steps.names:
                continue
            known = steps.known(name, start, stop)
            broken = known & ~np.isfinite(steps.column(name, start, stop))
            trouble |= broken
            self._streak(name, numbers, known, broken)
        if trouble.any():
            self.trouble_step = int(numbers[np.flatnonzero(trouble)[-1]])
        stability.read(steps, start, stop, self.stability)

    def _streak(self, name: str, numbers: Any, known: Any, broken: Any) -> None:
        """Since when ``name`` has not been finite, unknown values left out."""
        finite = np.flatnonzero(known & ~broken)
        after = broken
        if len(finite):
            self.nan_since[name] = None
            after = broken[finite[-1] + 1 :]
            numbers = numbers[finite[-1] + 1 :]
        if self.nan_since[name] is None and after.any():
            self.nan_since[name] = int(numbers[np.flatnonzero(after)[0]])

    def _event(self, event: dict[str, Any]) -> None:
        take = getattr(self, f"_on_{event['kind']}", None)
        if take is not None:
            take(event)

    def _on_launched(self, event: dict[str, Any]) -> None:
        self.pid = event.get("pid")

    def _on_rank_joined(self, event: dict[str, Any]) -> None:
        self.torch = event.get("torch") or self.torch
        self.world_size = event.get("world_size") or self.world_size

    def _on_asked(self, event: dict[str, Any]) -> None:
        self._open_commands[event.get("id")] = {
            "id": event.get("id"),
            "command": event.get("command"),
            "text": event.get("text"),
            "time": event["time"],
        }

    def _on_applied(self, event: dict[str, Any]) -> None:
        self._open_commands.pop(event.get("id"), None)

    def _on_refused(self, event: dict[str, Any]) -> None:
        self._open_commands.pop(event.get("id"), None)

    def _on_stopping(self, event: dict[str, Any]) -> None:
        self.stopping = str(event.get("how"))
        self.stopped_by_operator = self.stopped_by_operator or event.get("how") == "stop"

    def _on_ended(self, event: dict[str, Any]) -> None:
        self.ended = event
        self.paused = None

    def _on_paused(self, event: dict[str, Any]) -> None:
        self.paused = (event.get("step"), event["time"])

    def _on_resumed(self, event: dict[str, Any]) -> None:
        self.paused = None

    def _on_scaler(self, event: dict[str, Any]) -> None:
        common = {"time", "kind", "step", "text", "rank", "file"}
        self.scaler = {**(self.scaler or {}), **{k: v for k, v in event.items() if k not in common}}
        self.scaler_note = None
        self.settings.update({k: self.scaler[k] for k in ("floor", "cap") if k in event})

    def _on_settings(self, event: dict[str, Any]) -> None:
        self.profile_clip = None if "clip_norm" in event else self.profile_clip
        names = ("lr_scale", "clip_norm", "clip_z", "floor", "cap", "total_steps")
        self.settings.update({name: event[name] for name in names if name in event})

    def _on_profile(self, event: dict[str, Any]) -> None:
        applied = event.get("applied")
        self.profile_clip = number(applied.get("clip_norm")) if isinstance(applied, dict) else None

    def _on_notice(self, event: dict[str, Any]) -> None:
        if event.get("part") == "scaler":
            self.scaler_note = str(event.get("text"))
        self._note(event)

    def _on_fault(self, event: dict[str, Any]) -> None:
        self._note(event)

    def _note(self, event: dict[str, Any]) -> None:
        text = str(event.get("text"))
        if text not in self.notes:
            self.notes = [*self.notes, text][-NOTES_KEPT:]

    def _incident(self, event: dict[str, Any]) -> None:
        text, step = str(event.get("text")).partition("; ")[0], event.get("step")
        if isinstance(step, int) and f"{step:,}" not in text and str(step) not in text:
            text = f"{text} at step {step:,}"
        self.incident = text

    def _on_hardware(self, event: dict[str, Any]) -> None:
        names = ("episode", "what", "gpus", "since", "step", "text", "evidence")
        self._open_hardware[event.get("episode")] = {name: event.get(name) for name in names}
        self.incident = str(event.get("text")).partition(" (")[0]

    def _on_recovered(self, event: dict[str, Any]) -> None:
        if event.get("episode") is not None:
            self._open_hardware.pop(event["episode"], None)

    _on_skipped = _incident
    _on_nonfinite = _incident

    def _on_clipping(self, event: dict[str, Any]) -> None:
        step = event.get("step")
        at = f" at step {step:,}" if isinstance(step, int) else ""
        self.incident = f"clipped {event.get('count')} of {event.get('window')} steps{at}"

    def _on_rolled_back(self, event: dict[str, Any]) -> None:
        self._incident(event)
        at, to = event.get("step"), event.get("to")
        if isinstance(at, int) and isinstance(to, int):
            self.incident = f"rolled back to {to:,} at step {at:,}"
        if isinstance(at, int):
            self.rolled_back_at = at
            if isinstance(to, int):
                # What lies between is off the trajectory that the run now follows.
                for point in self.points.values():
                    if to < point["step"] <= at:
                        point["abandoned"] = True
        if number(event.get("lr_scale")) is not None:
            self.settings["lr_scale"] = event["lr_scale"]

    def _on_snapshot(self, event: dict[str, Any]) -> None:
        self._point(event, "memory")

    def _on_checkpoint(self, event: dict[str, Any]) -> None:
        self._point(event, "disk")

    def _point(self, event: dict[str, Any], where: str) -> None:
        point = event.get("point")
        if not isinstance(point, dict) or not isinstance(point.get("step"), int):
            return
        kept = {name: _value(value) for name, value in point.items()}
        kept.setdefault("kind", "snapshot" if where == "memory" else "checkpoint")
        for name in ("tag", "time", "loss", "grad_norm", "scale", "lr", "bytes", "verified", "healthy"):
            kept.setdefault(name, None)
        kept["where"], kept["abandoned"] = where, False
        self.points[where, point["step"], kept["tag"]] = kept

    def _on_verified(self, event: dict[str, Any]) -> None:
        for (where, step, _), point in self.points.items():
            if step == event.get("point_step") and where == event.get("where", where):
                point["verified"] = event.get("ok")

    def _on_point_dropped(self, event: dict[str, Any]) -> None:
        for key in list(self.points):
            where, step, tag = key
            if step == event.get("point_step") and where == event.get("where") and event.get("tag", tag) == tag:
                del self.points[key]


def _value(value: Any) -> Any:
    """A point's field, with a non-finite number that went by name made a float again."""
    parsed = number(value) if isinstance(value, str) else None
    return value if parsed is None else parsed
