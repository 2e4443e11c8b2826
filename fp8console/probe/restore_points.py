"""Snapshots and checkpoints of one rank: when they are taken, which there are, and going back to one."""

from __future__ import annotations

import math
import os
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fp8console.probe import state
from fp8console.probe.checkpoints import MOST_PENDING, CheckpointError, CheckpointStore
from fp8console.probe.guard import Guard
from fp8console.probe.observer import Observer
from fp8console.probe.snapshots import Snapshot, SnapshotRing, compare_live
from fp8console.protocol.settings import Settings

#: Steps between snapshots before the supervisor has worked out a cadence from their measured cost.
FIRST_CADENCE = 100


class RestorePoints:
    """Owns the roots, the ring and the store of one rank."""

    def __init__(self, probe: Any, settings: Settings, folder: Path, rank: int) -> None:
        self.cadence = FIRST_CADENCE if settings.snapshot_budget > 0 else 0
        self.cost: tuple[float, int] | None = None  # (seconds, bytes) of the last snapshot
        self._cadence_from = 1
        self._seconds: deque[float] = deque(maxlen=3)
        self._probe = probe
        self._guard: Guard = probe.guard
        self._event: Callable[..., None] = probe.event
        self._roots: state.Roots | None = None
        memory = settings.snapshot_memory_gib
        limit = int(memory * 2**30) if memory is not None else available_memory() // 4
        self.ring = SnapshotRing(settings.snapshot_count, limit, self._ring_event, settings.read_late)
        self.store = CheckpointStore(folder, rank, settings.checkpoints_kept, self._store_event)

    # -- taking ---------------------------------------------------------------------------------------------------
    def due(self, step: int) -> bool:
        return self.cadence > 0 and (step - self._cadence_from) % self.cadence == 0

    def set_cadence(self, every: int, step: int) -> None:
        """A snapshot each ``every`` steps from ``step`` on; 0 for none."""
        self.cadence, self._cadence_from = every, step

    def snapshot(self, step: int, about: dict[str, Any]) -> Snapshot | None:
        """Take a snapshot into the ring; None when it is switched off."""
        if not self._guard.on("snapshots"):
            return None
        try:
            point = self.ring.take(self.roots(), step, about)
        except MemoryError as error:
            self._guard.fail("snapshots", error)
            return None
        except Exception as error:
            self._guard.fail("snapshots", error)
            return None
        # The least of the last few: the first one's memory was new, and a busy moment says nothing about the next.
        self._seconds.append(point.seconds)
        self.cost = (min(self._seconds), point.bytes)
        return point

    def checkpoint(
        self, step: int, about: dict[str, Any], tag: str | None, done: Callable[[dict[str, Any]], None]
    ) -> None:
        """Copy the state now and write it to disk behind the training's back; ``done`` hears of the end."""
        point = self.ring.find(step) or self.ring.take(self.roots(), step, about, keep=False)
        self.store.save(point, tag, done)

    def roots(self) -> state.Roots:
        """What the training's state hangs on; searched anew only when one of the objects that hooks report is new."""
        observer: Observer = self._probe.observer
        registered = self._probe.registered
        optimizers, schedulers = list(observer.optimizers), list(observer.schedulers)
        scalers = [scaler for scaler in observer.scalers if getattr(scaler, "_scale", None) is not None]
        models = [model for ref in self._probe.models if (model := ref()) is not None]
        before = self._roots
        if before is None or not _covers(before, [*optimizers, *schedulers, *scalers, *models]):
            found = state.find_modules()
            # Named ones, and those seen before: gc.freeze() hides objects from the search.
            for ref in [*self._probe.models, *(before.modules if before is not None else [])]:
                if ref() is not None and not any(ref() is have() for have in found):
                    found.append(ref)
            optimizers.sort(key=_order)
            trained = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
            found.sort(key=lambda ref: _module_order(ref(), trained))
            schedulers.sort(key=lambda item: _scheduler_order(item, optimizers))
            self._roots = state.Roots(
                modules=found,
                optimizers=[weakref.ref(item) for item in optimizers],
                scalers=[weakref.ref(item) for item in scalers],
                schedulers=[weakref.ref(item) for item in schedulers],
                registered=dict(registered),
            )
        elif {name: id(item) for name, item in before.registered.items()} != {n: id(i) for n, i in registered.items()}:
            self._roots = replace(before, registered=dict(registered))
        assert self._roots is not None
        return self._roots

    def busy(self) -> str | None:
        """Why no further checkpoint can be taken now, or None when one can."""
        if self.store.pending < MOST_PENDING:
            return None
        return f"{self.store.pending} checkpoints are still being written; each holds a copy of the state in memory"

    # -- going back -----------------------------------------------------------------------------------------------
    def missing(self, step: int) -> str | None:
        """Why there is no going back to ``step``, or None when there is."""
        if self.ring.find(step) is not None or any(found == step for found, _ in self.store.complete()):
            return None
        steps = sorted({point.step for point in self.ring.points} | {found for found, _ in self.store.complete()})
        listed = ", ".join(f"{have:,}" for have in steps[-8:]) or "none yet"
        return f"no restore point at step {step:,}; there are: {listed}"

    def roll_back(self, step: int) -> dict[str, Any]:
        """Put the state of ``step`` back in place and compare digests. Raises CheckpointError, changing nothing."""
        point = self.ring.find(step)
        where = "memory"
        if point is not None:
            point.compute_digest()
        else:
            where = "disk"
            tree, tensors, manifest = self.store.load(step)
            roots = self.roots()
            if len(tree["modules"]) > len(roots.modules) or len(tree["optimizers"]) > len(roots.optimizers):
                raise CheckpointError(
                    f"the checkpoint of step {step:,} does not fit this training's modules and optimizers"
                )
            roots = _part_of(roots, tree)
            digest = str(manifest["digest"])
            point = Snapshot(step, roots, tree, tensors, dict(manifest["point"]), 0, 0.0, digest=digest)
        point.wait()
        misfit = state.misfit(point.roots, point.tree, point.host)
        if misfit is not None:
            raise CheckpointError(f"step {step:,} does not fit this training any more: {misfit}")
        state.restore(point.roots, point.tree, point.host)
        found, equal = compare_live(point)
        return {
            "where": where,
            "digest": found,
            "digests_equal": equal,
            "point": point.about,
            "registered": sorted(
                name
                for name in point.tree["registered"]
                if name in point.roots.registered and point.roots.registered[name] is self._probe.registered.get(name)
            ),
        }

    def forget_after(self, step: int) -> None:
        self.ring.forget_after(step)

    # -- events ---------------------------------------------------------------------------------------------------
    def _ring_event(self, what: str, point: Snapshot, reason: str) -> None:
        if what == "dropped":
            text = f"restore point {point.step:,} left memory: {reason}"
            self._event("point_dropped", text, None, point_step=point.step, where="memory", reason=reason)
            return
        if point not in self.ring.points:
            return
        verified = point.digest is not None
        about = {
            **point.about,
            "bytes": point.bytes,
            "seconds": point.seconds,
            "verified": verified,
            "kind": "snapshot",
        }
        self._event(
            "snapshot", f"snapshot{', verified' if verified else ''}", point.step, point=about, digest=point.digest
        )

    def _store_event(self, what: str, details: dict[str, Any]) -> None:
        step = details["step"]
        if what == "saved":
            about = {**details, "kind": "checkpoint", "verified": True}
            tag = f" {details['tag']!r}" if details.get("tag") else ""
            self._event("checkpoint", f"checkpoint{tag} written, verified", step, point=about, path=details["path"])
        elif what == "failed":
            self._event("fault", f"checkpoint of step {step:,} failed: {details['reason']}", step, part="checkpoints")
        else:
            text = f"checkpoint {step:,} removed: {details['reason']}"
            self._event("point_dropped", text, None, point_step=step, where="disk", reason=details["reason"])


