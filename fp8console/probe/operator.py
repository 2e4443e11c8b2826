"""Carries out an operator's commands at the step boundary, on the training thread."""

from __future__ import annotations

import time
from typing import Any

from fp8console.probe.checkpoints import CheckpointError
from fp8console.probe.episodes import scale_text, setting_text, value_text
from fp8console.probe.state import PartlyRestored

#: Seconds that a paused training waits for a supervisor that is gone before it goes on by itself.
ORPHAN_SECONDS = 60.0
#: Times that a script may catch the exit of a stop before it is left to the supervisor's signals.
STOP_TRIES = 3


class Operator:
    """Obeys one command at a time; holds the training while it is paused."""

    def __init__(self, probe: Any) -> None:
        self._probe = probe
        self._pause_at: int | None = None
        self._waiting_step: str | None = None  # id of a `step` command, answered when the training is paused again
        self._paused = False
        self._stopping = 0

    def at_boundary(self, step: int) -> None:
        """Apply what is agreed for this step; returns when the training may go on. Raises SystemExit for a stop."""
        if 0 < self._stopping <= STOP_TRIES:
            self._leave()
        waited = time.perf_counter()
        agreed = self._probe.agreement.arrive(step)
        if agreed is None and self._pause_at != step:
            return
        if agreed is not None:
            self._probe.hold(time.perf_counter() - waited)
            self._obey(agreed.id, agreed.command, step)
        if self._pause_at == step:
            self._pause_at = None
            self._paused = True
        if self._paused:
            self._hold(step)

    def _hold(self, step: int) -> None:
        probe = self._probe
        started = time.perf_counter()
        probe.catch_up()
        probe.event("paused", f"paused at step {step:,}", step)
        probe.catch_up()
        self._end_waiting_step(step, {})
        lost_since: float | None = None
        while self._paused:
            agreed = probe.agreement.wait_paused(0.5)
            if agreed is not None:
                self._obey(agreed.id, agreed.command, step)
                probe.catch_up()
                lost_since = None
            elif probe.agreement.lost:
                lost_since = lost_since or time.monotonic()
                if time.monotonic() - lost_since > ORPHAN_SECONDS:
                    probe.notice("the supervisor is gone: the paused training goes on by itself", "commands")
                    self._paused = False
            else:
                lost_since = None
        probe.agreement.unpause()
        held = time.perf_counter() - started
        probe.hold(held)
        probe.event("resumed", f"resumed after {held:.1f} s", step, held=held)

    def _obey(self, id: str, command: dict[str, Any], step: int) -> None:
        """One command; whatever goes wrong becomes the reason in the answer."""
        started = time.perf_counter()
        try:
            action = getattr(self, "_do_" + command["name"])
            detail = action(id, command, step)
        except (CheckpointError, PartlyRestored) as error:
            self._refused(id, step, str(error))
        except Exception as error:
            self._probe.guard.fail("commands", error)
            self._refused(id, step, f"{command.get('name')} failed: {type(error).__name__}: {error}")
        else:
            if detail is not None:
                self._done(id, step, detail)
        if not self._paused:
            self._probe.hold(time.perf_counter() - started)
        if 0 < self._stopping <= STOP_TRIES:
            self._leave()

    def _done(self, id: str, step: int, detail: dict[str, Any]) -> None:
        self._probe.send({"done": id, "step": step, "ok": True, "detail": detail})

    def _refused(self, id: str, step: int, reason: str) -> None:
        self._probe.send({"done": id, "step": step, "ok": False, "reason": reason})

    # -- commands: each returns the answer's detail, or None when it answers itself -------------------------------
    def _do_pause(self, id: str, command: dict[str, Any], step: int) -> dict[str, Any]:
        self._paused = True
        return {}

    def _do_resume(self, id: str, command: dict[str, Any], step: int) -> dict[str, Any]:
        self._paused = False
        self._pause_at = None
        self._end_waiting_step(step, {"interrupted": "resume"})
        return {}

    def _do_step(self, id: str, command: dict[str, Any], step: int) -> dict[str, Any] | None:
        self._end_waiting_step(step, {"interrupted": "step"})
        self._paused = False
        self._pause_at = step + command["count"]
        self._waiting_step = id
        # Other commands, a pause for one, need not wait until the steps are done.
        self._probe.send({"taken": id, "step": step})
        return None

    def _end_waiting_step(self, step: int, detail: dict[str, Any]) -> None:
        if self._waiting_step is not None:
            self._done(self._waiting_step, step, detail)
            self._waiting_step = None

    def _do_set(self, id: str, command: dict[str, Any], step: int) -> dict[str, Any]:
        probe = self._probe
        now = self._apply_settings(command, step)
        if set(now) - {"lr_scale", "clip_norm", "clip_z"}:
            probe.say_scaler()
        return {"now": now}

    def _apply_settings(self, command: dict[str, Any], step: int) -> dict[str, Any]:
        steering = self._probe.steering
        now: dict[str, Any] = steering.apply(command)
        self._probe.event(
            "settings",
            "settings: " + ", ".join(f"{name} {setting_text(value)}" for name, value in now.items()),
            step,
            lr_scale=steering.lr_scale,
            clip_norm=steering.clip_norm,
            clip_z=steering.clip_z if steering.clip_norm == "auto" else None,
            floor=steering.floor,
            cap=steering.cap,
        )
        return now

    def _do_snapshot_every(self, id: str, command: dict[str, Any], step: int) -> dict[str, Any]:
        self._probe.points.set_cadence(command["steps"], step)
        return {"steps": command["steps"]}

    def _do_checkpoint(self, id: str, command: dict[str, Any], step: int) -> None:
        probe = self._probe

        def written(result: dict[str, Any]) -> None:
            if result["ok"]:
                self._done(id, step, {"path": result["path"], "digest": result["digest"], "bytes": result["bytes"]})
            else:
                self._refused(id, step, result["reason"])

        probe.points.checkpoint(step, {**probe.about_now(), "tag": command.get("tag")}, command.get("tag"), written)
        # The copy is taken: the next command need not wait for the disk.
        probe.send({"taken": id, "step": step})

    def _do_rollback(self, id: str, command: dict[str, Any], step: int) -> dict[str, Any]:
        probe = self._probe
        probe.catch_up()
        before = self._where(step, probe.last.get("loss"))
        result = probe.points.roll_back(command["to"])
        probe.points.forget_after(command["to"])
        probe.after_rollback()
        probe.steering.fit_to_settings()
        settings = {key: value for key, value in command.items() if key != "to" and value is not None}
        if len(settings) > 1:
            self._apply_settings(settings, step)
        rewound = probe.data is not None and probe.data.name in result["registered"]
        if rewound:
            probe.data.restart = True
        for callback in probe.restore_callbacks:
            self._tell_script(callback, command["to"])
        after = self._where(command["to"], result["point"].get("loss"))
        detail = {
            "to": command["to"],
            "where": result["where"],
            "before": before,
            "after": after,
            "digest": result["digest"],
            "digests_equal": result["digests_equal"],
            "data_rewound": rewound,
            "note": "weights and data rolled back" if rewound else "weights rolled back, data not",
        }
        probe.event("rolled_back", f"rolled back to {command['to']:,}: {_change(before, after)}", step, **detail)
        probe.say_scaler()
        return detail

    def _tell_script(self, callback: Any, step: int) -> None:
        try:
            callback(step)
        except Exception as error:  # the script's own fault: no reason to switch anything of ours off
            name = getattr(callback, "__name__", type(callback).__name__)
            self._probe.notice(f"on_restore function {name} failed: {type(error).__name__}: {error}", "commands")

    def _do_stop(self, id: str, command: dict[str, Any], step: int) -> dict[str, Any] | None:
        probe = self._probe
        probe.catch_up()
        results: list[dict[str, Any]] = []
        try:
            probe.points.checkpoint(step, {**probe.about_now(), "tag": None}, None, results.append)
            probe.points.store.wait()
        except Exception as error:
            results.append({"ok": False, "reason": f"{type(error).__name__}: {error}"})
        result = results[-1] if results else {"ok": False, "reason": "the checkpoint was not written"}
        if not result["ok"]:
            # Better a training that runs on than one that ended without what was asked for.
            self._refused(id, step, f"not stopped: {result['reason']}")
            return None
        self._stopping = 1
        return {"path": result["path"], "digest": result["digest"]}

    def end(self) -> None:
        """End the training at this boundary, without a checkpoint. Raises SystemExit."""
        self._stopping = 1
        self._leave()

    def _leave(self) -> None:
        self._stopping += 1
        self._probe.catch_up()
        if self._paused:  # a script that catches the exit goes on
            self._paused = False
            self._probe.agreement.unpause()
        raise SystemExit(0)

    def _where(self, step: int, loss: float | None) -> dict[str, Any]:
        probe = self._probe
        settings = probe.steering.scaler_settings()
        lr = None
        for optimizer in probe.observer.optimizers:
            value = optimizer.param_groups[0].get("lr")
            lr = None if value is None else float(value) * probe.steering.lr_scale
            break
        return {"step": step, "loss": loss, "scale": settings["scale"] if settings else None, "lr": lr}


def _change(before: dict[str, Any], after: dict[str, Any]) -> str:
    texts = []
    for name, text in (("loss", value_text), ("scale", scale_text), ("lr", value_text)):
        was, now = before[name], after[name]
        shown = ["unknown" if value is None else text(value) for value in (was, now)]
        if was is not None and was == now:
            texts.append(f"{name} {shown[0]} as before")
        elif was is not None or now is not None:
            texts.append(f"{name} {shown[0]} -> {shown[1]}")
    return ", ".join(texts) or "state put back"
