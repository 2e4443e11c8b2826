"""One stretch of trouble is one event at its start and one at its end."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fp8console.probe.episodes import Episodes, scale_text, setting_text, value_text
from fp8console.protocol.records import FLAGS

SKIPPED, LOSS, GRAD = FLAGS["skipped"], FLAGS["loss_nonfinite"], FLAGS["grad_nonfinite"]


def events(flags: list[int], **values: Any) -> list[tuple[str, int | None, dict[str, Any]]]:
    found: list[tuple[str, int | None, dict[str, Any]]] = []
    episodes = Episodes(lambda kind, text, step, **fields: found.append((kind, step, {"text": text, **fields})))
    for step, bits in enumerate(flags, start=1):
        episodes.note(step, {"scale": 2.0**16, "loss": math.nan, "grad_norm": math.inf, **values}, bits)
    return found


def test_a_sound_run_says_nothing() -> None:
    assert events([0] * 100) == []


def test_a_single_skip_is_one_event() -> None:
    found = events([0, SKIPPED, 0, 0, 0, 0], loss=1.0)
    assert [(kind, step) for kind, step, _ in found] == [("skipped", 2)]
    assert found[0][2]["text"] == "step skipped: overflow at scale 2^16" and found[0][2]["scale"] == 2.0**16


def test_a_skip_by_a_loss_that_is_nan_is_not_called_an_overflow() -> None:
    assert "NaN" in events([SKIPPED], loss=math.nan)[0][2]["text"]


def test_a_stretch_is_told_at_both_ends() -> None:
    found = events([0, SKIPPED, SKIPPED, 0, SKIPPED, 0, 0, 0, 0])
    assert [(kind, step) for kind, step, _ in found] == [("skipped", 2), ("recovered", 8)]
    end = found[1][2]
    assert (end["of"], end["since"], end["until"], end["count"]) == ("skipped", 2, 5, 3)


def test_clean_steps_in_between_begin_a_new_one() -> None:
    found = events([SKIPPED, 0, 0, 0, SKIPPED, 0, 0, 0])
    assert [(kind, step) for kind, step, _ in found] == [("skipped", 1), ("skipped", 5)]


def test_an_overflow_that_the_scaler_caught_is_said_once() -> None:
    found = events([SKIPPED | GRAD] * 3 + [0] * 5)
    assert [kind for kind, _, _ in found].count("nonfinite") == 0
    assert [kind for kind, _, _ in found].count("skipped") == 1


def test_loss_and_gradients_are_their_own_episodes() -> None:
    found = events([LOSS | GRAD] * 2 + [GRAD] * 2 + [0] * 6)
    assert [(kind, fields.get("what") or fields.get("of"), step) for kind, step, fields in found] == [
        ("nonfinite", "loss", 1),
        ("nonfinite", "grad_norm", 1),
        ("recovered", "loss", 5),
        ("recovered", "grad_norm", 7),
    ]
    assert found[0][2]["text"] == "loss is NaN" and found[1][2]["text"] == "gradient norm is inf"


def test_unknown_values_are_unknown() -> None:
    found = events([SKIPPED, LOSS], scale=None, loss=None)
    assert found[0][2]["text"] == "step skipped: overflow"
    assert found[1][2]["text"] == "loss is unknown"


@pytest.mark.parametrize(
    "scale, text",
    [
        (65536.0, "2^16"),
        (0.5, "2^-1"),
        (2.0**-126, "2^-126"),
        (2.0**127, "2^127"),
        (1000.0, "1000"),
        (0.0, "0"),
        (math.inf, "inf"),
        (math.nan, "nan"),
        (-4.0, "-4"),
    ],
)
def test_scale_text(scale: float, text: str) -> None:
    assert scale_text(scale) == text


def test_texts() -> None:
    assert [value_text(v) for v in (None, math.nan, math.inf, -math.inf, 1.23456)] == [
        "unknown",
        "NaN",
        "inf",
        "-inf",
        "1.235",
    ]
    assert [setting_text(v) for v in (None, 0.5, 2000)] == ["off", "0.5", "2000"]


def test_many_skips_in_a_row_are_not_blamed_on_the_scale_and_a_scale_of_zero_is_an_alarm() -> None:
    """Stock torch halves the scale each time: 2^16 is 0 after 166 skips, and the next clean step ruins the weights."""
    told: list[tuple[int, str]] = []
    episodes = Episodes(lambda kind, text, step=None, **fields: told.append((step, text)))
    scale = 2.0**16
    for step in range(1, 200):
        episodes.note(step, {"loss": 1.0, "scale": float(torch.tensor(scale))}, FLAGS["skipped"])
        scale = float(torch.tensor(scale) / 2)
    assert [step for step, _ in told] == [1, 16, 167]
    assert "not the scale's doing" in told[1][1] and "2^1" in told[1][1]
    assert "ruins the weights" in told[2][1]


@pytest.mark.parametrize("floor", [False, True])
def test_a_floor_is_advised_where_there_is_none(floor: bool) -> None:
    told: list[str] = []
    episodes = Episodes(lambda kind, text, step=None, **fields: told.append(text), lambda: floor)
    for step in range(1, 17):
        episodes.note(step, {"loss": 1.0, "scale": 1024.0}, FLAGS["skipped"])
    assert told[1].endswith("; roll back" if floor else "; set floor=1 keeps it from 0, or roll back")
