"""Where the training is in its data: batches given out, the loader's length, epochs, and the time waited for them."""

from __future__ import annotations

import time
import weakref
from typing import Any

from fp8console.probe.guard import Guard


class DataPosition:
    """Follows DataLoader iterators. The training's is the one that gave a batch last before a backward."""

    def __init__(self, guard: Guard) -> None:
        self.live = True
        self.now: tuple[int, int | None, int] | None = None  # batch, length (None: unknown), epoch
        self.waited = 0.0  # seconds since this was last set to 0
        self._guard = guard
        self._last: weakref.ref[Any] | None = None
        self._epochs: dict[int, int] = {}

    def iterator_made(self, iterator: Any, args: Any) -> None:
        """A loader has begun to be iterated; ``args``: the iterator's own, the loader first."""
        if self.live and args:
            self._guard.run("data", self._begin, iterator, args[0])

    def iterator_reset(self, iterator: Any, args: Any) -> None:
        """Persistent workers: the same iterator begins another epoch. ``args``: loader, and whether it is the first."""
        if self.live and args and args[1:2] != (True,):
            self._guard.run("data", self._begin, iterator, args[0])

    def _begin(self, iterator: Any, loader: Any) -> None:
        # len() of a loader over an iterable dataset makes it warn later when the script gives out more.
        noted = loader.__dict__.get("_IterableDataset_len_called")
        try:
            length: int | None = len(loader)
        except (TypeError, NotImplementedError):
            length = None  # an iterable dataset
        if "_IterableDataset_len_called" in loader.__dict__:
            loader._IterableDataset_len_called = noted
        # A new iterator of the same loader is a new epoch.
        epoch = self._epochs.get(id(loader), 0) + 1
        self._epochs[id(loader)] = epoch
        iterator._fp8console = [0, length, epoch]

    def batch_asked(self) -> float:
        return time.perf_counter()

    def batch_given(self, iterator: Any, started: float) -> None:
        """``iterator`` has returned a batch that was asked for at ``started``."""
        if self.live:
            self.waited += time.perf_counter() - started
            self._guard.run("data", self._count, iterator)

    def _count(self, iterator: Any) -> None:
        about = getattr(iterator, "_fp8console", None)
        if about is not None:
            about[0] += 1
            self._last = weakref.ref(iterator)

    def batch_size(self) -> int | None:
        """Examples in a batch of the loader that gave one last; None where the loader doesn't say."""
        iterator = self._last() if self._last is not None else None
        size = getattr(getattr(iterator, "_index_sampler", None), "batch_size", None)
        return size if isinstance(size, int) and size > 0 else None

    def backward_begins(self) -> None:
        """Evaluation runs no backward: what the last iterator gave is what the training works on."""
        iterator = self._last() if self._last is not None else None
        about = getattr(iterator, "_fp8console", None)
        if about is not None:
            self.now = (about[0], about[1], about[2])
