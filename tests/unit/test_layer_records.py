"""Layer records: packed and read back, full disks, torn ends, descriptions that are gone, readers that come early."""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8console.numerics.formats import E4M3FN, E5M2
from fp8console.numerics.statistics import FIELDS
from fp8console.probe import layer_writer
from fp8console.probe.layer_writer import Key, LayerWriter, Sample, combined, to_bytes
from fp8console.protocol import paths, records
from fp8console.runs.layers import LayerRecords

NAN, INF = math.nan, math.inf
WIDTH = records.LAYER_STRUCT.size
NAMES = ("in", "middle", "out")
ROW = [3.0, 2.0, 0.5, 0.0, 8.0, 0.25, 0.125, 0.75]


def unpacked(data: bytes) -> list[dict[str, Any]]:
    assert len(data) % WIDTH == 0
    return [records.unpack_layer(data[at : at + WIDTH]) for at in range(0, len(data), WIDTH)]


def described(writer: LayerWriter, names: tuple[str, ...] = NAMES) -> list[int]:
    return writer.describe([{"name": name, "type": "Linear", "shape": [2], "parameters": 2} for name in names])


def made(folder: Path, names: tuple[str, ...] = NAMES) -> LayerWriter:
    writer = LayerWriter(folder, 0, E4M3FN, E5M2)
    described(writer, names)
    return writer


def sample(step: int, amax: float = 2.0, layers: int = 3) -> Sample:
    row = [3.0, amax, *ROW[2:]]
    return Sample(step, [Key((layer,), 0, False) for layer in range(layers)], [torch.tensor([row] * layers)], None)


# -- the layout ---------------------------------------------------------------------------------------------------
def test_a_record_has_the_layout_that_the_header_says() -> None:
    head = records.parse_header(records.header(records.LAYER_FIELDS))
    assert head["record_bytes"] == WIDTH == struct.calcsize("<qii9fI") == 56
    assert [name for name, *_ in head["fields"]][:3] == ["step", "layer", "kind"]
    assert records.LAYER_KINDS == ("weight", "gradient", "activation", "activation_gradient")


def test_a_packed_record_comes_back_and_unknown_is_not_nan() -> None:
    figures = [NAN, 3.5, None, 0.0, 12.0, None, 1.0, -INF, None]
    back = records.unpack_layer(records.pack_layer(2**40, 7, 3, figures))
    assert (back["step"], back["layer"], back["kind"]) == (2**40, 7, 3)
    assert math.isnan(back["l2"]) and back["headroom"] == -INF
    assert [name for name in records.LAYER_FIGURES if back[name] is None] == ["mean", "saturated", "scale"]
    beyond = records.unpack_layer(records.pack_layer(1, 0, 0, [-1e300, 1e300, *[0.0] * 7]))
    assert (beyond["l2"], beyond["amax"]) == (-INF, INF)


# -- a sample's records -------------------------------------------------------------------------------------------
_FIGURE = st.floats(width=32, allow_nan=False) | st.sampled_from([0.0, 1e300, INF])
_ROW = st.tuples(
    _FIGURE.map(abs) | st.just(NAN),
    _FIGURE.map(abs) | st.just(NAN),
    _FIGURE | st.just(NAN),
    st.integers(0, 100).map(float),
    st.integers(1, 2**40).map(float),
    st.floats(0, 1),
    st.floats(0, 1) | st.just(NAN),
    st.floats(0, 1),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), _ROW), min_size=1, max_size=6), st.none() | _FIGURE)
def test_a_sample_packs_as_its_records_one_by_one(rows: list[Any], scale: float | None) -> None:
    keys = [Key((place,), kind, scaled) for place, (kind, scaled, _) in enumerate(rows)]
    table = torch.tensor([row for *_, row in rows], dtype=torch.float64)
    split = len(rows) // 2  # as from two devices
    found = to_bytes(
        Sample(9, keys, [part for part in (table[:split], table[split:]) if len(part)], scale), (E4M3FN, E5M2)
    )
    for place, ((kind, scaled, row), back) in enumerate(zip(rows, unpacked(found))):
        top = 57344.0 if "gradient" in records.LAYER_KINDS[kind] else 448.0
        amax = row[1]
        headroom = None if math.isnan(amax) else INF if amax == 0 else math.log2(top) - math.log2(amax)
        figures = [row[0], *(None if math.isnan(value) else value for value in row[1:7]), headroom]
        wanted = records.unpack_layer(records.pack_layer(9, place, kind, [*figures, scale if scaled else 1.0]))
        for name, value in wanted.items():
            if name == "headroom" and value is not None and math.isfinite(value):
                assert back[name] == pytest.approx(value, abs=1e-5)
            else:
                assert back[name] == value or (value is not None and math.isnan(value) and math.isnan(back[name])), name


