"""Acting after an import without anybody noticing: loaders, find_spec, reload, failures."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fp8console.probe.importing import AfterImport

NAME = "watched_module"


@pytest.fixture(autouse=True)
def module(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / f"{NAME}.py"
    file.write_text("VALUE = 1\nclass Thing: pass\n")
    before = list(sys.meta_path)
    sys.path.insert(0, str(tmp_path))
    importlib.invalidate_caches()
    yield file
    sys.path.remove(str(tmp_path))
    sys.modules.pop(NAME, None)
    sys.meta_path[:] = before


def watch(name: str = NAME) -> list[ModuleType]:
    seen: list[ModuleType] = []
    AfterImport({name: seen.append}).arm()
    return seen


def watching() -> bool:
    return any(isinstance(finder, AfterImport) for finder in sys.meta_path)


def test_the_action_comes_once_after_the_modules_own_code() -> None:
    values: list[int] = []
    AfterImport({NAME: lambda module: values.append(module.VALUE)}).arm()
    importlib.import_module(NAME)
    importlib.import_module(NAME)
    assert values == [1] and not watching()


def test_a_module_that_is_there_already_is_served_at_once() -> None:
    importlib.import_module(NAME)
    assert len(watch()) == 1 and not watching()


def test_the_loader_is_the_ordinary_one() -> None:
    plain = importlib.util.find_spec(NAME)
    watch()
    found = importlib.import_module(NAME)
    assert plain is not None and found.__spec__ is not None
    assert type(found.__loader__) is type(plain.loader) is importlib.machinery.SourceFileLoader
    assert "exec_module" not in vars(found.__loader__)
    assert found.__spec__.origin == plain.origin and found.__file__ == plain.origin
    assert "class Thing" in inspect.getsource(found.Thing)


def test_reload_runs_the_code_and_no_action() -> None:
    seen = watch()
    found = importlib.import_module(NAME)
    found.VALUE = 5
    assert importlib.reload(found).VALUE == 1 and len(seen) == 1


def test_asking_for_the_spec_is_no_import() -> None:
    """Libraries ask find_spec("torch") to know whether it is installed."""
    seen = watch()
    assert importlib.util.find_spec(NAME) is not None
    assert seen == [] and watching() and NAME not in sys.modules
    spec = importlib.util.find_spec(NAME)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert made.VALUE == 1 and seen == [made]


def test_a_finder_that_hands_out_one_loader_twice(module: Path) -> None:
    loader = importlib.machinery.SourceFileLoader(NAME, str(module))

    class Finder:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
            return importlib.util.spec_from_loader(name, loader) if name == NAME else None

    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
    seen = watch()
    importlib.util.find_spec(NAME)
    importlib.util.find_spec(NAME)
    assert importlib.import_module(NAME).VALUE == 1 and len(seen) == 1


def test_an_import_that_fails_may_succeed_later(module: Path) -> None:
    seen = watch()
    module.write_text("raise RuntimeError('broken')\n")
    with pytest.raises(RuntimeError, match="broken"):
        importlib.import_module(NAME)
    assert seen == [] and watching()
    module.write_text("VALUE = 12345\n")
    importlib.invalidate_caches()
    assert importlib.import_module(NAME).VALUE == 12345 and len(seen) == 1


@pytest.mark.parametrize("there_already", [False, True])
def test_an_action_that_fails_does_not_fail_the_import(there_already: bool) -> None:
    if there_already:
        importlib.import_module(NAME)

    def action(module: ModuleType) -> None:
        raise RuntimeError("ours")

    AfterImport({NAME: action}).arm()
    assert importlib.import_module(NAME).VALUE == 1 and not watching()


def test_a_module_that_does_not_exist_is_the_ordinary_error() -> None:
    watch("no_such_module_anywhere")
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_module_anywhere'"):
        importlib.import_module("no_such_module_anywhere")


def test_a_loader_that_takes_no_attributes_goes_unwatched(module: Path) -> None:
    class Slotted:
        __slots__ = ()

        def create_module(self, spec: Any) -> None:
            return None

        def exec_module(self, made: ModuleType) -> None:
            made.VALUE = 9  # type: ignore[attr-defined]

    class Finder:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
            return importlib.util.spec_from_loader(name, Slotted()) if name == NAME else None  # type: ignore[arg-type]

    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
    watch()
    assert importlib.import_module(NAME).VALUE == 9
