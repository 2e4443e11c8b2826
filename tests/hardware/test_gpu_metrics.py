"""Every revision of gpu_metrics, written through the kernel's structs in C's own layout and read back by offsets."""

from __future__ import annotations

import ctypes

import metrics_tables
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8console.hardware.gpu import Reading
from fp8console.hardware.sources.gpu_metrics import parse

INSTINCT = {
    "temperature_hotspot": 91,
    "temperature_mem": 72,
    "curr_socket_power": 741,
    "average_gfx_activity": 97,
    "average_umc_activity": 43,
    "pcie_link_width": 16,
    "pcie_link_speed": 320,
    "pcie_bandwidth_inst": 12,
    "current_gfxclk": [2100, 2080, 2060, 2040, 2100, 2080, 2060, 2040],
    "current_uclk": 1300,
    "xgmi_read_data_acc": [1, 2, 3, 4, 5, 6, 7, 8],
    "xgmi_write_data_acc": [10, 20, 30, 40, 50, 60, 70, 80],
}
RESIDENCY = {
    "accumulation_counter": 1000,
    "prochot_residency_acc": 1,
    "ppt_residency_acc": 2,
    "socket_thm_residency_acc": 3,
    "vr_thm_residency_acc": 4,
    "hbm_thm_residency_acc": 5,
    "num_partition": 1,
}
#: sizeof() of the structs on a 64-bit machine.
SIZES = {0: 80, 1: 96, 2: 104, 3: 120, 4: 288, 5: 360, 6: 1664, 7: 2208, 8: 3872, 80: 3360}


def test_the_structs_have_the_kernels_sizes() -> None:
    assert {number: ctypes.sizeof(made) for number, made in metrics_tables.TABLES.items()} == SIZES


@pytest.mark.parametrize("revision", [4, 5, 6, 7, 8, 80])
def test_an_mi300s_table(revision: int) -> None:
    others = {"throttle_status": 0} if revision < 6 else {**RESIDENCY, "xcds": [[90, 91, 92, 93, 94, 95, 96, 97]]}
    reading = parse(metrics_tables.table(revision, **INSTINCT, **others))
    assert reading.note is None
    assert reading.values == {
        "busy": 97,
        "memory_busy": 43,
        "xcd_busy": None if revision < 6 else [90, 91, 92, 93, 94, 95, 96, 97],
        "power_w": 741.0,
        "temperature_c": 91.0,
        "memory_temperature_c": 72.0,
        "clock_mhz": 2070.0,
        "memory_clock_mhz": 1300,
        "throttle": {"power": 0.0, "thermal": 0.0, "hbm": 0.0} if revision < 6 else None,
        "pcie_bytes_s": 12e9,
        "pcie_width": 16,
        "pcie_speed_gts": 32.0,
    }
    counters = reading.counters
    assert counters is not None
    assert (counters.xgmi_read, counters.xgmi_write) == (36 * 1024, 360 * 1024)
    if revision < 6:
        assert counters.cycles is None and counters.power is None
    else:
        assert (counters.cycles, counters.power, counters.thermal, counters.hbm) == (1000, 2, (1, 3, 4), 5)


@pytest.mark.parametrize("revision", [0, 1, 2, 3])
def test_an_older_cards_table(revision: int) -> None:
    speed = 80 if revision == 0 else 160  # a byte in revision 1.0
    reading = parse(
        metrics_tables.table(
            revision,
            temperature_edge=46,
            temperature_hotspot=61,
            temperature_mem=58,
            average_gfx_activity=73,
            average_umc_activity=21,
            average_socket_power=310,
            current_gfxclk=1700,
            current_uclk=1600,
            pcie_link_width=16,
            pcie_link_speed=speed,
        )
    )
    assert reading.note is None and reading.counters is None
    assert reading.values == {
        "busy": 73,
        "memory_busy": 21,
        "xcd_busy": None,
        "power_w": 310.0,
        "temperature_c": 61.0,
        "memory_temperature_c": 58.0,
        "clock_mhz": 1700.0,
        "memory_clock_mhz": 1600,
        "throttle": None,
        "pcie_bytes_s": None,
        "pcie_width": 16,
        "pcie_speed_gts": speed / 10,
    }


def test_average_clocks_and_the_edge_serve_where_nothing_better_is_told() -> None:
    reading = parse(
        metrics_tables.table(3, temperature_edge=46, average_gfxclk_frequency=1500, average_uclk_frequency=1200)
    )
    assert reading.values["temperature_c"] == 46.0
    assert (reading.values["clock_mhz"], reading.values["memory_clock_mhz"]) == (1500, 1200)


