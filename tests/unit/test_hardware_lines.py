"""Lines of hardware.jsonl: nothing is lost, little is written, old and damaged lines are read."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8console.cli.status import describe
from fp8console.console import lines
from fp8console.console.glyphs import UNICODE
from fp8console.console.snapshot import Snapshot
from fp8console.console.widgets import gpu_table, gpus
from fp8console.console.widgets.host import rows as host_rows
from fp8console.diagnosis import cards
from fp8console.diagnosis.bounds import bounds
from fp8console.hardware.gpu import MEASURED
from fp8console.hardware.launcher import IDENTITY
from fp8console.protocol import hardware, paths
from fp8console.runs.hardware_export import hardware_lines
from fp8console.runs.reader import HardwareLog, StepRecords
from fp8console.runs.status import RunStatus
from fp8console.runs.utilisation import History


def gpu(index: int, **values: Any) -> dict[str, Any]:
    """An MI300X at work, every figure known and its own."""
    card: dict[str, Any] = {
        "index": index, "name": "MI300X", "arch": "gfx942", "bdf": f"0000:{index + 5:02x}:00.0",
        "uuid": f"GPU-abc000000000{index:04x}", "source": "amdsmi", "reason": None,
        "torch_index": index, "torch_indices": [index], "used": True,
        "busy": 90 + index, "memory_busy": 20 + index, "xcd_busy": [90 + index - xcd for xcd in range(8)],
        "partition": {"compute": "SPX", "memory": "NPS1"},
        "vram_used": 150_123_456_789 + 4096 * index, "vram_total": 206_141_652_992,
        "power_w": 600.0 + index, "power_cap_w": 750.0, "temperature_c": 60.0 + index,
        "memory_temperature_c": 50.0 + index, "clock_mhz": 2100.4 - index, "memory_clock_mhz": 1300,
        "throttle": {"power": 0.0123 * index, "thermal": 0.0, "hbm": None},
        "pcie_bytes_s": 12e9, "xgmi_read_bytes_s": 1.234567890123e10 + index, "xgmi_write_bytes_s": 1.1e10 + index,
        "pcie_width": 16, "pcie_speed_gts": 32.0, "pcie_width_max": 16, "pcie_speed_max_gts": 32.0,
        "ecc_correctable": index, "ecc_uncorrectable": 0,
        "processes": [{"pid": 4000 + index, "vram": 150_000_000_000 + index}], "age": 0.0,
    }  # fmt: skip
    return {**card, **values}


def sample(gpus: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    host = {
        "cpu_percent": 21.5, "memory_used": 10**11, "memory_total": 2 * 10**12, "run_dir_free": 10**12,
        "run_dir_total": 4 * 10**12, "process_cpu_percent": 805.1, "process_rss": 5 * 10**10, "load_1m": 9.25,
    }  # fmt: skip
    return {
        "time": 1796039987.727925, "source": "amdsmi", "reason": None, "gpus": gpus, "host": host, "state": "ok",
        "silent": 0.0, "balance": 0.93, "episodes": [], **more,
    }  # fmt: skip


def same(one: Any, other: Any) -> bool:
    """Equal to four places, or to a ten-thousandth of a per cent."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) or isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-4)
    return bool(one == other)


def test_the_fields_are_all_that_is_measured() -> None:
    assert {*MEASURED, *IDENTITY, "reason", "age"} == set(hardware.GPU_FIELDS)
    assert set(gpu(0)) == set(hardware.GPU_FIELDS)


@pytest.mark.parametrize("count", [1, 2, 8, 64])
def test_nothing_is_lost(count: int) -> None:
    whole = sample([gpu(index) for index in range(count)])
    kept = copy.deepcopy(whole)
    found = hardware.parse(hardware.dump(whole))
    assert found is not None and same(whole, found)
    assert found["gpus"][-1]["vram_used"] == whole["gpus"][-1]["vram_used"]  # to the byte
    assert whole == kept  # what is written is left as it was


def test_eight_cards_take_less_than_a_third() -> None:
    whole = sample([gpu(index) for index in range(8)])
    assert len(hardware.dump(whole)) < len(json.dumps(whole, separators=(",", ":"))) / 3


