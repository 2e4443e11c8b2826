"""Position in the data, with torch's own loaders."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fp8console.probe import hooks
from fp8console.probe.guard import Guard
from fp8console.probe.observer import Observer


class Counted(IterableDataset):  # type: ignore[type-arg]
    """Says that it has 2 items and gives 4."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


@pytest.fixture
def observer() -> Iterator[Observer]:
    faults: list[str] = []
    made = Observer(Guard(lambda part, reason: faults.append(reason)), lambda: None, lambda text, part: None)
    patches = hooks.Patches()
    hooks.install(made, patches)
    yield made
    patches.undo()
    assert faults == []


def train(observer: Observer, loader: DataLoader) -> list[tuple[int, int | None, int] | None]:  # type: ignore[type-arg]
    weight = torch.ones(1, requires_grad=True)
    seen = []
    for _ in loader:
        (weight * 2).sum().backward()
        seen.append(observer.data.now)
    return seen


@pytest.mark.parametrize("workers, persistent", [(0, False), (1, False), (1, True)])
def test_batches_and_epochs_are_counted(observer: Observer, workers: int, persistent: bool) -> None:
    data = TensorDataset(torch.arange(6.0))
    loader = DataLoader(data, batch_size=2, num_workers=workers, persistent_workers=persistent)
    assert train(observer, loader) == [(1, 3, 1), (2, 3, 1), (3, 3, 1)]
    for _ in DataLoader(data, batch_size=1):
        pass  # evaluation: no backward, so the position is still the training's
    assert observer.data.now == (3, 3, 1)
    assert train(observer, loader) == [(1, 3, 2), (2, 3, 2), (3, 3, 2)]


def test_asking_for_a_length_makes_no_warning(observer: Observer) -> None:
    """torch warns once a loader over an iterable dataset gives out more than len() said, if len() was ever called."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seen = train(observer, DataLoader(Counted(), batch_size=1))
    assert seen[-1] == (4, 2, 1)
