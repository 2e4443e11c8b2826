"""The digest of a state: the same for the same bytes, another for any change."""

from __future__ import annotations

import math

import pytest
import torch

from fp8console.probe.digest import COLUMNS, canonical, digest

SIZES = [1, 7, 8, 1000, 4 * COLUMNS, 2 * COLUMNS * 5 + 3]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.bool])
def test_one_changed_element_anywhere_is_seen(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    values = (torch.randn(size) * 10).to(dtype)
    reference = digest([values])
    assert digest([values.clone()]) == reference
    for index in {0, size // 2, size - 1}:
        changed = values.clone()
        changed[index] = changed[index].logical_not() if dtype is torch.bool else changed[index] + 1
        assert digest([changed]) != reference


def test_a_changed_bit_of_a_nan_and_the_sign_of_zero_are_seen() -> None:
    assert digest([torch.tensor([0.0])]) != digest([torch.tensor([-0.0])])
    assert digest([torch.tensor([math.nan])]) == digest([torch.tensor([math.nan])])
    assert digest([torch.tensor([math.nan])]) != digest([torch.tensor([math.inf])])


def test_order_shape_and_dtype_count() -> None:
    a, b = torch.randn(9000), torch.randn(9000)
    assert digest([a, b]) != digest([b, a])
    assert digest([a]) != digest([a.view(90, 100)])
    swapped = a.clone()
    swapped[:2] = a[:2].flip(0)
    assert digest([a]) != digest([swapped])
    assert digest([torch.zeros(4)]) != digest([torch.zeros(4, dtype=torch.int32)])
    assert digest([]) != digest([torch.zeros(1)])


def test_layout_in_memory_does_not_count() -> None:
    image = torch.randn(2, 3, 16, 16)
    assert digest([image]) == digest([image.to(memory_format=torch.channels_last)])
    offset = torch.randn(50_001)[1:]
    assert digest([offset]) == digest([offset.clone()])
    assert digest([torch.randn(0), torch.tensor(3.0)]) == digest([torch.randn(0), torch.tensor(3.0)])


def test_plain_data_counts_by_value() -> None:
    assert canonical({"b": 1, "a": [1.5, None]}) == canonical({"a": (1.5, None), "b": 1})
    assert canonical({"a": math.nan}) == canonical({"a": math.nan})
    assert digest([], {"lr": 0.1}) != digest([], {"lr": 0.2})
    assert canonical(object()) == canonical(object())
