"""The doctor's look at environment variables, against cards that are known."""

from __future__ import annotations

from pathlib import Path

import pytest
from doctor_places import CPU, MI210, MI300X, bad, look, machine_of, named, rocm

from fp8console.doctor import environment

INTERFACES = ["lo", "eth0", "eth1", "ib0"]


def check(here, environ, interfaces=INTERFACES):
    return environment.check(here, rocm(), environ, interfaces)


def test_nothing_set_is_nothing_wrong(tmp_path: Path) -> None:
    assert bad(check(machine_of(tmp_path / "amd", MI210), {})) == set()
    assert bad(environment.check(look(tmp_path / "none"), CPU, {}, None)) == set()


@pytest.mark.parametrize(
    ("value", "verdict"),
    [("11.0.0", "fail"), ("9.0.0", "fail"), ("9.0.10", "ok"), ("gfx90a", "warn"), ("", "ok")],
)
def test_override_on_an_mi210(tmp_path: Path, value: str, verdict: str) -> None:
    found = named(check(machine_of(tmp_path, MI210), {"HSA_OVERRIDE_GFX_VERSION": value}), "HSA_OVERRIDE_GFX_VERSION")
    assert found.verdict == verdict
    if value == "11.0.0":
        assert "gfx1100 code on gfx90a" in found.evidence and found.remedy == "unset HSA_OVERRIDE_GFX_VERSION"


def test_override_within_a_family_of_desktop_cards(tmp_path: Path) -> None:
    here = machine_of(tmp_path, (0x73EF, "", 8 << 30, 100302))  # gfx1032, which ROCm does not list
    found = named(check(here, {"HSA_OVERRIDE_GFX_VERSION": "10.3.0"}), "HSA_OVERRIDE_GFX_VERSION")
    assert found.verdict == "warn" and "the same family" in found.evidence


def test_override_without_a_card_is_no_finding(tmp_path: Path) -> None:
    found = environment.check(look(tmp_path), CPU, {"HSA_OVERRIDE_GFX_VERSION": "11.0.0"}, INTERFACES)
    assert named(found, "HSA_OVERRIDE_GFX_VERSION").verdict == "not applicable"


def test_override_where_kfd_tells_nothing(tmp_path: Path) -> None:
    here = machine_of(tmp_path, MI210, kfd=False)
    found = named(check(here, {"HSA_OVERRIDE_GFX_VERSION": "11.0.0"}), "HSA_OVERRIDE_GFX_VERSION")
    assert found.evidence.startswith("not known")


@pytest.mark.parametrize(
    ("value", "verdict"),
    [("gfx942", "warn"), ("gfx942;gfx90a", "ok"), ("gfx90a:xnack-", "ok"), ("gfx906 gfx90a", "ok")],
)
def test_rocm_arch(tmp_path: Path, value: str, verdict: str) -> None:
    found = named(check(machine_of(tmp_path, MI210), {"PYTORCH_ROCM_ARCH": value}), "PYTORCH_ROCM_ARCH")
    assert found.verdict == verdict


def test_serialised_kernels(tmp_path: Path) -> None:
    here = machine_of(tmp_path, MI210)
    on = {"HIP_LAUNCH_BLOCKING": "1", "AMD_SERIALIZE_KERNEL": "3", "CUDA_LAUNCH_BLOCKING": "0"}
    found = named(check(here, on), "serialised kernels")
    assert found.verdict == "warn" and found.remedy == "unset HIP_LAUNCH_BLOCKING AMD_SERIALIZE_KERNEL"
    assert named(check(here, {"HIP_LAUNCH_BLOCKING": "0"}), "serialised kernels").verdict == "ok"


