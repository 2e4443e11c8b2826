"""The doctor where a machine is odd: garbage for answers, no home, no locale; it says what it can and never breaks."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from doctor_places import MI210, TABLES, bad, look, machine_of, named, script, surroundings, write

from fp8console.cli.main import main
from fp8console.doctor import access, device, environment, inquiry, machine, tables

BYTES = b"\xff\xfe\x1b[31m\x00\n"


def test_garbage_for_files(tmp_path: Path) -> None:
    """Of the card that has them nothing is invented; the other one is told of."""
    machine_of(tmp_path, MI210, MI210)
    for path in (tmp_path / "devices/pci0000:00/0000:00:01.0/0000:03:00.0").iterdir():
        if path.name not in ("vendor", "class"):
            path.write_bytes(BYTES)
    (tmp_path / "class/kfd/kfd/topology/nodes/1/properties").write_bytes(BYTES + "gfx_target_version ²\n".encode())
    there = look(tmp_path)
    assert [(card.bdf, card.arch) for card in there.cards] == [("0000:03:00.0", None), ("0000:23:00.0", "gfx90a")]
    found = device.check(there, TABLES, inquiry.Answer("python"), False)
    assert [one.verdict for one in found if "0000:23" in one.evidence and one.name == "PCIe"] == ["ok"]
    assert all("not known" in one.evidence for one in found if one.evidence.startswith("\x1b"))


def test_an_nvidia_smi_that_prints_garbage(tmp_path: Path) -> None:
    tool = write(tmp_path / "nvidia-smi", "#!/bin/sh\nprintf '\\377\\376,\\033[31m'; exit 3")
    tool.chmod(0o755)
    told, problem = machine.nvidia_smi({"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert told == [] and str(problem).startswith("nvidia-smi: exit status 3")


@pytest.mark.parametrize(
    ("line", "trouble"),
    [
        ("head -c 300000 /dev/urandom", "ended with exit status 0"),
        ("head -c 300000 /dev/zero | tr '\\0' '['", "ended with exit status 0"),
        ("echo '[]'; echo '{\"torch\": 3}'; kill -SEGV $$", "ended by SIGSEGV"),
    ],
)
def test_a_python_that_answers_garbage(tmp_path: Path, line: str, trouble: str) -> None:
    answer = inquiry.ask(script(tmp_path, line), {"PATH": "/usr/bin:/bin"})
    assert trouble in str(answer.trouble) and answer.torch is None


def test_mounts_of_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel writes a mount's name as it is, whatever its bytes."""
    text = b"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n23 22 0:5 / /mnt/\xff\xfe rw - nfs4 server:/x rw\n\n24 22\n"
    real = Path.read_text

    def read_text(path: Path, encoding: str | None = None, errors: str | None = None) -> str:
        return text.decode(errors=errors or "strict") if path.name == "mountinfo" else real(path, encoding, errors)

    monkeypatch.setattr(Path, "read_text", read_text)
    here = access.look({}, tmp_path / "runs", None)
    assert here.runs is not None and here.runs.kind == "ext4"


def test_no_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without an entry and without HOME, as in containers run with a number."""

    def no_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert not tables.user_file({}).exists()


def run(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[bytes]:
    bare = script(folder, f'exec {sys.executable} -S "$@"')
    root = str(Path(__file__).resolve().parents[2])
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": root, "SYSFS_PATH": str(folder / "sys"), **environ}
    command = [sys.executable, "-m", "fp8console", "doctor", "--python", bare, *words]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, timeout=60)


def test_a_terminal_that_can_not_show_it(tmp_path: Path) -> None:
    """Values of the environment may hold any bytes; what the output can't show is told by its number."""
    done = run(tmp_path, PYTHONIOENCODING="ascii", NCCL_SOCKET_IFNAME="ethé\udcff\x1b[31m")
    assert done.returncode == 1 and done.stderr == b""
    assert b"NCCL_SOCKET_IFNAME" in done.stdout and b"\x1b" not in done.stdout and b"eth\\xe9" in done.stdout
    assert b"fail" in done.stdout.splitlines()[-1]


def test_locale_c(tmp_path: Path) -> None:
    done = run(tmp_path, "--json", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", HOME=str(tmp_path))
    assert done.returncode == 1 and done.stderr == b""
    found = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
    assert found["locale"]["verdict"] == "warn" and "not UTF-8" in found["locale"]["evidence"]


def test_no_output_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a service starts it with its output closed."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setenv("SYSFS_PATH", str(tmp_path))
    assert main(["doctor", "--python", script(tmp_path, f'exec {sys.executable} -S "$@"')]) == 1


def test_streams_keep_their_own_way_with_what_they_can_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="surrogateescape")
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["--version"]) == 0 and stream.errors == "surrogateescape"


@pytest.mark.parametrize("hidden", ["HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"])
def test_an_empty_list_hides_nothing_from_hip(tmp_path: Path, hidden: str) -> None:
    """HIP takes an empty variable for one that is not set; torch, where it counts through amdsmi, for no device."""
    there = machine_of(tmp_path, MI210)
    found = environment.check(there, inquiry.Answer("python"), {hidden: ""}, [])
    assert named(found, hidden).verdict == "warn" and "empty" in named(found, hidden).evidence
    found = environment.check(there, inquiry.Answer("python"), {"ROCR_VISIBLE_DEVICES": ""}, [])
    assert named(found, "ROCR_VISIBLE_DEVICES").verdict == "fail"
    both = {"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "3"}
    assert "CUDA_VISIBLE_DEVICES" in bad(environment.check(there, inquiry.Answer("python"), both, []))


def test_nothing_is_wrong_with_a_sound_place_after_all_that(tmp_path: Path) -> None:
    assert bad(access.check(machine_of(tmp_path, MI210), surroundings())) == set()


def test_a_kernel_that_does_not_tell_of_ecc_has_not_switched_it_off(tmp_path: Path) -> None:
    machine_of(tmp_path, MI210)
    node = tmp_path / "class/kfd/kfd/topology/nodes/1/properties"
    node.write_text("\n".join(line for line in node.read_text().splitlines() if not line.startswith("capability")))
    found = named(device.check(look(tmp_path), TABLES, inquiry.Answer("python"), False), "SRAM ECC")
    assert found.verdict == "not applicable" and found.evidence.startswith("not known")
