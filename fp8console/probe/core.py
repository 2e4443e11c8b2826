"""The probe of one process: puts the parts together and runs the step boundary."""

from __future__ import annotations

import collections
import math
import os
import time
from pathlib import Path
from typing import Any

import torch

from fp8console.probe import comparison, operator
from fp8console.probe.agreement import Agreement
from fp8console.probe.baseline import Baseline
from fp8console.probe.comparison import Comparison
from fp8console.probe.episodes import Episodes
from fp8console.probe.gpu_facts import gpu_facts
from fp8console.probe.guard import PARTS, Guard
from fp8console.probe.layer_sampling import LayerSampling
from fp8console.probe.link import Link
from fp8console.probe.observer import Observer
from fp8console.probe.rank import RankClaim, world
from fp8console.probe.readback import Readback
from fp8console.probe.recorder import Recorder
from fp8console.probe.restore_points import RestorePoints, mean_of_finite
from fp8console.probe.steering import Steering
from fp8console.probe.window import HostValues, StepWindow, record_values
from fp8console.protocol import events, paths, records
from fp8console.protocol.settings import Settings

#: Backward passes without a boundary after which the probe says that it sees none.
SILENT_BACKWARDS = 50
#: Steps whose losses make the loss of a restore point, and steps that must be sound for it to count as healthy.
RECENT = 20
HEALTHY = 10


UNSOUND = records.FLAGS["skipped"] | records.FLAGS["loss_nonfinite"] | records.FLAGS["grad_nonfinite"]