def available_memory() -> int:
    """Bytes of host memory that can be had without swapping, by /proc/meminfo, or what the control group leaves."""
    available = 4 * 2**30
    try:
        with open("/proc/meminfo") as file:
            values = dict(line.split(":", 1) for line in file)
        available = int(values["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            available = min(available, int(limit.read()) - int(used.read()))
    except (OSError, ValueError):
        pass  # no limit ("max") or no control groups
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(0, available) // max(1, int(local) if local.isdigit() else 1)


def _covers(roots: state.Roots, items: list[Any]) -> bool:
    """Whether every one of ``items`` is a root. By the living objects: an id alone may be a dead one's, used again."""
    references = (*roots.optimizers, *roots.schedulers, *roots.scalers, *roots.modules)
    have = {id(item) for ref in references if (item := ref()) is not None}
    return all(id(item) in have for item in items)


def _part_of(roots: state.Roots, tree: dict[str, Any]) -> state.Roots:
    """The roots that a tree from disk speaks of, by position and name."""
    return state.Roots(
        modules=roots.modules[: len(tree["modules"])],
        optimizers=roots.optimizers[: len(tree["optimizers"])],
        scalers=roots.scalers[: len(tree["scalers"])],
        schedulers=roots.schedulers[: len(tree["schedulers"])],
        registered={name: item for name, item in roots.registered.items() if name in tree["registered"]},
    )


# The orders below are the same in a restarted process, which may read an earlier one's checkpoint: what is found where
# in memory is not. Two roots that look alike (two copies of one model) stay in the order in which they were found.
def _order(optimizer: Any) -> tuple[str, list[tuple[int, ...]]]:
    return type(optimizer).__name__, [tuple(p.shape) for group in optimizer.param_groups for p in group["params"]]


def _module_order(module: Any, trained: set[int]) -> tuple[bool, str, int]:
    parameters = list(module.parameters())
    return not any(id(parameter) in trained for parameter in parameters), type(module).__name__, len(parameters)


def _scheduler_order(scheduler: Any, optimizers: list[Any]) -> tuple[int, str]:
    optimizer = getattr(scheduler, "optimizer", None)
    index = next((index for index, item in enumerate(optimizers) if item is optimizer), len(optimizers))
    return index, type(scheduler).__name__


def mean_of_finite(values: list[float]) -> float | None:
    """The mean of the finite values, or None when there is none."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None