@pytest.mark.parametrize("revision", list(SIZES))
def test_a_table_of_ones_is_all_unknown(revision: int) -> None:
    reading = parse(metrics_tables.table(revision))
    assert reading.note is None
    assert set(reading.values.values()) == {None}
    if reading.counters is not None:
        counters = reading.counters
        assert {counters.cycles, counters.power, counters.hbm, counters.xgmi_read, *counters.thermal} == {None}


@pytest.mark.parametrize(
    ("bits", "kind"),
    [
        *((bit, "power") for bit in (0, 3, 16, 22)),
        *((bit, "thermal") for bit in (32, 36, 40, 44, 47)),
        (34, "hbm"),
    ],
)
def test_an_mi200s_status_bits_by_kind(bits: int, kind: str) -> None:
    throttle = parse(metrics_tables.table(3, indep_throttle_status=1 << bits)).values["throttle"]
    assert throttle == {name: float(name == kind) for name in ("power", "thermal", "hbm")}


@pytest.mark.parametrize(("bit", "kind"), [(0, "thermal"), (1, "power"), (2, "thermal"), (3, "thermal"), (4, "hbm")])
@pytest.mark.parametrize("revision", [4, 5])
def test_an_mi300s_status_bits_by_kind(revision: int, bit: int, kind: str) -> None:
    throttle = parse(metrics_tables.table(revision, throttle_status=1 << bit)).values["throttle"]
    assert throttle == {name: float(name == kind) for name in ("power", "thermal", "hbm")}


@pytest.mark.parametrize("revision", [6, 7, 8, 80])
@pytest.mark.parametrize(
    ("rows", "partitions"),
    [
        ([[1, 2, 3, 4, 5, 6, 7, 8]], 1),  # SPX
        ([[1, 2, 3, 4], [5, 6, 7, 8]], 2),  # DPX
        ([[1, 2], [3, 4], [5, 6], [7, 8]], 4),  # QPX
        ([[1], [2], [3], [4], [5], [6], [7], [8]], 8),  # CPX
        ([[1, 2, 3, 4], [5, 6, 7, 8]], 0xFFFF),  # the number is not told
    ],
)
def test_xcds_of_all_partitions(revision: int, rows: list[list[int]], partitions: int) -> None:
    assert parse(metrics_tables.table(revision, rows, num_partition=partitions)).values["xcd_busy"] == list(range(1, 9))


def test_rows_beyond_the_partitions_there_are_do_not_count() -> None:
    rows = [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert parse(metrics_tables.table(6, rows, num_partition=1)).values["xcd_busy"] == [1, 2, 3, 4]


def test_an_xcd_over_100_percent_is_unknown_and_keeps_its_place() -> None:
    reading = parse(metrics_tables.table(6, [[50, 101, 0, 100]], num_partition=1))
    assert reading.values["xcd_busy"] == [50, None, 0, 100]


@pytest.mark.parametrize("value", [101, 150, 0xFFFF])
def test_a_percentage_that_is_none(value: int) -> None:
    values = parse(metrics_tables.table(6, average_gfx_activity=value, average_umc_activity=0)).values
    assert values["busy"] is None and values["memory_busy"] == 0


@pytest.mark.parametrize(
    ("data", "note"),
    [
        (b"", "gpu_metrics is empty"),
        (b"\x80\x06", "gpu_metrics has only 2 bytes"),
        (metrics_tables.table(6)[:1600], "gpu_metrics v1.6 has 1600 bytes where 1664 are expected"),
        (metrics_tables.table(8)[:-1], "gpu_metrics v1.8 has 3871 bytes where 3360 or 3872 are expected"),
        (b"\x08\x00\x01\x09" + b"\0" * 4, "gpu_metrics v1.9 is not known here"),
        (b"\x98\x00\x02\x03" + b"\0" * 148, "gpu_metrics v2.3 is not known here"),
    ],
)
def test_a_table_that_can_not_be_read_says_why(data: bytes, note: str) -> None:
    assert parse(data) == Reading({}, note=note)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(list(SIZES)), st.randoms(use_true_random=False), st.integers(-8, 8))
def test_any_bytes_give_values_in_range_and_no_exception(revision: int, random: object, more: int) -> None:
    size = SIZES[revision]
    body = random.randbytes(max(0, size - 4 + more))  # type: ignore[attr-defined]
    header = metrics_tables.table(revision)[:4]
    values = parse(header + body).values
    for name in ("busy", "memory_busy"):
        assert values.get(name) is None or 0 <= values[name] <= 100
    for busy in values.get("xcd_busy") or ():
        assert busy is None or 0 <= busy <= 100
