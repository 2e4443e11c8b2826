"""What a rank says of its GPU; torch's properties stand in for a device's, for their names vary between versions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
import torch

from fp8console.hardware.joins import RankDevice, rank_device
from fp8console.probe.gpu_facts import gpu_facts


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A torch.cuda that the script has initialised, with one device's properties to fill."""
    properties = SimpleNamespace(name="AMD Instinct MI300X")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    return properties


def test_all_that_a_new_torch_tells(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda.uuid = UUID(bytes=b"abc0000000000001")
    cuda.pci_domain_id, cuda.pci_bus_id, cuda.pci_device_id = 0, 0x23, 0
    cuda.gcnArchName = "gfx942:sramecc+:xnack-"
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    facts = gpu_facts("cuda:0")
    assert facts == {
        "uuid": "61626330-3030-3030-3030-303030303031",
        "slot": "0000:23:00",
        "name": "AMD Instinct MI300X",
        "arch": "gfx942",
        "visible": {"HIP_VISIBLE_DEVICES": "1"},
    }
    device = rank_device({"device": "cuda:0", "gpu": facts})
    assert device == RankDevice(0, "abc0000000000001", "0000:23:00", {"HIP_VISIBLE_DEVICES": "1"})


def test_an_older_torch_tells_less(cuda: Any) -> None:
    assert gpu_facts("cuda:0") == {
        "uuid": None,
        "slot": None,
        "name": "AMD Instinct MI300X",
        "arch": None,
        "visible": {},
    }


def test_properties_that_fail_cost_the_join_alone(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(device: Any) -> Any:
        raise RuntimeError("no HIP GPUs are available")

    monkeypatch.setattr(torch.cuda, "get_device_properties", failing)
    assert gpu_facts("cuda:0") is None


def test_cuda_is_never_initialised_by_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(device: Any) -> Any:
        raise AssertionError("asked")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", asked)
    assert gpu_facts("cuda:0") is None
    assert gpu_facts("cpu") is None and gpu_facts("unknown") is None
