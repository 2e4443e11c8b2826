"""Values on their way to the host: in order, as of the moment they were taken, never waited for by a step."""

from __future__ import annotations

import math

import pytest
import torch

from fp8console.probe.readback import Readback, take


class Sink(list):  # type: ignore[type-arg]
    def __call__(self, about: object, numbers: list[float]) -> None:
        self.append((about, numbers))


def test_numbers_that_are_here_are_delivered_at_once() -> None:
    sink = Sink()
    Readback(sink).submit("a", [1.0, math.inf, 2, True])  # an integer learning rate is a number too
    assert sink == [("a", [1.0, math.inf, 2.0, 1.0])]


def test_other_number_types_are_not_lost() -> None:
    numpy = pytest.importorskip("numpy")
    sink = Sink()
    Readback(sink).submit("a", [numpy.float32(0.5), numpy.int64(3)])
    assert sink == [("a", [0.5, 3.0])]


def test_the_order_is_kept_when_only_some_travel() -> None:
    sink = Sink()
    readback = Readback(sink)
    readback.submit(1, [torch.tensor(1.5, dtype=torch.float64), 9.0])
    readback.submit(2, [2.0])  # could be delivered at once, but must not overtake
    assert sink == []
    for _ in range(4):
        readback.poll()
    assert sink == [(1, [1.5, 9.0]), (2, [2.0])]


def test_a_value_is_read_one_boundary_later() -> None:
    sink = Sink()
    readback = Readback(sink)
    readback.submit(1, [take(torch.tensor(3.0), at_once=False)])
    readback.poll()
    assert sink == []
    readback.poll()
    assert sink == [(1, [3.0])]


def test_taken_is_as_of_now() -> None:
    scale = torch.tensor([65536.0])
    here, travelling = take(scale, True), take(scale, False)
    scale.mul_(0.5)
    assert here == 65536.0
    assert isinstance(travelling, torch.Tensor) and float(travelling) == 65536.0 and travelling.shape == ()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38, 1e-45])
def test_odd_numbers_arrive_as_they_are(value: float) -> None:
    sink = Sink()
    readback = Readback(sink)
    tensor = torch.tensor(value, requires_grad=True)
    readback.submit(1, [take(tensor, False), take(tensor, True)])
    readback.drain()
    for found in sink[0][1]:
        assert found == float(torch.tensor(value)) or (math.isnan(found) and math.isnan(value))


def test_a_queue_that_never_arrives_is_bounded() -> None:
    sink = Sink()
    readback = Readback(sink)
    for step in range(1000):
        readback.submit(step, [take(torch.tensor(float(step)), False)])
        for _, _, transfers in readback._pending:
            transfers[0][1].arrived = lambda: False  # type: ignore[method-assign]
        readback.poll()
    assert len(readback._pending) <= Readback.DEPTH
    readback.drain()
    assert [about for about, _ in sink] == list(range(1000))
    assert [numbers[0] for _, numbers in sink] == list(map(float, range(1000)))


def test_drain_of_nothing_is_nothing() -> None:
    sink = Sink()
    Readback(sink).drain()
    Readback(sink).poll()
    assert sink == []