def test_unknown_is_none_again_and_never_0() -> None:
    unknown = dict.fromkeys(hardware.GPU_FIELDS) | {"index": 1, "torch_indices": []}
    line = hardware.dump(sample([gpu(0), unknown]))
    found = hardware.parse(line)
    assert found is not None and found["gpus"][1] == unknown and same(gpu(0), found["gpus"][0])
    assert "null" not in hardware.dump(sample([unknown], reason="x", host={"cpu_percent": None}))


def test_odd_devices_are_none() -> None:
    found = hardware.parse(json.dumps({"gpus": [gpu(0, torch_indices=[None, True, "x", 3, 1.5, 5])]}))
    assert found is not None and found["gpus"][0]["torch_indices"] == [3, 5]
    assert "cuda:3,5" in lines.plain(gpu_table.table(found, 0.5, 300, UNICODE, True)[1])


def test_what_json_has_no_token_for_is_unknown() -> None:
    odd = sample([gpu(0, power_w=math.nan, throttle={"power": math.inf, "thermal": 0.5, "hbm": None})])
    odd["host"]["load_1m"] = math.inf
    line = hardware.dump(odd)
    found = hardware.parse(line)
    assert found is not None and found["gpus"][0]["power_w"] is None and found["host"]["load_1m"] is None
    assert found["gpus"][0]["throttle"] == {"power": None, "thermal": 0.5, "hbm": None}
    json.loads(line, parse_constant=lambda name: pytest.fail(name))


def test_devices_of_a_partitioned_card() -> None:
    cards = [gpu(0, torch_index=None, torch_indices=[0, 1, 2, 3]), gpu(1, torch_index=4, torch_indices=[4])]
    found = hardware.parse(hardware.dump(sample(cards)))
    assert found is not None
    assert [(one["torch_index"], one["torch_indices"]) for one in found["gpus"]] == [(None, [0, 1, 2, 3]), (4, [4])]
    table = [lines.plain(row) for row in gpu_table.table(found, 0.5, 300, UNICODE, True)]
    assert "cuda:0-3" in table[1] and "cuda:4" in table[2] and "unused" not in table[1]


FIGURES = st.one_of(st.none(), st.integers(0, 2**53), st.floats(0, 1e15))
CARDS = st.fixed_dictionaries(dict.fromkeys(("busy", "power_w", "pcie_bytes_s", "ecc_correctable"), FIGURES))


@settings(max_examples=50, deadline=None)
@given(st.lists(CARDS, min_size=1, max_size=5))
def test_any_figures_come_back(values: list[dict[str, Any]]) -> None:
    whole = sample([gpu(index, **figures) for index, figures in enumerate(values)])
    found = hardware.parse(hardware.dump(whole))
    assert found is not None and same(whole, found)


def test_older_lines_are_read_as_they_are() -> None:
    old = {"time": 3.0, "gpus": [{"index": 0, "busy": 5, "busy_now": "x"}], "host": {}}
    assert hardware.parse(json.dumps(old)) == old
    assert hardware.parse(hardware.dump(sample([]))) == {**sample([]), "time": 1796039987.728}


@pytest.mark.parametrize(
    "line",
    [b"", b"\xff\xfe", b"[]", b"[" * 100_000, b'{"gpus": {"all": {}', b"7"],
)
def test_what_is_no_sample(line: bytes) -> None:
    assert hardware.parse(line) is None


@pytest.mark.parametrize(
    "gpus",
    [
        {},
        {"all": 3, "each": {"index": [0]}},
        {"all": {}, "each": {"busy": [1]}},
        {"all": {}, "each": {"index": 10**12}},
        {"all": {"busy": 3}, "each": {"index": [0] * 10**5}},
    ],
)
def test_damaged_cards_are_none(gpus: dict[str, Any]) -> None:
    found = hardware.parse(json.dumps({"time": 1.0, "gpus": gpus, "host": 3}))
    assert found is not None and found["gpus"] == []


