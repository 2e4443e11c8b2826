"""Values on their way from a device to the host, read a step or more later so that nothing waits for the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

#: A number that is here already, or a 0-d tensor that still has to travel.
Reading = float | torch.Tensor


def take(value: torch.Tensor, at_once: bool) -> Reading:
    """The value of a one-element tensor as of now: a float on the CPU, a copy of its own on a device.

    The copy matters: a loss may live in a CUDA graph's pool, and a scaler's scale is changed in place.
    ``at_once`` False takes the device's way for CPU tensors too.
    """
    value = value.detach()
    if at_once and value.device.type == "cpu":
        return float(value.item())
    wide = torch.float32 if value.device.type == "mps" else torch.float64
    return value.reshape(()).to(wide, copy=True)


class Readback:
    """A queue of pending groups of readings; each is handed on, in order, once all its numbers have arrived."""

    #: Groups that may travel at once; a script that never lets the device catch up waits for the oldest then.
    DEPTH = 64

    def __init__(self, deliver: Callable[[Any, list[float]], None]) -> None:
        self._deliver = deliver
        self._pending: deque[tuple[Any, list[float], list[tuple[list[int], Transfer]]]] = deque()

    def submit(self, about: Any, readings: list[Reading]) -> None:
        """Deliver ``(about, numbers)`` later; at once when no reading has to travel and none is under way."""
        if not self._pending and not any(isinstance(reading, torch.Tensor) for reading in readings):
            self._deliver(about, readings)  # type: ignore[arg-type]
            return
        travelling: dict[torch.device, list[int]] = {}
        for index, reading in enumerate(readings):
            if isinstance(reading, torch.Tensor):
                travelling.setdefault(reading.device, []).append(index)
        numbers = [0.0 if isinstance(reading, torch.Tensor) else float(reading) for reading in readings]
        transfers = [
            (indices, Transfer(torch.stack([readings[i] for i in indices])))  # type: ignore[misc]
            for indices in travelling.values()
        ]
        self._pending.append((about, numbers, transfers))

    def poll(self) -> None:
        """Deliver what has arrived; never waits unless DEPTH groups are under way."""
        while self._pending:
            about, numbers, transfers = self._pending[0]
            if len(self._pending) <= self.DEPTH and not all(transfer.arrived() for _, transfer in transfers):
                return
            self._pending.popleft()
            self._finish(about, numbers, transfers)

    def drain(self) -> None:
        """Deliver everything, waiting for the device: for a pause and the end of the process, not for a step."""
        while self._pending:
            self._finish(*self._pending.popleft())

    def _finish(self, about: Any, numbers: list[float], transfers: list[tuple[list[int], Transfer]]) -> None:
        for indices, transfer in transfers:
            for index, value in zip(indices, transfer.values().tolist()):
                numbers[index] = float(value)
        self._deliver(about, numbers)


class Transfer:
    """One packed tensor's non-blocking copy from its device."""

    def __init__(self, packed: torch.Tensor) -> None:
        self._age = 0
        self._event: Any = None
        if packed.device.type == "cuda":
            self._host = torch.empty(packed.shape, dtype=packed.dtype, device="cpu", pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(packed.device))
        else:
            self._host = packed

    def arrived(self) -> bool:
        """Whether ``values`` need not wait; to be asked once a boundary."""
        if self._event is not None:
            return bool(self._event.query())
        # Without events to ask, a value is read one boundary later; by then CPU work is done.
        self._age += 1
        return self._age > 1

    def values(self) -> torch.Tensor:
        """The tensor on the host (on a device without events: where it is)."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