def test_keys_that_share_a_layer_and_keys_that_are_stale() -> None:
    keys = [Key((0, 2), 0, False), Key((1,), 1, True, stale=True), Key((1,), 1, True), Key((0,), 0, False)]
    rows = torch.tensor([[3.0, *ROW[1:]], [9.0] * 8, ROW, [4.0, *ROW[1:]]], dtype=torch.float64)
    found = unpacked(to_bytes(Sample(1, keys, [rows], 8.0), (E4M3FN, E5M2)))
    assert [(row["layer"], row["kind"], row["l2"], row["scale"]) for row in found] == [
        (0, 0, 5.0, 1.0),
        (2, 0, 3.0, 1.0),
        (1, 1, 3.0, 8.0),
    ]
    assert to_bytes(Sample(1, [Key((0,), 0, False, stale=True)], [rows[:1]], None), (E4M3FN, E5M2)) == b""


def test_rows_combine_as_if_the_tensors_had_been_one() -> None:
    """Against the figures of the joined tensor, from first principles; one part has nothing finite in it."""
    parts = [[1.0, -3.0, 0.0, INF], [0.5, 0.0], [NAN], [2.0**-20, 1000.0, 2.0**-30]]

    def row(values: list[float]) -> list[float]:
        finite = [v for v in values if math.isfinite(v)]
        nonzero = [v for v in finite if v]
        return [
            math.sqrt(sum(v * v for v in values)),
            max(map(abs, finite), default=NAN),
            sum(finite) / len(finite) if finite else NAN,
            float(len(values) - len(finite)),
            float(len(values)),
            sum(abs(v) > 464 for v in finite) / len(values),
            sum(abs(v) <= 2.0**-10 for v in nonzero) / len(nonzero) if nonzero else NAN,
            len(nonzero) / len(values),
        ]

    for chosen in (parts, parts[:2], parts[1:2] + parts[3:], parts[2:3] * 2):
        joined = [value for part in chosen for value in part]
        found, wanted = combined([row(part) for part in chosen]), row(joined)
        for name, a, b in zip(FIELDS, found, wanted):
            assert (math.isnan(a) and math.isnan(b)) or a == pytest.approx(b), name


# -- writing ------------------------------------------------------------------------------------------------------
def test_the_description_is_there_before_the_records(tmp_path: Path) -> None:
    writer = made(tmp_path)
    writer.flush()
    assert not paths.layers_about(tmp_path).exists(), "nothing is said before there is anything to say"
    writer.add(sample(1))
    writer.flush()
    about = json.loads(paths.layers_about(tmp_path).read_text())
    assert [layer["name"] for layer in about["layers"]] == list(NAMES)
    assert about["formats"]["forward"] == {
        "name": "e4m3fn",
        "max": 448.0,
        "min_normal": 2.0**-6,
        "min_subnormal": 2.0**-9,
    }
    assert about["formats"]["backward"]["max"] == 57344.0
    for file in tmp_path.iterdir():
        assert file.stat().st_mode & 0o077 == 0 and not file.name.startswith(".")


def test_a_full_disk_is_a_problem_that_passes(tmp_path: Path) -> None:
    writer = made(tmp_path)
    writer.add(sample(1))
    writer.flush()
    good, writer._file._fd = writer._file._fd, os.open("/dev/full", os.O_RDWR)
    for step in (2, 3):
        writer.add(sample(step))
        writer.flush()
        assert writer.problem == "No space left on device"
    writer._file._fd = good
    writer.flush()
    assert writer.problem is None
    assert LayerRecords(tmp_path).samples("weight", "l2")[0].tolist() == [1, 2, 3]


