"""Run something right after a module has been imported, without importing it oneself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class AfterImport:
    """A meta path finder that calls ``actions[name](module)`` once, after ``name``'s own code has run.

    The module's loader keeps its type and place: only its ``exec_module`` is shadowed on the instance for the one call,
    so ``inspect``, pickling and ``importlib.reload`` see what they would see without it. An action that fails does not
    fail the import.
    """

    def __init__(self, actions: dict[str, Callable[[ModuleType], None]]) -> None:
        self._actions = dict(actions)
        self._searching: set[str] = set()

    def arm(self) -> None:
        """Start watching; modules that are there already are served at once."""
        for name in [name for name in self._actions if name in sys.modules]:
            self._act(name, sys.modules[name])
        if self._actions:
            sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in self._actions or name in self._searching:
            return None
        self._searching.add(name)
        try:
            spec = self._search(name, path, target)
        finally:
            self._searching.discard(name)
        loader = getattr(spec, "loader", None)
        if loader is None or not hasattr(loader, "exec_module"):
            return spec
        original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            try:
                del loader.exec_module
            except AttributeError:
                pass  # a finder that hands out one loader twice: shadowed twice, freed once
            original(module)
            if name in self._actions:
                self._act(name, module)
            if not self._actions and self in sys.meta_path:
                sys.meta_path.remove(self)

        try:
            loader.exec_module = exec_module
        except AttributeError:
            pass  # a loader with slots: this module goes unwatched
        return spec

    def _act(self, name: str, module: ModuleType) -> None:
        try:
            self._actions.pop(name)(module)
        except Exception:
            pass  # the import is the script's

    def _search(self, name: str, path: Any, target: Any) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return spec
        return None