@pytest.mark.parametrize(
    ("environ", "name", "verdict", "words"),
    [
        ({"HIP_VISIBLE_DEVICES": "0,1,2,3"}, "HIP_VISIBLE_DEVICES", "ok", "all of 4 devices"),
        ({"HIP_VISIBLE_DEVICES": "3,1"}, "HIP_VISIBLE_DEVICES", "warn", "2 of 4 devices"),
        ({"HIP_VISIBLE_DEVICES": ""}, "HIP_VISIBLE_DEVICES", "warn", "is empty"),
        ({"ROCR_VISIBLE_DEVICES": ""}, "ROCR_VISIBLE_DEVICES", "fail", "hides every card"),
        ({"HIP_VISIBLE_DEVICES": "-1"}, "HIP_VISIBLE_DEVICES", "fail", "hides every card"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "CUDA_VISIBLE_DEVICES", "fail", "hides every card"),
        ({"HIP_VISIBLE_DEVICES": "0,4"}, "HIP_VISIBLE_DEVICES", "fail", "there is no device 4; 1 of 4 devices left"),
        ({"HIP_VISIBLE_DEVICES": "1,1"}, "HIP_VISIBLE_DEVICES", "fail", "named twice"),
        ({"HIP_VISIBLE_DEVICES": "0,one"}, "HIP_VISIBLE_DEVICES", "fail", "'one' is no device"),
        ({"ROCR_VISIBLE_DEVICES": "GPU-0123456789abcdef"}, "ROCR_VISIBLE_DEVICES", "warn", "1 of 4 devices"),
        ({"HIP_VISIBLE_DEVICES": "0,1,2,3", "CUDA_VISIBLE_DEVICES": "0"}, "visible devices", "warn", "disagree"),
    ],
)
def test_hidden_cards(tmp_path: Path, environ: dict, name: str, verdict: str, words: str) -> None:
    found = named(check(machine_of(tmp_path, *[MI300X] * 4), environ), name)
    assert found.verdict == verdict and words in found.evidence


def test_hip_counts_what_rocr_leaves(tmp_path: Path) -> None:
    environ = {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "3"}
    found = check(machine_of(tmp_path / "a", *[MI300X] * 4), environ)
    hip = named(found, "HIP_VISIBLE_DEVICES")
    assert hip.verdict == "fail" and "there is no device 3" in hip.evidence and "ROCR_VISIBLE_DEVICES" in hip.evidence
    environ["HIP_VISIBLE_DEVICES"] = "1,0"
    found = check(machine_of(tmp_path / "b", *[MI300X] * 4), environ)
    assert named(found, "HIP_VISIBLE_DEVICES").verdict == "ok"


def test_partitions_count_as_devices(tmp_path: Path) -> None:
    here = machine_of(tmp_path, MI300X, nodes=8)
    found = check(here, {"HIP_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"})
    assert named(found, "HIP_VISIBLE_DEVICES").verdict == "ok"


@pytest.mark.parametrize(
    ("value", "fitting"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth0", ["eth0"]),
        ("=eth", []),
        ("^lo,ib", ["eth0", "eth1"]),
        ("^=eth0", ["eth1", "ib0", "lo"]),
        ("ens3", []),
        ("ens3,ib", ["ib0"]),
    ],
)
def test_nccl_s_patterns(value: str, fitting: list[str]) -> None:
    assert environment.matching(value, INTERFACES) == fitting


def test_socket_interface_that_is_not_there(tmp_path: Path) -> None:
    here = machine_of(tmp_path, MI210)
    found = named(check(here, {"NCCL_SOCKET_IFNAME": "ens3"}), "NCCL_SOCKET_IFNAME")
    assert found.verdict == "fail" and "here are eth0, eth1, ib0, lo" in found.evidence
    assert named(check(here, {"NCCL_SOCKET_IFNAME": "ens3"}, None), "NCCL_SOCKET_IFNAME").evidence.startswith(
        "not known"
    )
    assert named(check(here, {"GLOO_SOCKET_IFNAME": "eth"}), "GLOO_SOCKET_IFNAME").verdict == "fail"