def test_a_short_column_leaves_the_rest_unknown() -> None:
    each = {"index": [0, 1], "busy": [7], "processes": [[[3]], [[4, 5]]]}
    found = hardware.parse(json.dumps({"gpus": {"all": {"throttle.power": 0.5, "odd": 1}, "each": each}}))
    assert found is not None
    assert [one["busy"] for one in found["gpus"]] == [7, None]
    assert found["gpus"][1]["throttle"] == {"power": 0.5, "thermal": None, "hbm": None}
    assert [one["processes"] for one in found["gpus"]] == [[{"pid": 3}], [{"pid": 4, "vram": 5}]]


def test_all_readers_take_both(tmp_path: Path) -> None:
    """A run that an older version began and a newer one goes on with."""
    begun = [sample([gpu(0), gpu(1)], time=1000.0 + second) for second in range(5)]
    lines = [json.dumps(one) for one in begun]
    lines += [hardware.dump(sample([gpu(0), gpu(1)], time=1005.0 + second)) for second in range(5)]
    (tmp_path / paths.HARDWARE).write_text("\n".join(lines) + "\n")
    log = HardwareLog(tmp_path)
    assert log.refresh() and log.taken == 10
    assert same(log.history[0]["gpus"], log.history[-1]["gpus"])
    look = History(tmp_path / paths.HARDWARE, 1.0, 20).look()
    assert len(look.rows) == 2 * 9 and look.values.shape == (18, 10) and (look.values[0] == 90).all()
    rows = [line for text in hardware_lines(tmp_path, "csv") for line in text.splitlines()][1:]
    assert len(rows) == 20 and [row.count(",") for row in rows] == [rows[0].count(",")] * 20
    exported = [json.loads(line) for line in hardware_lines(tmp_path, "jsonl")]
    assert all(same(one["gpus"], begun[0]["gpus"]) for one in exported)


ODD: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.floats(), st.integers(-(2**80), 2**80), st.text(max_size=3),
    st.sampled_from(([], {}, [None, "x", 3], {"power": "x", "compute": 3}, "NaN", "\x1b[31m", [[]], [{}])),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.dictionaries(st.sampled_from(hardware.GPU_FIELDS), ODD, max_size=4), max_size=3),
    st.dictionaries(st.sampled_from(hardware.HOST_FIELDS), ODD, max_size=2),
    st.dictionaries(st.sampled_from(("source", "reason", "state", "host", "gpus", "balance", "episodes")), ODD),
)
def test_whatever_stands_there_the_panels_can_show(
    changes: list[dict[str, Any]], host: dict[str, Any], others: dict[str, Any]
) -> None:
    whole = sample([{**gpu(index), **change} for index, change in enumerate(changes)])
    whole["host"] |= host
    found = hardware.parse(json.dumps({**whole, **others}))
    assert found is not None
    for rows in (gpus.rows(found, 0.5, 80, UNICODE, 2), gpu_table.table(found, 0.5, 120, UNICODE, True)):
        assert not any(character in lines.plain(row) for row in rows for character in "\x1b\n")
    status = RunStatus("r", None, "running", "/r", hardware=found)
    shown = Snapshot(1796039990.0, status, StepRecords(Path("/nowhere")), 0)
    assert host_rows(shown, UNICODE, 80, True) and host_rows(shown, UNICODE, 80, False)
    assert describe(status, 1796039990.0)
    cards.balance([found]), bounds([found], 0.5)


def test_status_tells_of_a_sampler_that_stands_still() -> None:
    last = sample([gpu(0, busy=None, age=14.0)], time=1010.0, state="stalled", reason="reading x\x1b has not returned")
    words = "\n".join(describe(RunStatus("r", None, "running", "/r", hardware=last), 1012.0))
    assert "1 GPU by amdsmi, busy unknown (no answer since 16 s), 2 s ago" in words
    assert "sampler        stalled: reading x" in words and "\x1b" not in words
    fresh = "\n".join(describe(RunStatus("r", None, "running", "/r", hardware=sample([gpu(0)])), 1796039988.0))
    assert "sampler" not in fresh and "no answer" not in fresh
