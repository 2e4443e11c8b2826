"""Scaler settings: what can be, what is refused and how that is said."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from scaling_reference import begin

from fp8console.numerics import scaling_rules as rules
from fp8console.numerics.scaling_rules import PRESETS, ScalerSettings, SettingRefused

INF, NAN = math.inf, math.nan
NUMERIC = [field.name for field in fields(ScalerSettings) if field.name != "refill"]
WHOLE = ("growth_interval", "hysteresis", "patience")
OUT = {
    "init_scale": [0.0, -1.0, 2.0**-127, 2.0**127, 10**5000],
    "growth_factor": [1.0, 0.5, -2.0, 1 + 2.0**-30],
    "backoff_factor": [0.0, 1.0, -0.5, 1 - 2.0**-40],
    "growth_interval": [0, -1, 1.5, 2**31],
    "hysteresis": [0, -1, 0.5, 2**31],
    "floor": [0.0, -1.0, 2.0**-127, 2.0**127],
    "cap": [0.0, -1.0, 2.0**-127, 2.0**127],
    "smoothing": [-0.1, 1.0, 2.0],
    "margin": [-1.0, 65.0],
    "underflow_tolerance": [-0.1, 1.1],
    "saturation_tolerance": [-0.1, 1.1],
    "patience": [0, -1, 2.5, 2**31],
}


@pytest.mark.parametrize("name", NUMERIC)
def test_what_a_setting_can_not_be_is_refused_in_one_line(name: str) -> None:
    for value in [NAN, INF, -INF, True, False, "2", b"2", [2.0], torch.ones(3, 3), 1j, "x" * 999, *OUT[name]]:
        for base in PRESETS.values():
            with pytest.raises(SettingRefused) as refused:
                rules.changed(base, **{name: value})
            assert name in str(refused.value) and "\n" not in str(refused.value) and len(str(refused.value)) < 200
    optional = name in ("cap", "margin", "saturation_tolerance")
    if optional:
        assert getattr(rules.preset("article", **{name: None}), name) is None
    else:
        with pytest.raises(SettingRefused, match=name):
            rules.preset("article", **{name: None})


@pytest.mark.parametrize(
    "given_settings, words",
    [
        ({"refill": "never"}, "refill must be one of on_growth, every_clean_step"),
        ({"refill": None}, "refill"),
        ({"colour": 1}, "unknown scaler setting 'colour'; known: init_scale"),
        ({"floor": 8.0, "cap": 4.0}, "floor 8 is over cap 4"),
    ],
)
def test_other_refusals(given_settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingRefused, match=words):
        rules.preset("headroom", **given_settings)
    with pytest.raises(SettingRefused, match="unknown preset 'fast'; known: headroom, article, pytorch"):
        rules.preset("fast", **given_settings)


def test_numbers_of_any_kind_are_taken_and_the_first_scale_is_within_limits() -> None:
    numpy = pytest.importorskip("numpy")
    s = rules.preset("pytorch", cap=numpy.float32(8), hysteresis=numpy.int64(2), margin=Fraction(1, 2), patience=3.0)
    assert replace(s, cap=8.0) == s and type(s.cap) is float
    assert (s.hysteresis, s.margin, s.patience) == (2, 0.5, 3) and type(s.hysteresis) is int
    assert begin(s).scale.item() == 8.0 and begin(rules.preset("headroom", floor=4.0)).scale.item() == 4.0