def test_a_description_that_can_not_be_written_holds_the_records_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = made(tmp_path)
    writer.add(sample(1))

    def full(source: Any, target: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    writer.flush()
    assert writer.problem == "No space left on device" and len(list(tmp_path.iterdir())) == 1
    assert paths.layers_file(tmp_path, 0).stat().st_size == records.HEADER_BYTES
    monkeypatch.undo()
    writer.flush()
    assert writer.problem is None and len(LayerRecords(tmp_path)) == 1


def test_a_disk_that_never_comes_back_costs_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_writer, "QUEUE_ROWS", 30)
    writer = made(tmp_path)
    for step in range(1, 16):
        writer.add(sample(step))
    assert writer.lost == 5
    writer.flush()
    assert LayerRecords(tmp_path).samples("weight", "l2")[0].tolist() == list(range(6, 16))


@pytest.mark.parametrize("torn", [1, WIDTH - 1])
def test_a_torn_last_record_is_ignored_and_written_over(tmp_path: Path, torn: int) -> None:
    writer = made(tmp_path)
    writer.add(sample(1))
    writer.flush()
    with open(paths.layers_file(tmp_path, 0), "ab") as file:
        file.write(b"\xff" * torn)
    assert len(LayerRecords(tmp_path)) == 1 and len(LayerRecords(tmp_path).records) == 3
    again = made(tmp_path)
    again.add(sample(2, 5.0))
    again.flush()
    steps, values = LayerRecords(tmp_path).samples("weight", "amax")
    assert steps.tolist() == [1, 2] and values.tolist() == [[2.0] * 3, [5.0] * 3]


def test_records_without_their_description_are_not_gone_on_with(tmp_path: Path) -> None:
    writer = made(tmp_path)
    writer.add(sample(1))
    writer.flush()
    paths.layers_about(tmp_path).unlink()
    with pytest.raises(ValueError, match=r"layers\.json, which the layer records need, is gone"):
        made(tmp_path)


def test_a_file_of_another_layout_is_not_gone_on_with(tmp_path: Path) -> None:
    paths.layers_file(tmp_path, 0).write_bytes(records.header())
    with pytest.raises(ValueError, match="another version"):
        made(tmp_path)


# -- reading ------------------------------------------------------------------------------------------------------
def write(folder: Path, *packed: bytes, names: tuple[str, ...] = NAMES, rank: int = 0) -> None:
    path = paths.layers_file(folder, rank)
    if not path.exists():
        path.write_bytes(records.header(records.LAYER_FIELDS, rank=rank))
    with open(path, "ab") as file:
        file.write(b"".join(packed))
    about = {"layers": [{"name": name} for name in names], "formats": {"forward": {}, "backward": {}}}
    paths.layers_about(folder, rank).write_text(json.dumps(about))


def record(step: int, layer: int, kind: int, amax: float | None = 1.0) -> bytes:
    return records.pack_layer(step, layer, kind, [1.0, amax, *[0.0] * 7])


def test_an_old_run_has_none(tmp_path: Path) -> None:
    reader = LayerRecords(tmp_path)
    assert reader.refresh() == 0 and reader.layers == [] and reader.problem is None
    steps, values = reader.samples("weight", "amax")
    assert steps.shape == (0,) and values.shape == (0, 0) and reader.latest("gradient") == []


def test_a_reader_that_comes_before_the_writer_reads_on(tmp_path: Path) -> None:
    reader = LayerRecords(tmp_path)
    write(tmp_path, record(10, 0, 0, 1.0), record(10, 2, 0, NAN), record(10, 1, 1, None))
    assert reader.refresh() == 1
    steps, values = reader.samples("weight", "amax")
    assert steps.tolist() == [10] and values.dtype == np.float32
    np.testing.assert_array_equal(values, np.array([[1.0, NAN, NAN]], np.float32))
    assert reader.samples("gradient", "amax")[0].tolist() == [10], "unknown, but a sample"
    write(tmp_path, record(10, 1, 0, 7.0))  # the rest of the same sample
    assert reader.refresh() == 1 and reader.samples("weight", "amax")[1].tolist()[0][1] == 7.0
    write(tmp_path, record(20, 1, 0, 5.0), record(30, 0, 2, 6.0))
    assert reader.refresh() == 3
    steps, values = reader.samples("weight", "amax")
    assert steps.tolist() == [10, 20], "the third sample has no weights"
    np.testing.assert_array_equal(values[1], np.array([NAN, 5.0, NAN], np.float32))
    assert reader.samples("activation", "amax")[0].tolist() == [30]


