"""AMD cards read from a synthetic /sys: MI210 and MI300X, one, two and eight, with everything that can be missing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from synthetic_sysfs import BUSY, CLOCKS, MI210, MI300X, WATTS, build, change, hwmon, node

from fp8console.hardware.sources import kfd, sysfs
from fp8console.hardware.sources.sysfs import Card, find_cards, read_slowly


def read_card(card: Card) -> dict[str, Any]:
    return sysfs.read_card(card).values


@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize(("model", "name"), [(MI210, "MI210"), (MI300X, "MI300X")], ids=["MI210", "MI300X"])
def test_every_card_is_read_in_order_of_its_address(tmp_path: Path, model: dict, name: str, count: int) -> None:
    build(tmp_path, model, count)
    cards = find_cards(tmp_path)
    assert [card.gpu.bdf for card in cards] == [f"0000:{0x03 + 0x20 * i:02x}:00.0" for i in range(count)]
    for index, card in enumerate(cards):
        assert (card.gpu.name, card.gpu.arch) == (name, "gfx90a" if name == "MI210" else "gfx942")
        assert card.gpu.uuid == f"GPU-{0xABC0000000000000 + index:016x}"
        assert card.gpu.orders == (index,)
        assert read_card(card) == {
            "busy": BUSY + index,
            "memory_busy": 21,
            "xcd_busy": None if name == "MI210" else [BUSY - xcd for xcd in range(8)],
            "vram_used": model["vram"] // 3 + index,
            "vram_total": model["vram"],
            "power_w": WATTS + index,
            "power_cap_w": model["cap"],
            "temperature_c": 61 + index,
            "memory_temperature_c": 58 + index,
            "clock_mhz": CLOCKS[model["revision"]],
            "memory_clock_mhz": 1600 if name == "MI210" else 1300,
            "throttle": {"power": 0.0, "thermal": 0.0, "hbm": 0.0} if name == "MI210" else None,
            "pcie_bytes_s": None if name == "MI210" else 12e9,
            "pcie_width": 16,
            "pcie_speed_gts": 32.0,
        }
        assert read_slowly(card) == {
            "partition": None if name == "MI210" else {"compute": "SPX", "memory": "NPS1"},
            "pcie_width": 16,
            "pcie_speed_gts": 32.0,
            "pcie_width_max": 16,
            "pcie_speed_max_gts": 32.0,
            "ecc_correctable": index,
            "ecc_uncorrectable": 0,
        }


def test_no_sysfs_and_no_card_is_no_card(tmp_path: Path) -> None:
    assert find_cards(tmp_path / "nowhere") == []
    (tmp_path / "class" / "drm").mkdir(parents=True)
    assert find_cards(tmp_path) == []


def test_other_makers_cards_and_partitions_are_left_out(tmp_path: Path) -> None:
    first, second, third = build(tmp_path, MI300X, 3)
    change(first / "vendor", "0x10de")
    (second / "vendor").unlink()
    assert [card.gpu.bdf for card in find_cards(tmp_path)] == [third.name]


@pytest.mark.parametrize("text", ["", "N/A", "65535", "4294967295", "18446744073709551615", "101", "-1", "7.5"])
def test_a_percentage_that_is_none_is_unknown_and_not_zero(tmp_path: Path, text: str) -> None:
    (device,) = build(tmp_path, MI300X, 1)
    change(device / "gpu_busy_percent", text)
    # gpu_metrics would serve in its place.
    assert read_card(find_cards(tmp_path)[0])["busy"] == BUSY
    (device / "gpu_metrics").unlink()
    sample = read_card(find_cards(tmp_path)[0])
    assert sample["busy"] is None
    assert sample["memory_busy"] == 21


@pytest.mark.parametrize("text", ["0", "100"])
def test_the_ends_of_the_range_are_percentages(tmp_path: Path, text: str) -> None:
    (device,) = build(tmp_path, MI300X, 1)
    change(device / "gpu_busy_percent", text)
    assert read_card(find_cards(tmp_path)[0])["busy"] == int(text)


def test_sentinels_in_the_sensors_are_unknown(tmp_path: Path) -> None:
    (device,) = build(tmp_path, MI300X, 1)
    (device / "gpu_metrics").unlink()
    sensors = hwmon(device)
    change(sensors / "power1_input", 0xFFFFFFFF)
    change(sensors / "power1_cap", 0)
    change(sensors / "temp2_input", 65535)
    change(sensors / "temp3_input", 65535000)
    change(device / "mem_info_vram_used", MI300X["vram"] + 1)
    sample = read_card(find_cards(tmp_path)[0])
    for key in ("power_w", "power_cap_w", "temperature_c", "memory_temperature_c", "vram_used"):
        assert sample[key] is None, key
    assert sample["vram_total"] == MI300X["vram"]


def test_a_card_with_no_file_but_its_vendor_is_all_unknown(tmp_path: Path) -> None:
    (device,) = build(tmp_path, MI210, 1)
    for path in device.rglob("*"):
        if path.is_file() and path.name != "vendor":
            path.unlink()
    sample = read_card(find_cards(tmp_path)[0])
    assert set(sample.values()) == {None}
    assert set(read_slowly(find_cards(tmp_path)[0]).values()) == {None}
    assert find_cards(tmp_path)[0].gpu.name == "AMD GPU"


@pytest.mark.parametrize(
    ("number", "name"), [("0x74a1", "MI300X"), ("0x75a3", "MI355X"), ("0x744c", "AMD GPU 0x744c"), ("junk", "AMD GPU")]
)
def test_the_device_number_names_a_card_that_the_driver_does_not(tmp_path: Path, number: str, name: str) -> None:
    (device,) = build(tmp_path, MI300X, 1)
    change(device / "product_name", "")
    change(device / "device", number)
    assert find_cards(tmp_path)[0].gpu.name == name


def test_the_edge_sensor_serves_where_there_is_no_hotspot(tmp_path: Path) -> None:
    (device,) = build(tmp_path, MI210, 1)
    (hwmon(device) / "temp2_label").unlink()
    (device / "gpu_metrics").unlink()
    assert read_card(find_cards(tmp_path)[0])["temperature_c"] == 46


def test_values_that_change_are_seen_and_a_card_that_goes_is_unknown(tmp_path: Path) -> None:
    first, second = build(tmp_path, MI300X, 2)
    cards = find_cards(tmp_path)
    for busy in (5, 50, 99):
        change(first / "gpu_busy_percent", busy)
        assert [read_card(card)["busy"] for card in cards] == [busy, BUSY + 1]
    for path in second.rglob("*"):
        if path.is_file():
            path.unlink()
    assert read_card(cards[0])["busy"] == 99
    assert set(read_card(cards[1]).values()) == {None}


@pytest.mark.parametrize(
    ("version", "arch"),
    [(90010, "gfx90a"), (90402, "gfx942"), (90500, "gfx950"), (110000, "gfx1100"), (90008, "gfx908")],
)
def test_the_architecture_by_kfds_number(version: int, arch: str) -> None:
    assert kfd.arch_of(version) == arch
    assert kfd.arch_of(0) is None and kfd.arch_of(None) is None


def test_a_partitioned_card_is_one_card_with_many_numbers(tmp_path: Path) -> None:
    """CPX: eight nodes of KFD at one address, and the next card's numbers follow."""
    build(tmp_path, {**MI300X, "partition": ("CPX", "NPS4")}, 2)
    nodes = tmp_path / "devices" / "virtual" / "kfd" / "kfd"
    shutil.rmtree(nodes / "topology" / "nodes" / "2")
    for part in range(1, 8):
        node(nodes, 1 + part, 0x03, MI300X, part)
    node(nodes, 9, 0x23, MI300X, 8)
    first, second = (card.gpu for card in find_cards(tmp_path))
    assert first.orders == (0, 1, 2, 3, 4, 5, 6, 7) and second.orders == (8,)
    assert read_slowly(find_cards(tmp_path)[0])["partition"] == {"compute": "CPX", "memory": "NPS4"}


def test_a_node_that_may_not_be_read_is_not_counted(tmp_path: Path) -> None:
    """Containers hide GPUs so, and HIP then counts the others from 0."""
    build(tmp_path, MI300X, 2)
    (tmp_path / "class" / "kfd" / "kfd" / "topology" / "nodes" / "1" / "properties").unlink()
    assert [card.gpu.orders for card in find_cards(tmp_path)] == [(), (0,)]
