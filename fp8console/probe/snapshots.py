"""Restore points in host memory: a ring of copies of the training's state, taken at step boundaries.

On a device the copies are queued on the training's own stream into pinned memory, ordered before the next update, so
the training thread doesn't wait for them. A worker thread takes the digest once a copy is complete.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from fp8console.probe import state
from fp8console.probe.digest import digest


class GivenUp(Exception):
    """Nobody needs the digest any more."""


@dataclass
class Snapshot:
    """One captured state on the host. ``about`` holds the point's figures (events.POINT_FIELDS)."""

    step: int
    roots: state.Roots
    tree: dict[str, Any]
    host: list[torch.Tensor]
    about: dict[str, Any]
    bytes: int
    seconds: float
    copied: list[Any] = field(default_factory=list)  # device events that mark the end of the copies
    digest: str | None = None
    ready: threading.Event = field(default_factory=threading.Event)
    holders: set[Any] = field(default_factory=set)  # writers to disk that still read it: not to be recycled
    dropped: bool = False  # no longer in the ring

    def wait(self) -> None:
        """Wait until the copies from the device are complete."""
        for event in self.copied:
            event.synchronize()

    def compute_digest(self, given_up: Callable[[], bool] = lambda: False) -> str:
        """The digest of the captured state; taken once. Raises GivenUp, between two tensors, when ``given_up()``."""
        self.wait()
        if self.digest is None:
            for saved in self.tree["scalers"]:
                if saved and "_scale" in saved:
                    # The last record's scale is the one before the scaler's update; the state holds the one after.
                    self.about["scale"] = float(self.host[saved["_scale"].index])
            self.digest = digest(self._tensors(given_up), state.plain_part(self.tree))
        return self.digest

    def _tensors(self, given_up: Callable[[], bool]) -> Iterator[torch.Tensor]:
        for tensor in self.host:
            if given_up():
                raise GivenUp
            yield tensor


def compare_live(snapshot: Snapshot) -> tuple[str, bool]:
    """(digest of the training's state as it is now, whether it is the snapshot's), over what both have.

    A model without an optimizer that the script has dropped since is in neither: its absence is no difference.
    """
    live, tensors = state.capture(snapshot.roots)
    now = state.common_part(live, snapshot.tree)
    found = digest([tensors[index] for index in state.slots(now)], state.plain_part(now))
    then = state.common_part(snapshot.tree, live)
    kept = state.slots(then)
    if len(kept) == len(snapshot.host) and state.plain_part(then) == state.plain_part(snapshot.tree):
        return found, found == snapshot.compute_digest()
    return found, found == digest([snapshot.host[index] for index in kept], state.plain_part(then))


def choose_victim(steps: list[int], sound: list[bool] | None = None) -> int:
    """Which of a full ring's restore points (ascending steps) makes room: its index.

    One that is not ``sound`` goes first, the oldest of them: a training that has diverged must not push out the points
    from before. Among sound ones the newest two and the oldest stay; of the others goes the one whose gap, once
    merged, is smallest for its age. So points lie close together near the present and further apart back in time.
    """
    if sound is not None and not all(sound):
        return sound.index(False)
    newest = steps[-1]
    candidates = range(1, len(steps) - 2)
    if not candidates:
        return 0
    return min(candidates, key=lambda i: ((steps[i + 1] - steps[i - 1]) / (newest - steps[i] + 1), i))