class Probe:
    """Joins the run at its first boundary, never earlier: most processes that import torch train nothing."""

    def __init__(self, run_dir: Path, address: str | None, settings: Settings) -> None:
        self.run_dir = run_dir
        self.step = 0
        self.guard = Guard(self._part_failed)
        self.observer = Observer(self.guard, self._at_boundary, self.notice)
        self.observer.at_once = not settings.read_late
        self.observer.on_backward = self._on_backward
        self.steering = Steering(self.observer)
        self.agreement = Agreement(self._refuses)
        self.episodes = Episodes(self.event, self.steering.has_floor)
        self.readback = Readback(self._deliver)
        self.points: RestorePoints | None = None
        self.layers: LayerSampling | None = None
        self.rank: int | None = None
        self.world_size = 1
        self.operator = operator.Operator(self)
        self.restore_callbacks: list[Any] = []
        self.registered: dict[str, Any] = {}  # the script's own parts of restore points, see api.py
        self.models: list[Any] = []  # weak references to the models it named
        self.data: Any = None  # its loader in use
        self.last: dict[str, Any] = {}  # values of the last finished record
        self.flags_next = 0
        self._settings = settings
        self._address = address
        self._link: Link | None = None
        self._early: list[dict[str, Any]] = []
        self._closed = False
        self._of_parent: tuple[Any, ...] = ()
        self._mark: float | None = None
        self._held = 0.0
        self._recent: collections.deque[float] = collections.deque(maxlen=RECENT)
        self._sound_since = 0
        self._durations: collections.deque[float] = collections.deque(maxlen=32)
        self._device_memory: int | None = None
        self._scaler_said: Any = None
        self.baseline = Baseline(self, settings) if settings.tune_steps is not None else None
        self.profile: Any = None
        if self.baseline is not None:
            self.guard.run("baseline", self.baseline.arm)
        if settings.profile is not None:
            self.guard.run("profile", self._take_profile, settings.profile)
        self.comparison = Comparison(self, settings) if comparison.wanted(settings) else None
        if self.comparison is not None:
            self.guard.run("boundary", self.comparison.begin)

    def _take_profile(self, profile: dict[str, Any]) -> None:
        from fp8console.probe.profile import ProfileSettings

        self.profile = ProfileSettings(self, profile)
        self.observer.on_scale = self.profile.before_scale

    # -- events ---------------------------------------------------------------------------------------------------
    def event(self, kind: str, text: str, step: int | None = None, **fields: Any) -> None:
        """Write an event; before the process has joined the run it is kept."""
        made = events.make(kind, text, step, **fields)
        if self._link is None:
            self._early.append(made)
            return
        self._link.event(made)
        if kind in ("snapshot", "checkpoint"):
            self._link.send({"point": fields["point"]})
        elif kind == "point_dropped":
            self._link.send({"dropped": {"step": fields["point_step"], "where": fields["where"]}})

    def notice(self, text: str, part: str) -> None:
        self.event("notice", text, self.step or None, part=part)

    def _part_failed(self, part: str, reason: str) -> None:
        self.event("fault", f"{PARTS[part]} switched off: {reason}", self.step or None, part=part, reason=reason)

    def send(self, message: dict[str, Any]) -> None:
        if self._link is not None:
            self._link.send(message)

    # -- joining --------------------------------------------------------------------------------------------------
    @property
    def joined(self) -> bool:
        return self._link is not None

    def join(self) -> None:
        """Claim a rank, open its files, connect. Called at the first boundary."""
        rank, self.world_size = world()
        self._claim = RankClaim(self.run_dir, rank)
        self.rank = self._claim.rank
        spool = paths.spool_file(self.run_dir, self.rank)
        recorder = Recorder(paths.steps_file(self.run_dir, self.rank), spool, rank=self.rank, torch=torch.__version__)
        self.step = recorder.last_step
        link = Link(self._address, recorder, paths.events_file(self.run_dir, self.rank), self.agreement)
        folder = self.run_dir / paths.CHECKPOINTS
        self.points = RestorePoints(self, self._settings, folder, self.rank)
        link.hello = {
            "rank": self.rank,
            "world_size": self.world_size,
            "pid": os.getpid(),
            "torch": torch.__version__,
            "device": self._device(),
            "gpu": gpu_facts(self._device()),
            "step": self.step,
        }
        self.layers = link.layers = LayerSampling(self, self._settings, self.run_dir, self.rank)
        link.progress = self._progress
        link.idle = self._sample_device_memory
        self._link = link
        for event in self._early:
            link.event(event)
        self._early.clear()
        link.start()

    def _on_backward(self, without_step: int) -> None:
        """Backward passes pile up and no boundary comes: join all the same, and say so."""
        if self.profile is not None:
            self.guard.run("profile", self.profile.before_backward)
        if self.comparison is not None:
            self.comparison.at_backward()
        if without_step == SILENT_BACKWARDS and self.step == 0 and not self.joined:
            self.join()
            text = f"{without_step} backward passes and no optimizer step seen: nothing can be recorded or steered yet"
            self.notice(text, "boundary")

    def _device(self) -> str:
        for optimizer in self.observer.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    return str(parameter.device)
        return "unknown"

    def close(self) -> None:
        """The end of the process: deliver what is pending, write what is queued."""
        if self._link is None or self._closed:
            return
        self._closed = True  # atexit and multiprocessing's finalizer may both come by
        if self.comparison is not None:
            self.comparison.at_end()
        if self.guard.run("boundary", self.observer.finish_by_hand):
            # Without an optimizer a step ends at the next zero_grad, and after the last there is none.
            self.step += 1
            host = HostValues(self.step, time.time(), None, self._device_memory, None, None, None, 0)
            self.guard.run(
                "records", self.readback.submit, (self.observer.window, host), self.observer.window.to_readings()
            )
        self.guard.run("records", self.readback.drain)
        if self.layers is not None:
            self.layers.let_go()
            self.guard.run("layers", self.layers.drain)
        if self.points is not None:
            self.points.store.wait(30.0)
        self._link.close()

    def forget_parent(self) -> None:
        """In a forked child: it is another process, with no rank, no thread and no open step."""
        # Kept and never freed here: pinned memory is the parent's, and freeing it would call into its device.
        self._of_parent = (self._link, self.points, self.readback, self.observer.window)
        self._link = None
        if self.layers is not None:
            self.layers.let_go()
            self.layers = None
        self.operator = operator.Operator(self)
        self._closed = False
        self.points = None
        self.step = 0
        self.agreement = Agreement(self._refuses)
        self.observer.window = StepWindow()
        self.readback = Readback(self._deliver)
        self._mark = None

    # -- the boundary ---------------------------------------------------------------------------------------------
    def _at_boundary(self) -> None:
        if not self.guard.on("boundary"):
            return
        try:
            self._boundary()
        except Exception as error:
            self.guard.fail("boundary", error)

    def _boundary(self) -> None:
        now = time.perf_counter()
        if self._link is None:
            self.join()
        self.step += 1
        window = self.observer.window
        position = self.observer.data.now
        duration = None if self._mark is None else max(0.0, now - self._mark - self._held)
        if duration is not None:
            self._durations.append(duration)
        batch, length, epoch = position if position is not None else (None, None, None)
        memory = self._device_memory
        host = HostValues(self.step, time.time(), duration, memory, batch, length, epoch, self.flags_next)
        self.flags_next = 0
        self._mark, self._held = now, 0.0
        self.guard.run("records", self.readback.submit, (window, host), window.to_readings())
        self.guard.run("records", self.readback.poll)
        if self.layers is not None:
            self.layers.end_step(self.step, duration)
        if self.steering.floor is not None or self.steering.cap is not None:
            self.guard.run("scaler", self.steering.keep_limits)
        if self.points is not None and self.points.due(self.step):
            self.points.snapshot(self.step, self.about_now())
        scaler = self.observer.active_scaler()
        if scaler is not self._scaler_said:
            self._scaler_said = scaler
            self.guard.run("scaler", self.say_scaler, self.last.get("scale") or getattr(scaler, "_init_scale", None))
        if self.profile is not None:
            self.guard.run("profile", self.profile.at_boundary, self.step)
        if self.baseline is not None and self.guard.run("baseline", self.baseline.at_boundary, self.step):
            self.operator.end()
        if self.comparison is not None and self.comparison.at_boundary(self.step):
            self.operator.end()
        self.operator.at_boundary(self.step)
        if self.layers is not None:
            self.layers.begin_step(self.step + 1)

    def hold(self, seconds: float) -> None:
        """Time that the training was kept from going on; not part of a step's duration."""
        self._held += seconds

    def catch_up(self) -> None:
        """Finish and write the records of all steps so far; waits for the device: only where training holds anyway."""
        self.guard.run("records", self.readback.drain)
        if self.layers is not None:
            self.guard.run("layers", self.layers.drain)
        if self._link is not None:
            self._link.flush()

    def say_scaler(self, scale: float | None = None) -> None:
        """An event with the scaler's settings; without ``scale`` it is read, which waits for the device."""
        settings = self.steering.scaler_settings(scale)
        if settings is not None:
            scale = settings["scale"]
            self.event("scaler", f"{settings['class_name']} in use, scale {scale:g}", self.step, **settings)

    def _deliver(self, about: tuple[StepWindow, HostValues], numbers: list[float]) -> None:
        window, host = about
        values, flags = record_values(window, host, numbers)
        if self._link is not None:
            self._link.record(records.pack_step(values, flags))
        self.last = values
        loss, norm = values["loss"], values["grad_norm"]
        if loss is not None:
            self._recent.append(loss)
        if flags & UNSOUND:
            self._sound_since = host.step + 1
        if norm is not None and not 1e-18 < norm < 1e18:
            self.observer.careful = 200
        self.episodes.note(host.step, values, flags)

    def about_now(self) -> dict[str, Any]:
        """The figures of a restore point taken now (events.POINT_FIELDS)."""
        last = self.last
        healthy = self.step - self._sound_since >= HEALTHY or self._sound_since == 0
        return {
            "step": self.step,
            "tag": None,
            "time": time.time(),
            "loss": mean_of_finite(list(self._recent)),
            "grad_norm": last.get("grad_norm"),
            "scale": last.get("scale"),
            "lr": last.get("lr"),
            "healthy": healthy and all(math.isfinite(loss) for loss in self._recent),
        }

    def after_rollback(self) -> None:
        """Losses from before no longer describe the state."""
        self._recent.clear()
        self._sound_since = 0
        self.flags_next |= records.FLAGS["restored"]

    def _refuses(self, command: dict[str, Any]) -> str | None:
        name = command.get("name")
        for part in ("boundary", "commands"):
            if not self.guard.on(part):
                return f"{PARTS[part]} are switched off in this run: {self.guard.off[part]}"
        if name == "rollback":
            if self.points is None:
                return "there is no restore point yet"
            return self.points.missing(int(command["to"])) or self.steering.refuses({**command, "name": "rollback"})
        if name == "checkpoint" and self.points is not None:
            return self.points.busy()
        return self.steering.refuses(command) if name == "set" else None

    # -- the link's thread ----------------------------------------------------------------------------------------
    def _progress(self) -> dict[str, Any] | None:
        durations = sorted(self._durations)
        report: dict[str, Any] = {"progress": self.step, "time": time.time()}
        if durations:
            report["step_seconds"] = durations[len(durations) // 2]
        if self.points is not None and self.points.cost is not None:
            report["snapshot_seconds"], report["snapshot_bytes"] = self.points.cost
            report["cadence"] = self.points.cadence
        return report

    def _sample_device_memory(self) -> None:
        if torch.cuda.is_initialized():
            self._device_memory = int(torch.cuda.memory_allocated())
