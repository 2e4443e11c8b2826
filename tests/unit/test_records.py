"""Step records: what is packed is what is read, unknown stays unknown, torn and foreign files do no harm."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8console.protocol import records
from fp8console.runs.reader import StepRecords

PATIENT = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])

_NUMBERS = {
    "q": st.integers(-(2**63), 2**63 - 1),
    "i": st.integers(-(2**31), 2**31 - 1),
    "I": st.integers(0, 2**32 - 1),
    "d": st.floats(allow_nan=True, allow_infinity=True),
}
_MEASURED = [field for field in records.STEP_FIELDS if field.name not in ("flags", "known")]
_STEP = st.fixed_dictionaries({field.name: st.none() | _NUMBERS[field.code] for field in _MEASURED})
_FLAGS = st.integers(0, 2 ** len(records.FLAGS) - 1)


def same(a: float | int | None, b: float | int | None) -> bool:
    if a is None or b is None:
        return a is b
    return (math.isnan(a) and math.isnan(b)) or a == b


@PATIENT
@given(_STEP, _FLAGS)
def test_a_packed_step_comes_back(values: dict[str, float | int | None], flags: int) -> None:
    back = records.unpack_step(records.pack_step(values, flags))
    assert back["flags"] == flags
    assert all(same(back[name], value) for name, value in values.items())


def test_unknown_is_not_zero() -> None:
    back = records.unpack_step(records.pack_step({"step": 0, "loss": 0.0}, 0))
    assert back["step"] == 0 and back["loss"] == 0.0
    assert back["scale"] is None and back["micro_batches"] is None


def test_the_header_is_of_fixed_size_and_says_its_layout() -> None:
    header = records.header(rank=3)
    assert len(header) == records.HEADER_BYTES and header.endswith(b"\n")
    parsed = records.parse_header(header)
    assert parsed["rank"] == 3
    assert parsed["record_bytes"] == records.STEP_STRUCT.size
    assert [name for name, *_ in parsed["fields"]] == [field.name for field in records.STEP_FIELDS]


@pytest.mark.parametrize("data", [b"", b"x" * 10, b"x" * 4096, b"[]".ljust(2048), b'{"magic":"other"}'.ljust(2048)])
def test_what_is_no_header_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a record file"):
        records.parse_header(data)


def test_a_header_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="over 2047"):
        records.header(note="x" * 3000)


def write(path: Path, steps: list[dict[str, float | int | None]], flags: int = 0) -> None:
    path.write_bytes(records.header() + b"".join(records.pack_step(step, flags) for step in steps))


def test_a_missing_and_an_empty_file_are_empty(tmp_path: Path) -> None:
    reader = StepRecords(tmp_path / "steps.0.rec")
    assert reader.refresh() == 0 and len(reader) == 0
    assert reader.last("loss") is None
    assert len(reader.column("loss")) == 0
    (tmp_path / "steps.0.rec").write_bytes(records.header()[:100])
    assert reader.refresh() == 0 and reader.problem is None
    write(tmp_path / "steps.0.rec", [{"step": 1, "loss": 2.5}])
    assert reader.refresh() == 1
    assert reader.last("loss") == 2.5


@PATIENT
@given(st.integers(0, 5), st.integers(0, records.STEP_STRUCT.size - 1))
def test_a_torn_last_record_is_ignored(tmp_path_factory: pytest.TempPathFactory, whole: int, torn: int) -> None:
    path = tmp_path_factory.mktemp("torn") / "steps.0.rec"
    packed = [records.pack_step({"step": step + 1, "loss": float(step)}, 0) for step in range(6)]
    path.write_bytes(records.header() + b"".join(packed[:whole]) + packed[whole][:torn])
    reader = StepRecords(path)
    assert len(reader) == whole
    with path.open("ab") as file:
        file.write(packed[whole][torn:])
    assert reader.refresh() == whole + 1
    assert reader.column("step").tolist() == list(range(1, whole + 2))


@PATIENT
@given(st.lists(st.tuples(_STEP, _FLAGS), min_size=1, max_size=8))
def test_columns_are_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[dict[str, float | int | None], int]]
) -> None:
    path = tmp_path_factory.mktemp("columns") / "steps.0.rec"
    path.write_bytes(records.header() + b"".join(records.pack_step(*step) for step in steps))
    reader = StepRecords(path)
    for field in _MEASURED:
        values, known = reader.column(field.name).tolist(), reader.known(field.name).tolist()
        for (step, _), value, is_known in zip(steps, values, known, strict=True):
            assert is_known == (step[field.name] is not None)
            assert not is_known or same(value, step[field.name])
        assert same(reader.last(field.name), steps[-1][0][field.name])
    for name, bit in records.FLAGS.items():
        assert reader.flag(name).tolist() == [bool(flags & bit) for _, flags in steps]


def test_growth_is_seen_and_old_views_live_on(tmp_path: Path) -> None:
    path = tmp_path / "steps.0.rec"
    write(path, [{"step": 1, "loss": 1.0}])
    reader = StepRecords(path)
    before = reader.column("loss")
    with path.open("ab") as file:
        file.write(records.pack_step({"step": 2, "loss": math.nan}, records.FLAGS["loss_nonfinite"]))
    assert len(reader) == 1
    assert reader.refresh() == 2
    assert before.tolist() == [1.0]
    assert math.isnan(reader.last("loss") or 0.0)
    assert reader.column("step", 1).tolist() == [2]
    assert reader.generation == 0
    reader.release_pages()
    assert reader.column("step").tolist() == [1, 2]


@pytest.mark.parametrize("how", ["truncated", "replaced", "removed"])
def test_another_file_under_the_name_is_read_anew(tmp_path: Path, how: str) -> None:
    path = tmp_path / "steps.0.rec"
    write(path, [{"step": step, "loss": 1.0} for step in range(1, 4)])
    reader = StepRecords(path)
    assert len(reader) == 3
    if how == "truncated":
        os.truncate(path, records.HEADER_BYTES)
        assert reader.refresh() == 0
    elif how == "replaced":
        write(tmp_path / "new", [{"step": 9, "loss": 2.0} for _ in range(3)])
        os.replace(tmp_path / "new", path)
        assert reader.refresh() == 3 and reader.last("step") == 9
    else:
        path.unlink()
        assert reader.refresh() == 0 and len(reader) == 0
    assert reader.generation == 1


def test_the_layout_comes_from_the_header(tmp_path: Path) -> None:
    path = tmp_path / "steps.0.rec"
    old = (records.Field("step", "q", "", ""), records.Field("loss", "d", "", ""))
    path.write_bytes(records.header(old) + np.array([(1, 2.5), (2, np.inf)], [("a", "<i8"), ("b", "<f8")]).tobytes())
    reader = StepRecords(path)
    assert reader.names == ("step", "loss")
    assert reader.column("loss").tolist() == [2.5, np.inf]
    assert reader.known("loss").all()
    with pytest.raises(KeyError, match=r"steps\.0\.rec: no column 'scale'"):
        reader.column("scale")
    with pytest.raises(KeyError, match="no column 'flags'"):
        reader.flag("skipped")
    with pytest.raises(KeyError, match="no flag 'nonsense'"):
        reader.flag("nonsense")


@pytest.mark.parametrize(
    "data",
    [
        b"\0" * 5000,
        records.header().replace(b'"record_bytes":', b'"record_bytes":9'),
        records.header().replace(b'"d"', b'"z"'),
    ],
)
def test_a_foreign_file_is_a_problem_not_an_exception(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "steps.0.rec"
    path.write_bytes(data.ljust(4096))
    reader = StepRecords(path)
    assert len(reader) == 0 and reader.last("loss") is None
    assert reader.problem is not None and str(path) in reader.problem and "\n" not in reader.problem