class SnapshotRing:
    """The snapshots of this rank. Used by the training thread; digests come from one worker thread."""

    def __init__(
        self, count: int, memory_bytes: int, on_event: Callable[[str, Snapshot, str], None], late: bool = False
    ) -> None:
        self._late = late
        self.count = count
        self.memory_bytes = memory_bytes
        self.points: list[Snapshot] = []
        self._on_event = on_event  # ("ready" | "dropped", snapshot, reason)
        self._spare: list[torch.Tensor] = []
        self._queue: list[Snapshot] = []
        self._condition = threading.Condition()
        self._worker: threading.Thread | None = None
        self._closing = False
        self._pid = os.getpid()

    def find(self, step: int) -> Snapshot | None:
        return next((point for point in self.points if point.step == step), None)

    def take(self, roots: state.Roots, step: int, about: dict[str, Any], keep: bool = True) -> Snapshot:
        """Copy the present state. ``keep`` False: for a checkpoint only, outside the ring and its limits.

        Raises MemoryError, with nothing changed, when one snapshot alone is over the memory limit.
        """
        started = time.perf_counter()
        tree, tensors = state.capture(roots)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if keep:
            self._make_room(size)
        spare: list[torch.Tensor] = []
        if keep:
            spare, self._spare = self._spare, []
        host, events = copy_to_host(tensors, spare, self._late)
        seconds = time.perf_counter() - started
        snapshot = Snapshot(step, roots, tree, host, about, size, seconds, events)
        if keep:
            self.points.append(snapshot)
            self._digest_later(snapshot)
        return snapshot

    def forget_after(self, step: int) -> None:
        """Drop the snapshots of an abandoned stretch: those after ``step``."""
        for point in [point for point in self.points if point.step > step]:
            self._drop(point, "abandoned by a rollback")

    def _make_room(self, size: int) -> None:
        if size > self.memory_bytes:
            raise MemoryError(
                f"one snapshot takes {size / 2**30:.2f} GiB, over the limit of {self.memory_bytes / 2**30:.2f} GiB "
                "(--snapshot-memory raises it)"
            )
        while self.points and (
            len(self.points) >= self.count or sum(point.bytes for point in self.points) + size > self.memory_bytes
        ):
            steps = [point.step for point in self.points]
            sound = [bool(point.about.get("healthy", True)) for point in self.points]
            victim = self.points[choose_victim(steps, sound)]
            self._drop(victim, "made room")
            if not victim.holders:
                self._spare = victim.host

    def _drop(self, point: Snapshot, reason: str) -> None:
        self.points.remove(point)
        point.dropped = True
        self._on_event("dropped", point, reason)

    def _digest_later(self, snapshot: Snapshot) -> None:
        with self._condition:
            self._queue.append(snapshot)
            self._condition.notify()
        if self._worker is None or not self._worker.is_alive():
            if self._worker is None:
                ring = weakref.ref(self)
                atexit.register(lambda: None if (alive := ring()) is None else alive.close())
            self._worker = threading.Thread(target=self._work, name="fp8console-digest", daemon=True)
            self._worker.start()

    def close(self, seconds: float = 10.0) -> None:
        """Stop the worker. A thread that is inside torch while the interpreter ends aborts the process."""
        if self._worker is None or self._pid != os.getpid():
            return  # a forked child has no such thread, and its lock may be held for ever
        self._closing = True
        with self._condition:
            self._condition.notify_all()
        self._worker.join(seconds)

    def _work(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: bool(self._queue) or self._closing)
                if self._closing:
                    return
                snapshot = self._queue.pop(0)
            try:
                snapshot.compute_digest(lambda snapshot=snapshot: self._closing or snapshot.dropped)  # type: ignore[misc]
            except GivenUp:
                continue
            except Exception:
                snapshot.digest = None
            snapshot.ready.set()
            self._on_event("ready", snapshot, "")
            self._prepare_spare(snapshot)

    def _prepare_spare(self, like: Snapshot) -> None:
        """Get the memory of the next snapshot ready here: touching new pages costs several times the copy itself."""
        limit = min(self.count, self.memory_bytes // max(like.bytes, 1))
        if self._spare or len(self.points) >= limit or like.dropped or self._closing:
            return
        self._spare = [_host_like(tensor, bool(like.copied)).zero_() for tensor in like.host]


def copy_to_host(
    tensors: list[torch.Tensor], spare: list[torch.Tensor], late: bool = False
) -> tuple[list[torch.Tensor], list[Any]]:
    """Copies of the tensors on the host, into ``spare`` ones that fit, and the device events that mark their end.

    Nothing here waits for a device; ``late`` asks for that of CPU tensors too.
    """
    fits = len(spare) == len(tensors) and all(
        have.shape == want.shape and have.dtype == want.dtype for have, want in zip(spare, tensors)
    )
    host = []
    devices = set()
    with torch.no_grad():
        for index, tensor in enumerate(tensors):
            on_cuda = tensor.device.type == "cuda"
            target = spare[index] if fits else _host_like(tensor, on_cuda)
            target.copy_(tensor, non_blocking=on_cuda or late)
            host.append(target)
            if on_cuda:
                devices.add(tensor.device)
    events = []
    for device in devices:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        events.append(event)
    return host, events


def _host_like(tensor: torch.Tensor, pinned: bool) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
