"""The doctor's look at groups, device files, limits, terminal and disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from doctor_places import MI210, bad, look, machine_of, named, surroundings

from fp8console.doctor import access
from fp8console.doctor.access import Device, Folder


def check(tmp_path: Path, cards: int = 1, **changes):
    return access.check(machine_of(tmp_path / "sys", *[MI210] * cards), surroundings(**changes))


def test_a_sound_host_has_nothing_wrong(tmp_path: Path) -> None:
    found = check(tmp_path)
    assert bad(found) == set() and all(not finding.evidence.startswith("not known") for finding in found)


def test_host_without_a_card_needs_no_groups(tmp_path: Path) -> None:
    found = access.check(look(tmp_path), surroundings(groups=frozenset(), kfd=None, render=()))
    assert bad(found) == set()


def test_no_groups(tmp_path: Path) -> None:
    closed = {
        "groups": frozenset({"ann"}),
        "kfd": Device("/dev/kfd", False, "render"),
        "render": (Device("/dev/dri/renderD128", False, "render"),),
    }
    found = check(tmp_path, **closed)
    groups = named(found, "groups")
    assert groups.verdict == "fail" and groups.remedy == "sudo usermod -aG render ann, then log in again"
    assert "neither render nor video" in groups.evidence
    assert bad(found) == {"groups", "/dev/kfd", "/dev/dri"}
    inside = named(access.check(look(tmp_path / "sys"), surroundings(container="Docker", **closed)), "groups")
    assert inside.remedy == "start the container with --group-add render"


def test_group_without_a_name_is_told_by_number(tmp_path: Path) -> None:
    found = named(check(tmp_path, kfd=Device("/dev/kfd", False, "109"), container="Podman"), "groups")
    assert found.verdict == "fail" and found.remedy == "start the container with --group-add 109"


def test_in_the_group_and_still_refused(tmp_path: Path) -> None:
    found = named(check(tmp_path, kfd=Device("/dev/kfd", False, "render", 0o600)), "groups")
    assert found.verdict == "fail" and "mode 600" in found.evidence and "chmod" in str(found.remedy)


@pytest.mark.parametrize(
    ("container", "remedy"), [(None, "modprobe amdgpu"), ("Docker", "--device /dev/kfd --device /dev/dri")]
)
def test_kfd_is_not_there(tmp_path: Path, container: str | None, remedy: str) -> None:
    found = check(tmp_path, kfd=None, render=(), container=container)
    assert named(found, "/dev/kfd").verdict == named(found, "/dev/dri").verdict == "fail"
    assert remedy in str(named(found, "/dev/kfd").remedy)


def test_fewer_render_nodes_than_cards(tmp_path: Path) -> None:
    found = named(check(tmp_path, cards=2), "/dev/dri")
    assert found.verdict == "warn" and "for 2 cards" in found.evidence


def test_small_shared_memory(tmp_path: Path) -> None:
    found = named(check(tmp_path, shm=64 << 20, container="Docker"), "shared memory")
    assert found.verdict == "warn" and "64 MiB" in found.evidence and "--shm-size" in str(found.remedy)


@pytest.mark.parametrize(
    ("memlock", "rdma", "verdict"),
    [(-1, True, "ok"), (8 << 20, False, "ok"), (8 << 20, True, "warn"), (None, True, "not applicable")],
)
def test_locked_memory_matters_with_rdma_alone(tmp_path: Path, memlock: int | None, rdma: bool, verdict: str) -> None:
    assert named(check(tmp_path, memlock=memlock, rdma=rdma), "locked memory").verdict == verdict


@pytest.mark.parametrize(
    ("environ", "verdict"),
    [
        ({"LANG": "en_GB.UTF-8"}, "ok"),
        ({"LANG": "de_DE.utf8", "LC_ALL": "C"}, "warn"),
        ({"LC_ALL": "", "LC_CTYPE": "C.UTF-8"}, "ok"),
        ({"LC_CTYPE": "C.UTF-8", "LANG": "C"}, "warn"),  # Python's own doing (PEP 538)
        ({"LANG": "de_DE@euro"}, "warn"),
        ({}, "warn"),
    ],
)
def test_locale(tmp_path: Path, environ: dict, verdict: str) -> None:
    assert named(check(tmp_path, environ={**environ, "TERM": "xterm-256color"}), "locale").verdict == verdict


@pytest.mark.parametrize(
    ("environ", "verdict", "words"),
    [
        ({"TERM": "xterm-256color"}, "ok", "256 colours"),
        ({"TERM": "xterm-256color", "COLORTERM": "truecolor"}, "ok", "24-bit"),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, "ok", "no colours"),
        ({"TERM": "linux"}, "warn", "16 colours"),
        ({"TERM": "dumb"}, "warn", "can't draw"),
        ({}, "warn", "not set"),
        ({"TERM": "wezterm"}, "ok", "not known"),
    ],
)
def test_terminal(tmp_path: Path, environ: dict, verdict: str, words: str) -> None:
    found = named(check(tmp_path, environ={**environ, "LANG": "C.UTF-8"}), "terminal")
    assert found.verdict == verdict and words in found.evidence


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"writable": False}, {"run directory": "warn"}),
        ({"kind": "tmpfs"}, {"run directory": "warn", "free space": "ok"}),
        ({"kind": "nfs4"}, {"run directory": "ok", "free space": "ok"}),
        ({"kind": None, "free": None}, {"run directory": "ok", "free space": "not applicable"}),
        ({"free": 5 << 30}, {"run directory": "ok", "free space": "warn"}),
        ({"free": 100 << 20}, {"run directory": "ok", "free space": "fail"}),
    ],
)
def test_run_directory(tmp_path: Path, changes: dict, expected: dict) -> None:
    fine = {"path": Path("/runs"), "nearest": Path("/"), "writable": True, "kind": "ext4", "free": 900 << 30}
    found = {f.name: f.verdict for f in check(tmp_path, runs=Folder(**{**fine, **changes}))}
    assert {name: found[name] for name in ("run directory", "free space") if name in found} == expected


def test_logout(tmp_path: Path) -> None:
    assert (
        named(check(tmp_path / "a", killed_at_logout="run `loginctl enable-linger` once"), "logout").verdict == "warn"
    )
    assert named(check(tmp_path / "b", systemd=False), "logout").verdict == "not applicable"


def test_looking_at_this_place(tmp_path: Path) -> None:
    (tmp_path / "dev/dri").mkdir(parents=True)
    for name in ("kfd", "dri/renderD128", "dri/card0", "nvidia0", "nvidiactl"):
        (tmp_path / "dev" / name).touch(0o600)
    here = access.look(dict(os.environ), tmp_path / "not" / "yet", None, tmp_path / "dev", tmp_path)
    assert here.kfd is not None and here.kfd.usable and here.kfd.mode == 0o600
    assert [device.path for device in here.render] == [str(tmp_path / "dev/dri/renderD128")]
    assert [Path(device.path).name for device in here.nvidia] == ["nvidia0"]
    assert here.runs is not None and here.runs.nearest == tmp_path and here.runs.writable
    assert here.runs.free and here.runs.kind and here.shm is None
    assert not (tmp_path / "not").exists()
