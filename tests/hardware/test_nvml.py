"""The real package nvidia-ml-py with no library behind it (fake_library.py)."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from fake_library import GIB, FakeNvml, h100, hooked

from fp8console.hardware.gpu import Reading, Unavailable
from fp8console.hardware.rates import Rates
from fp8console.hardware.sources.nvml import Nvml

NOBODY: frozenset[int] = frozenset()


def read(card: dict[str, Any], slow: bool = False, **settings: Any) -> Reading:
    with hooked(FakeNvml([card], **settings)):
        return Nvml().read("0", slow, NOBODY)


def test_two_cards() -> None:
    with hooked(FakeNvml([h100(0), h100(1, processes=[(11, 5 * GIB), (99, GIB)])])):
        source = Nvml()
        first, second = source.gpus()
        reading = source.read(second.key, True, frozenset({11}))
    assert (first.name, first.bdf, first.arch) == ("H100 80GB HBM3", "0000:18:00.0", "sm_90")
    assert (second.bdf, second.uuid) == ("0000:38:00.0", "GPU-00000001-1111-2222-3333-444444444444")
    assert reading.whole and reading.note is None
    assert reading.values == {
        "busy": 81,
        "memory_busy": 30,
        "vram_used": 20 * GIB,
        "vram_total": 80 * GIB,
        "power_w": 650.0,
        "temperature_c": 55.0,
        "memory_temperature_c": 61.0,
        "clock_mhz": 1980,
        "memory_clock_mhz": 2619,
        "pcie_width": 16,
        "pcie_speed_gts": 32.0,
    }
    assert reading.slow == {
        "power_cap_w": 700.0,
        "pcie_width_max": 16,
        "pcie_speed_max_gts": 32.0,
        "ecc_correctable": 3,
        "ecc_uncorrectable": 0,
        "processes": [{"pid": 11, "vram": 5 * GIB}],
    }


def test_time_throttled_and_pcie_data_become_rates() -> None:
    rates = Rates()
    fields = {"197": 1000, "198": 2000}
    rates.of("gpu", read(h100(0, fields=fields)).counters, 5.0)
    # A second of the card's time later (microseconds): 250 ms too much power, 100 ms too hot (nanoseconds).
    violation = {"0": (2_000_000, 250_000_000), "1": (2_000_000, 100_000_000)}
    fields = {"197": 4000, "198": 2000}
    found = rates.of("gpu", read(h100(0, violation=violation, fields=fields)).counters, 7.0)
    assert found["throttle"] == {"power": 0.25, "thermal": 0.1, "hbm": None}
    assert found["pcie_bytes_s"] == 1500.0


def test_what_a_card_has_not_is_unknown() -> None:
    bare = h100(0, busy=None, power=None, limit=None, clocks={}, link=(None,) * 4, ecc=(None, None), fields={})
    reading = read({**bare, "violation": {}, "temperature": None}, slow=True)
    assert reading.whole
    assert {name for name, value in reading.values.items() if value is not None} == {"vram_used", "vram_total"}
    assert reading.slow.pop("processes") == []
    assert set(reading.slow.values()) == {None}
    assert reading.counters is not None and reading.counters.cycles is None and reading.counters.pcie is None


def test_memory_of_ones_and_too_much_in_use() -> None:
    assert read(h100(0, memory=(2**64 - 1, 2**64 - 1))).values["vram_total"] is None
    values = read(h100(0, memory=(GIB, 2 * GIB))).values
    assert values["vram_used"] is None and values["vram_total"] == GIB


def test_a_lost_card_is_told() -> None:
    names = ["UtilizationRates", "MemoryInfo", "PowerUsage", "Temperature", "ClockInfo"]
    names += ["CurrPcieLinkWidth", "CurrPcieLinkGeneration"]
    with pytest.raises(Unavailable, match=r"^nvml: UtilizationRates: "):
        read(h100(0, fields={}), errors={f"nvmlDeviceGet{name}": 15 for name in names})
    # One call of many leaves the rest.
    reading = read(h100(0), errors={"nvmlDeviceGetUtilizationRates": 999})
    assert not reading.whole and reading.values["busy"] is None and reading.values["power_w"] == 650.0


def test_an_older_library() -> None:
    reading = read(h100(0), absent=["nvmlDeviceGetFieldValues", "nvmlDeviceGetViolationStatus"])
    assert reading.whole and reading.values["busy"] == 80 and reading.values["memory_temperature_c"] is None


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"missing": True}, "nvml: NVML Shared Library Not Found"),
        ({"errors": {"nvmlInitWithFlags": 9}}, "nvml: Driver Not Loaded"),
    ],
)
def test_why_it_can_not_be_used(settings: dict[str, Any], reason: str) -> None:
    with hooked(FakeNvml([h100(0)], **settings)), pytest.raises(Unavailable) as failure:
        Nvml()
    assert str(failure.value) == reason


def test_no_card_and_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with hooked(FakeNvml([])), pytest.raises(Unavailable, match=r"^nvml: the driver lists no GPU$"):
        Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(Unavailable, match=r"^nvml: nvidia-ml-py is not installed"):
        Nvml()
