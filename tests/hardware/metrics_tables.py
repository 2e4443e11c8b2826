"""gpu_metrics tables as the driver writes them: the structs of kgd_pp_interface.h in ctypes' natural C layout."""

from __future__ import annotations

import ctypes
from typing import Any

U8, U16, U32, U64 = ctypes.c_uint8, ctypes.c_uint16, ctypes.c_uint32, ctypes.c_uint64

Fields = list[tuple[str, Any]]


def each(kind: Any, *names: str) -> Fields:
    return [(name, kind) for name in names]


HEADER: Fields = [("structure_size", U16), ("format_revision", U8), ("content_revision", U8)]
TEMPERATURES = each(
    U16,
    *("temperature_edge", "temperature_hotspot", "temperature_mem"),
    *("temperature_vrgfx", "temperature_vrsoc", "temperature_vrmem"),
)
ACTIVITY = each(U16, "average_gfx_activity", "average_umc_activity", "average_mm_activity", "average_socket_power")
CLOCK_NAMES = ("gfxclk", "socclk", "uclk", "vclk0", "dclk0", "vclk1", "dclk1")
AVERAGE_CLOCKS = each(U16, *(f"average_{name}_frequency" for name in CLOCK_NAMES))
CURRENT_CLOCKS = each(U16, *(f"current_{name}" for name in CLOCK_NAMES))
V1_0 = [
    *HEADER,
    ("system_clock_counter", U64),
    *TEMPERATURES,
    *ACTIVITY,
    ("energy_accumulator", U32),
    *AVERAGE_CLOCKS,
    *CURRENT_CLOCKS,
    ("throttle_status", U32),
    ("current_fan_speed", U16),
    *each(U8, "pcie_link_width", "pcie_link_speed"),
]
V1_1 = [
    *HEADER,
    *TEMPERATURES,
    *ACTIVITY,
    *each(U64, "energy_accumulator", "system_clock_counter"),
    *AVERAGE_CLOCKS,
    *CURRENT_CLOCKS,
    ("throttle_status", U32),
    *each(U16, "current_fan_speed", "pcie_link_width", "pcie_link_speed", "padding"),
    *each(U32, "gfx_activity_acc", "mem_activity_acc"),
    ("temperature_hbm", U16 * 4),
]
V1_2 = [*V1_1, ("firmware_timestamp", U64)]
V1_3 = [*V1_2, *each(U16, "voltage_soc", "voltage_gfx", "voltage_mem", "padding1"), ("indep_throttle_status", U64)]

HEAD = [
    *HEADER,
    *each(U16, "temperature_hotspot", "temperature_mem", "temperature_vrsoc", "curr_socket_power"),
    *each(U16, "average_gfx_activity", "average_umc_activity"),
]
COUNTERS = each(U64, "energy_accumulator", "system_clock_counter")
LINKS = [
    ("gfxclk_lock_status", U32),
    *each(U16, "pcie_link_width", "pcie_link_speed", "xgmi_link_width", "xgmi_link_speed"),
    *each(U32, "gfx_activity_acc", "mem_activity_acc"),
    *each(U64, "pcie_bandwidth_acc", "pcie_bandwidth_inst", "pcie_l0_to_recov_count_acc"),
    *each(U64, "pcie_replay_count_acc", "pcie_replay_rover_count_acc"),
]
NAKS = each(U32, "pcie_nak_sent_count_acc", "pcie_nak_rcvd_count_acc")
XGMI = [("xgmi_read_data_acc", U64 * 8), ("xgmi_write_data_acc", U64 * 8)]
CLOCKS = [
    ("firmware_timestamp", U64),
    ("current_gfxclk", U16 * 8),
    *each(U16 * 4, "current_socclk", "current_vclk0", "current_dclk0"),
    ("current_uclk", U16),
]
RESIDENCY = each(
    U32,
    *("accumulation_counter", "prochot_residency_acc", "ppt_residency_acc"),
    *("socket_thm_residency_acc", "vr_thm_residency_acc", "hbm_thm_residency_acc"),
)
V1_4 = [*HEAD, ("vcn_activity", U16 * 4), *COUNTERS, ("throttle_status", U32), *LINKS, *XGMI, *CLOCKS, ("padding", U16)]
V1_5 = [
    *HEAD,
    *[("vcn_activity", U16 * 4), ("jpeg_activity", U16 * 32)],
    *COUNTERS,
    ("throttle_status", U32),
    *LINKS,
    *NAKS,
    *XGMI,
    *CLOCKS,
    ("padding", U16),
]


def structure(name: str, fields: Fields) -> Any:
    return type(name, (ctypes.Structure,), {"_fields_": fields})


PARTITION: Fields = [
    ("gfx_busy_inst", U32 * 8),
    ("jpeg_busy", U16 * 32),
    ("vcn_busy", U16 * 4),
    ("gfx_busy_acc", U64 * 8),
]
PARTITION_1_1 = [*PARTITION, ("gfx_below_host_limit_acc", U64 * 8)]
PARTITION_1_2 = [
    *[("gfx_busy_inst", U32 * 8), ("jpeg_busy", U16 * 40), ("vcn_busy", U16 * 4), ("gfx_busy_acc", U64 * 8)],
    *each(U64 * 8, "gfx_below_host_limit_ppt_acc", "gfx_below_host_limit_thm_acc", "gfx_low_utilization_acc"),
    ("gfx_below_host_limit_total_acc", U64 * 8),
]


def partitions(fields: Fields) -> Fields:
    return [
        ("num_partition", U16),
        ("xcp_stats", structure("Partition", fields) * 8),
        ("pcie_lc_perf_other_end_recovery", U32),
    ]


LATER = [
    *HEAD,
    ("mem_max_bandwidth", U64),
    *COUNTERS,
    *RESIDENCY,
    *LINKS,
    *NAKS,
    *XGMI,
    *[("xgmi_link_status", U16 * 8), ("padding", U16)],
    *CLOCKS,
]
TABLES = {
    0: structure("V1_0", V1_0),
    1: structure("V1_1", V1_1),
    2: structure("V1_2", V1_2),
    3: structure("V1_3", V1_3),
    4: structure("V1_4", V1_4),
    5: structure("V1_5", V1_5),
    6: structure("V1_6", [*HEAD, *COUNTERS, *RESIDENCY, *LINKS, *NAKS, *XGMI, *CLOCKS, *partitions(PARTITION)]),
    7: structure("V1_7", [*LATER, *partitions(PARTITION_1_1)]),
    8: structure("V1_8", [*LATER, *partitions(PARTITION_1_2)]),
    # Before its last field came.
    80: structure("V1_8", [*LATER, *partitions(PARTITION_1_2[:-1])]),
}


def table(revision: int, xcds: list[list[int]] | None = None, **values: Any) -> bytes:
    """A table of revision 1.x with these values and ones in the rest; ``xcds``: percent by partition."""
    made = TABLES[revision]()
    ctypes.memset(ctypes.byref(made), 0xFF, ctypes.sizeof(made))
    made.structure_size, made.format_revision = ctypes.sizeof(made), 1
    made.content_revision = revision if revision < 10 else revision // 10
    for name, value in values.items():
        if isinstance(value, (list, tuple)):
            for index, one in enumerate(value):
                getattr(made, name)[index] = one
        else:
            assert hasattr(made, name), name
            setattr(made, name, value)
    for part, row in enumerate(xcds or []):
        for index, busy in enumerate(row):
            made.xcp_stats[part].gfx_busy_inst[index] = busy
    return bytes(made)
