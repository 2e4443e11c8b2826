"""All of the doctor's checks on one machine after another: each fault is found, and nothing else is said to be one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doctor_places import CPU, MI210, MI300X, TABLES, bad, machine_of, named, rocm, surroundings

from fp8console.doctor import access, device, environment, software
from fp8console.doctor.findings import Finding
from fp8console.doctor.inquiry import Answer


def examined(
    folder: Path, models: tuple[Any, ...], answer: Answer, environ: dict[str, str] | None = None, **places: Any
) -> list[Finding]:
    """What the command puts together, for a machine and a place that are made up."""
    there = machine_of(folder, *models)
    given = {"ROCM_PATH": str(folder / "rocm"), **(environ or {})}
    found = device.check(there, TABLES, answer, False)
    found += software.check(there, TABLES, answer, given, lambda: rocm(len(models)), folder / "proc")
    nodes = tuple(access.Device(f"/dev/dri/renderD{128 + number}", True, "render") for number in range(len(models)))
    places = {"render": nodes, **places}
    found += environment.check(there, answer, given, ["eth0"])
    return found + access.check(there, surroundings(**places))


def test_no_gpu(tmp_path: Path) -> None:
    found = examined(tmp_path, (), CPU, kfd=None)
    assert bad(found) == set()
    assert all(finding.remedy is None for finding in found if finding.group in ("device", "environment", "access"))


@pytest.mark.parametrize(("model", "arch", "expected"), [(MI210, "gfx90a", {"FP8 formats"}), (MI300X, "gfx942", set())])
def test_sound_machines(tmp_path: Path, model: Any, arch: str, expected: set[str]) -> None:
    """An MI210 has no FP8 hardware, and no fault."""
    found = examined(tmp_path, (model,) * 2, rocm(2, arch))
    assert bad(found) == expected
    assert named(found, "architecture").evidence.endswith(f"({arch}), by KFD")


def test_a_wrong_override(tmp_path: Path) -> None:
    found = examined(tmp_path, (MI210,) * 2, rocm(2), {"HSA_OVERRIDE_GFX_VERSION": "11.0.0"})
    assert bad(found) == {"FP8 formats", "HSA_OVERRIDE_GFX_VERSION"}
    assert named(found, "HSA_OVERRIDE_GFX_VERSION").verdict == "fail"


def test_amdsmi_beside_torch(tmp_path: Path) -> None:
    found = examined(tmp_path, (MI210,) * 2, rocm(0, runtime=2, amdsmi="7.0.2"))
    assert bad(found) == {"FP8 formats", "torch's devices", "amdsmi"}
    assert "counts 0 devices with it, 2 without" in named(found, "amdsmi").evidence


def test_no_groups(tmp_path: Path) -> None:
    refused = access.Device("/dev/kfd", False, "render")
    places: dict[str, Any] = {"groups": frozenset({"ann"}), "kfd": refused}
    places["render"] = tuple(replace(refused, path=f"/dev/dri/renderD{number}") for number in (128, 129))
    found = examined(tmp_path, (MI300X,) * 2, rocm(2, "gfx942"), **places)
    assert bad(found) == {"groups", "/dev/kfd", "/dev/dri"}
    assert named(found, "groups").remedy == "sudo usermod -aG render ann, then log in again"