def test_the_last_samples_alone(tmp_path: Path) -> None:
    write(tmp_path, *(record(step, 0, 0, step) for step in range(1, 8)))
    reader = LayerRecords(tmp_path)
    for last, wanted in ((0, []), (2, [6, 7]), (7, list(range(1, 8))), (99, list(range(1, 8)))):
        steps, values = reader.samples("weight", "amax", last=last)
        assert steps.tolist() == wanted and values[:, 0].tolist() == wanted


def test_latest_has_every_layer_with_its_step(tmp_path: Path) -> None:
    write(tmp_path, record(1, 0, 1), record(1, 2, 1, None), record(2, 2, 1, INF), record(2, 1, 0), record(3, 0, 1, 9.0))
    rows = LayerRecords(tmp_path).latest("gradient")
    assert [(row["name"], row["layer"], row["step"], row["amax"]) for row in rows] == [
        ("in", 0, 3, 9.0),
        ("out", 2, 2, INF),
    ]
    assert set(rows[0]) == {"step", "layer", "name", *records.LAYER_FIGURES}


def test_layers_that_the_description_does_not_have_yet_wait_for_it(tmp_path: Path) -> None:
    write(tmp_path, record(1, 0, 0), record(1, 2, 0), names=NAMES[:1])
    reader = LayerRecords(tmp_path)
    assert reader.samples("weight", "amax")[1].shape == (1, 1) and len(reader.latest("weight")) == 1
    write(tmp_path, record(2, 1, 0))
    reader.refresh()
    assert reader.samples("weight", "amax")[1].shape == (2, 3) and len(reader.latest("weight")) == 3


def test_another_rank_has_its_own_description_or_rank_0s(tmp_path: Path) -> None:
    write(tmp_path, record(1, 0, 0))
    paths.layers_file(tmp_path, 1).write_bytes(paths.layers_file(tmp_path, 0).read_bytes())
    assert [row["name"] for row in LayerRecords(tmp_path, 1).latest("weight")] == ["in"]
    write(tmp_path, record(2, 0, 0), rank=2, names=("other",))
    assert [row["name"] for row in LayerRecords(tmp_path, 2).latest("weight")] == ["other"]


@pytest.mark.parametrize("text", ["{", "[]", '{"layers": 3, "formats": {}}', '{"layers": [{}], "formats": {}}', "\xff"])
def test_a_description_that_is_none_is_a_problem_of_one_line(tmp_path: Path, text: str) -> None:
    write(tmp_path, record(1, 0, 0))
    paths.layers_about(tmp_path).write_text(text, encoding="latin-1")
    reader = LayerRecords(tmp_path)
    assert reader.problem is not None and "layers.json: not a description" in reader.problem
    assert "\n" not in reader.problem and reader.latest("weight") == []


def test_a_foreign_file_counts_as_empty(tmp_path: Path) -> None:
    paths.layers_file(tmp_path, 0).write_bytes(b"x" * 5000)
    reader = LayerRecords(tmp_path)
    assert reader.problem is not None and len(reader) == 0 and reader.latest("weight") == []


def test_a_file_that_begins_anew_is_read_anew(tmp_path: Path) -> None:
    write(tmp_path, record(1, 0, 0), record(2, 0, 0))
    reader = LayerRecords(tmp_path)
    paths.layers_file(tmp_path, 0).unlink()
    write(tmp_path, record(7, 0, 0))
    assert reader.refresh() == 1 and reader.samples("weight", "amax")[0].tolist() == [7]


def test_an_unknown_kind_or_figure_is_named(tmp_path: Path) -> None:
    write(tmp_path, record(1, 0, 0))
    reader = LayerRecords(tmp_path)
    with pytest.raises(ValueError, match="'loss' is no kind"):
        reader.latest("loss")
    with pytest.raises(ValueError, match="known: weight, gradient"):
        reader.samples("loss", "amax")
    with pytest.raises(KeyError, match="no column 'color'"):
        reader.samples("weight", "color")
