"""For scripts that want more than hooks can give: their own step boundary, state of their own, data that rewinds.

Outside the console everything here does nothing: ``steps`` iterates the loader, ``step`` returns, decorators return
their function.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Batch = TypeVar("_Batch")


class _Data:
    """A loader whose position belongs to the restore points."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.restart = False


class Run:
    """A script's handle on the run it is part of; ``active`` is False outside the console."""

    def __init__(self, probe: Any) -> None:
        self._probe = probe
        self._registered: dict[str, Any] = {}

    @property
    def active(self) -> bool:
        return self._probe is not None

    def register(self, name: str, item: Any) -> None:
        """Make ``item`` part of every restore point. TypeError unless it has ``state_dict`` and ``load_state_dict``."""
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(item, method, None)):
                raise TypeError(f"register({name!r}, ...): a {type(item).__name__} has no {method}()")
        self._registered[name] = item
        self._hand_over()

    def steps(self, loader: Iterable[_Batch]) -> Iterator[_Batch]:
        """Iterate ``loader``; after a rollback go on with the batch that followed the restore point.

        Rewinding needs a loader with ``state_dict()`` and ``load_state_dict()``, such as torchdata's
        StatefulDataLoader; any other is iterated as it is, and a rollback says that data was not rewound.
        """
        stateful = all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
        if self._probe is None or not stateful:
            yield from loader
            return
        data = _Data("loader")
        self._registered[data.name] = loader
        self._hand_over()
        self._probe.data = data
        again = True
        try:
            while again:
                again = False
                for batch in loader:
                    yield batch
                    if data.restart:
                        # The iterator in hand goes on where it was; only a new one starts from the restored state.
                        data.restart = False
                        again = True
                        break
        finally:
            if self._probe.data is data:  # not when the script has begun another loop meanwhile
                self._probe.data = None

    def step(self, loss: Any = None) -> None:
        """An explicit step boundary; once called, the only kind. ``loss``: a scalar, in place of ours."""
        if self._probe is not None:
            self._hand_over()
            self._probe.observer.explicit_step(loss)

    def on_restore(self, function: _Function) -> _Function:
        """Decorator: ``function(step)`` is called after each rollback, at the boundary, with the restored step."""
        if self._probe is not None:
            self._probe.restore_callbacks.append(function)
        return function

    def _hand_over(self) -> None:
        # Restore points exist from the first boundary on.
        if self._probe is not None:
            self._probe.registered.update(self._registered)


def attach(model: Any = None, optimizer: Any = None, scaler: Any = None, total_steps: int | None = None) -> Run:
    """The run that this process is part of. All arguments are optional: what hooks can find is found without them.

    ``total_steps``: how many steps the training will take, for the time left on screen.
    """
    from fp8console.probe.install import ACTIVE

    probe = ACTIVE[0] if ACTIVE else None
    run = Run(probe)
    if probe is None:
        return run
    observer = probe.observer
    if optimizer is not None:
        observer.optimizer_made(optimizer, ())
    if scaler is not None:
        observer.scaler_made(scaler, ())
    if model is not None:
        probe.models.append(weakref.ref(model))
    if total_steps is not None:
        steps = int(total_steps)
        probe.event("settings", f"the script takes {steps:,} steps", None, total_steps=steps)
    return run
