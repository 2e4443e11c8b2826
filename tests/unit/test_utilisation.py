"""Utilisation over time from a hardware file: means of columns, unknown apart from unsampled, long files by places."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8console.protocol import paths
from fp8console.runs import utilisation
from fp8console.runs.utilisation import History, Row, whole_width


def sample(time: float, *busy: float | None, xcds: list[float | None] | None = None, **more: Any) -> dict[str, Any]:
    gpus = [
        {"index": index, "bdf": f"0000:0{index}:00.0", "name": "MI300X", "busy": value, "xcd_busy": xcds, "age": 0.1}
        for index, value in enumerate(busy)
    ]
    return {"time": time, "gpus": gpus, **more}


def written(folder: Path, samples: list[dict[str, Any]]) -> Path:
    path = folder / paths.HARDWARE
    path.write_text("".join(json.dumps(one) + "\n" for one in samples))
    return path


def test_a_column_is_the_mean_of_what_is_known_in_it(tmp_path: Path) -> None:
    path = written(tmp_path, [sample(10, 50), sample(11, 70), sample(20, None), sample(21, 30), sample(30, None)])
    found = History(path, 10.0, 8).look()
    assert found.width == 10 and [row.card for row in found.rows] == ["0000:00:00.0"]
    assert found.values[0].tolist()[:2] == [60.0, 30.0] and np.isnan(found.values[0, 2])
    assert found.sampled.tolist() == [True, True, True], "nothing was known, but somebody looked"


def test_where_no_sample_was_taken_nothing_is_said(tmp_path: Path) -> None:
    found = History(written(tmp_path, [sample(100, 50), sample(105, 60)]), 1.0, 20).look()
    assert found.sampled.tolist() == [True, False, False, False, False, True]
    assert np.isnan(found.values[0, 1:5]).all()


def test_a_second_that_fell_between_two_samples_is_no_gap(tmp_path: Path) -> None:
    found = History(written(tmp_path, [sample(100.99, 50), sample(102.01, 60), sample(103.0, 70)]), 1.0, 20).look()
    assert found.sampled.all() and found.values[0].tolist() == [50, 50, 60, 70]


def test_rows_are_cards_and_their_xcds_in_order(tmp_path: Path) -> None:
    path = written(tmp_path, [sample(1, 80, 90, xcds=[10.0, None, 30.0])])
    found = History(path, 1.0, 4).look()
    assert [(row.index, row.xcd) for row in found.rows] == [(i, x) for i in (0, 1) for x in (None, 0, 1, 2)]
    assert found.rows[1] == Row("0000:00:00.0", 0, "MI300X", 0)
    assert found.values[1:4, 0].tolist()[::2] == [10.0, 30.0] and np.isnan(found.values[2, 0])


def test_old_values_are_unknown(tmp_path: Path) -> None:
    one = sample(1, 80, xcds=[50.0])
    one["gpus"][0]["age"] = 14.0
    assert np.isnan(History(written(tmp_path, [one]), 1.0, 4).look().values).all()


def test_only_the_newest_columns_are_kept_and_new_samples_join(tmp_path: Path) -> None:
    history = History(written(tmp_path, [sample(second, second) for second in range(50)]), 1.0, 8)
    assert history.look().values[0].tolist() == list(range(42, 50)) and history.is_full
    history.add(sample(50, 99))
    assert history.look().values[0].tolist() == [*range(43, 50), 99]


def test_a_long_file_is_read_at_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Busy tells the time, so each column's value says whether it came from its own stretch of the file."""
    path = written(tmp_path, [sample(second, second / 200, pad="x" * (second % 60)) for second in range(20_000)])
    monkeypatch.setattr(utilisation, "WHOLE", 4096)
    monkeypatch.setattr(utilisation, "LINE_LIMIT", 4096)
    read = 0
    parse = utilisation.parse

    def counted(line: bytes) -> dict[str, Any] | None:
        nonlocal read
        read += 1
        return parse(line)

    monkeypatch.setattr(utilisation, "parse", counted)
    found = History(path, 100.0, 50).look()
    assert read < 400, "of 20,000 lines"
    assert found.values.shape == (1, 50) and found.sampled.all()
    centres = (np.arange(150, 200) + 0.5) * 100 / 200
    assert np.abs(found.values[0] - centres).max() <= 50 / 200 + 1e-6
    whole = History(path, whole_width(path, 50), 50)
    assert whole.width == 600 and whole.look().sampled.all() and whole.look().values.shape == (1, 34)
    assert not whole.is_full


def test_torn_and_foreign_lines_are_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, [sample(1, 80), sample(2, 90)])
    with open(path, "a") as file:
        file.write('nonsense\n[]\n{"time": "NaN", "gpus": []}\n{"time": 3, "gpus": [null, 5, {"xcd_busy": 3}]}\n{"ti')
    found = History(path, 1.0, 4).look()
    assert found.values[found.rows.index(Row("0000:00:00.0", 0, "MI300X"))].tolist()[:2] == [80, 90]


def test_no_file_and_an_empty_one(tmp_path: Path) -> None:
    for path in (tmp_path / "none", written(tmp_path, [])):
        found = History(path, 1.0, 4).look()
        assert found.rows == () and found.values.shape == (0, 0)
        assert whole_width(path, 10) == 1


def test_a_clock_set_back_begins_the_map_anew(tmp_path: Path) -> None:
    history = History(written(tmp_path, [sample(9000 + second, 50) for second in range(5)]), 1.0, 10)
    history.add(sample(100, 70))
    history.add(sample(101, 80))
    assert history.look().values[0].tolist() == [70, 80]
