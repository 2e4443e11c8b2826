"""The real package amdsmi with no library behind it (fake_library.py): values, errors, sentinels, and why it fails."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_library import GIB, FakeAmdSmi, hooked, mi300x
from synthetic_sysfs import MI210, build, change, metrics

from fp8console.hardware.gpu import Reading, Unavailable
from fp8console.hardware.sources.amdsmi import AmdSmi

NOBODY: frozenset[int] = frozenset()


def read(library: FakeAmdSmi, root: Path, slow: bool = False, row: int = 0, pids: frozenset[int] = NOBODY) -> Reading:
    with hooked(library):
        source = AmdSmi(root)
        return source.read(source.gpus()[row].key, slow, pids)


def test_an_mi300x(tmp_path: Path) -> None:
    library = FakeAmdSmi([mi300x(0), mi300x(1, processes=[(11, 5 * GIB), (99, GIB)])])
    with hooked(library):
        source = AmdSmi(tmp_path)
        first, second = source.gpus()
        reading = source.read(second.key, True, frozenset({11, 12}))
    assert (second.name, second.bdf, second.arch) == ("MI300X", "0000:23:00.0", "gfx942")
    assert (first.hip_id, second.hip_id) == (7, 6)
    assert second.uuid == "GPU-abc0000000000001"
    assert reading.note is None and reading.whole
    assert reading.values == {
        "busy": 74,
        "memory_busy": 21,
        "xcd_busy": [73, 72, 71, 70, 69, 68, 67, 66],
        "power_w": 613.0,
        "temperature_c": 62.0,
        "memory_temperature_c": 59.0,
        "clock_mhz": 2100.0,
        "memory_clock_mhz": 1300,
        "pcie_bytes_s": 12e9,
        "pcie_width": 16,
        "pcie_speed_gts": 32.0,
        "vram_total": 192 * GIB,
        "vram_used": 64 * GIB + 1,
    }
    assert reading.slow == {
        "ecc_correctable": 1,
        "ecc_uncorrectable": 0,
        "power_cap_w": 750.0,
        "pcie_width_max": 16,
        "pcie_speed_max_gts": 32.0,
        "partition": {"compute": "SPX", "memory": "NPS1"},
        "processes": [{"pid": 11, "vram": 5 * GIB}],
    }
    assert reading.counters is not None and reading.counters.xgmi_write == 8 * 2000 * 1024


def test_a_sweep_makes_few_calls_and_none_that_sleeps(tmp_path: Path) -> None:
    library = FakeAmdSmi([mi300x(0)])
    with hooked(library):
        source = AmdSmi(tmp_path)
        library.calls.clear()
        for _ in range(3):
            source.read("0", False, NOBODY)
    assert (
        library.calls
        == [*("amdsmi_get_gpu_metrics_info", "amdsmi_get_gpu_memory_total", "amdsmi_get_gpu_memory_usage")] * 3
    )
    with hooked(library):
        source.read("0", True, NOBODY)
    assert "amdsmi_get_violation_status" not in library.calls


def test_what_the_card_has_not_is_unknown(tmp_path: Path) -> None:
    empty = mi300x(0, metrics={}, xcds=None, vram=(0, 0), temperatures={}, power={}, power_cap=None, compute=None)
    empty |= {"memory": None, "ecc": (2**64 - 1, 2**64 - 1), "pcie": (0xFFFF, 0xFFFFFFFF), "target": 2**64 - 1}
    with hooked(FakeAmdSmi([empty])):
        source = AmdSmi(tmp_path)
        assert source.gpus()[0].arch is None
        reading = source.read("0", True, NOBODY)
    reading.values.pop("vram_used")  # nothing in use of a memory of 0 bytes
    assert set(reading.values.values()) == {None}
    reading.slow.pop("processes")
    assert set(reading.slow.values()) == {None}
    assert reading.whole


@pytest.mark.parametrize("value", [101, 255, 0xFFFF])
def test_no_percentage_over_100(tmp_path: Path, value: int) -> None:
    card = mi300x(0)
    card["metrics"] |= {"average_gfx_activity": value}
    card["xcds"] = [[5, value, 7]]
    values = read(FakeAmdSmi([card]), tmp_path).values
    assert values["busy"] is None and values["xcd_busy"] == [5, None, 7]


def test_other_sentinels_that_the_package_lets_through(tmp_path: Path) -> None:
    # The package knows 0xFFFF there, and the library may leave all its ones.
    card = mi300x(0, activity={}, power={"power_limit": 0xFFFFFFFF}, power_cap=2**64 - 1)
    library = FakeAmdSmi([card], errors={"amdsmi_get_gpu_metrics_info": 2})
    reading = read(library, tmp_path, slow=True)
    assert reading.values["busy"] is None and reading.values["memory_busy"] is None
    assert reading.values["power_w"] is None and reading.slow["power_cap_w"] is None


def test_partitions_of_two_and_more(tmp_path: Path) -> None:
    card = mi300x(0, xcds=[[1, 2, 3, 4], [5, 6, 7, 8]], compute="DPX", memory="NPS2")
    card["metrics"] |= {"num_partition": 2}
    reading = read(FakeAmdSmi([card]), tmp_path, slow=True)
    assert reading.values["xcd_busy"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert reading.slow["partition"] == {"compute": "DPX", "memory": "NPS2"}
    # Listed one by one, told apart by their addresses.
    with hooked(FakeAmdSmi([mi300x(0, partition=part) for part in range(4)])):
        assert [gpu.bdf for gpu in AmdSmi(tmp_path).gpus()] == [f"0000:03:00.{part}" for part in range(4)]


def test_without_dri_the_address_is_not_0(tmp_path: Path) -> None:
    with hooked(FakeAmdSmi([mi300x(0, dri=False), mi300x(1, dri=False, bdf_id=False)])):
        assert [gpu.bdf for gpu in AmdSmi(tmp_path).gpus()] == ["0000:03:00.0", None]


def test_metrics_not_supported_are_asked_for_one_by_one(tmp_path: Path) -> None:
    reading = read(FakeAmdSmi([mi300x(0)], errors={"amdsmi_get_gpu_metrics_info": 2}), tmp_path)
    assert reading.whole and reading.note is None
    assert {name: value for name, value in reading.values.items() if value is not None} == {
        "busy": 73,
        "memory_busy": 21,
        "power_w": 612.0,
        "temperature_c": 61.0,
        "memory_temperature_c": 58.0,
        "vram_total": 192 * GIB,
        "vram_used": 64 * GIB,
    }


def test_a_table_that_the_library_does_not_know(tmp_path: Path) -> None:
    reading = read(FakeAmdSmi([mi300x(0)], errors={"amdsmi_get_gpu_metrics_info": 43}), tmp_path)
    assert not reading.whole and reading.values["busy"] == 73
    assert reading.note == "amdsmi: gpu_metrics_info: error 43, data that this version of the library does not know"


def test_memory_in_megabytes_where_bytes_are_refused(tmp_path: Path) -> None:
    errors = {"amdsmi_get_gpu_memory_total": 2, "amdsmi_get_gpu_memory_usage": 2}
    values = read(FakeAmdSmi([mi300x(0)], errors=errors), tmp_path).values
    assert (values["vram_total"], values["vram_used"]) == (192 * GIB, 64 * GIB)


def test_a_card_that_answers_nothing(tmp_path: Path) -> None:
    library = FakeAmdSmi([mi300x(0)])
    with hooked(library):
        source = AmdSmi(tmp_path)
        names = {name for name in vars(library) if name.startswith("amdsmi_get")}
        library.errors.update(dict.fromkeys(names, 34))
        with pytest.raises(Unavailable, match="amdsmi: gpu_metrics_info: error 34, the amdgpu driver is not loaded"):
            source.read("0", False, NOBODY)


def test_an_mi210s_throttling_by_kind_comes_from_the_drivers_own_table(tmp_path: Path) -> None:
    (device,) = build(tmp_path, MI210, 1)
    card = mi300x(0)
    card["metrics"] = {"average_gfx_activity": 73, "indep_throttle_status": 1 << 34}
    library = FakeAmdSmi([card])
    change(device / "gpu_metrics", metrics(MI210, 0, indep_throttle_status=1 << 34))
    assert read(library, tmp_path).values["throttle"] == {"power": 0.0, "thermal": 0.0, "hbm": 1.0}
    (device / "gpu_metrics").unlink()
    assert read(library, tmp_path).values["throttle"] is None


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"missing": True}, "amdsmi: ROCm's library libamd_smi.so was not found"),
        (
            {"absent": ["amdsmi_get_gpu_enumeration_info"]},
            "amdsmi: libamd_smi.so is older than the Python package (/usr/lib/libamd_smi.so: undefined symbol: "
            "amdsmi_get_gpu_enumeration_info)",
        ),
        ({"errors": {"amdsmi_init": 34}}, "amdsmi: error 34, the amdgpu driver is not loaded"),
        (
            {"errors": {"amdsmi_init": 10}},
            "amdsmi: error 10, no permission: is the user in the groups render and video?",
        ),
        ({"errors": {"amdsmi_get_socket_handles": 8}}, "amdsmi: error 8"),
    ],
)
def test_why_it_can_not_be_used(
    tmp_path: Path, settings: dict[str, Any], reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with hooked(FakeAmdSmi([mi300x(0)], **settings)), pytest.raises(Unavailable) as failure:
        AmdSmi(tmp_path)
    assert str(failure.value) == reason
    # The package prints two lines about a missing library on stdout.
    assert capfd.readouterr() == ("", "")


def test_no_gpu_and_what_the_library_prints(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with hooked(FakeAmdSmi([], prints=True)), pytest.raises(Unavailable) as failure:
        AmdSmi(tmp_path)
    assert str(failure.value).startswith("amdsmi: the library lists no GPU (the library prints on 1 and on 2")
    assert capfd.readouterr() == ("", "")


def test_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Blocked:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "amdsmi":
                raise ModuleNotFoundError("No module named 'amdsmi'", name="amdsmi")

    monkeypatch.setattr(sys, "meta_path", [Blocked(), *sys.meta_path])
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    with pytest.raises(Unavailable, match=r"amdsmi: the package is not installed in the console's environment"):
        AmdSmi(tmp_path)


def test_rocms_own_package_serves_where_this_environments_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This environment's fails for want of its library; the one in ROCm's folder is another package."""
    package = tmp_path / "share" / "amd_smi" / "amdsmi"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "def amdsmi_init(): pass\ndef amdsmi_get_processor_handles(): return ['card']\n"
    )
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not (Path(path or os.curdir) / "amdsmi").is_dir()])
    with hooked(FakeAmdSmi([], missing=True)):
        source = AmdSmi(tmp_path)
    assert [gpu.name for gpu in source.gpus()] == ["AMD GPU"]
    del sys.modules["amdsmi"]
