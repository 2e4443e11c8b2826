"""The doctor's look at cards: folders that look like /sys, and what must be said of them; nothing more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from doctor_places import CPU, MI210, MI300X, RX9070, RYZEN, TABLES, bad, look, machine_of, named, rocm, verdicts, write

from fp8console.doctor import device, machine, tables
from fp8console.numerics import devices, survey


def check(here: machine.Machine, answer=CPU, bandwidth=False):
    return device.check(here, TABLES, answer, bandwidth)


def test_machine_without_a_gpu_has_nothing_wrong(tmp_path: Path) -> None:
    found = check(look(tmp_path))
    assert verdicts(found) == {"architecture": "not applicable"}
    assert "no AMD or NVIDIA card" in found[0].evidence


@pytest.mark.parametrize(
    ("version", "name"),
    [(90010, "gfx90a"), (90402, "gfx942"), (90500, "gfx950"), (110000, "gfx1100"), (120001, "gfx1201")],
)
def test_gfx_names_are_llvm_s(version: int, name: str) -> None:
    assert machine.gfx_name(version) == name


def test_mi210_has_no_fp8_hardware(tmp_path: Path) -> None:
    here = machine_of(tmp_path, MI210, MI210)
    found = check(here)
    assert here.rocm_devices == 2
    assert named(found, "architecture").evidence == "2 x MI210 (gfx90a), by KFD"
    formats = named(found, "FP8 formats")
    assert formats.verdict == "warn" and "emulated here" in formats.evidence and "BF16" in str(formats.remedy)
    assert bad(found) == {"FP8 formats"}


def test_mi300x_has_fnuz_and_partitions(tmp_path: Path) -> None:
    modes = {"current_compute_partition": "CPX", "current_memory_partition": "NPS4"}
    here = machine_of(tmp_path, MI300X, nodes=8, **modes)
    found = check(here)
    assert named(found, "architecture").evidence == "MI300X (gfx942), by KFD"
    assert named(found, "FP8 formats").evidence.startswith("e4m3fnuz and e5m2fnuz in matrix hardware")
    assert named(found, "partitions").evidence == "CPX/NPS4 on 1 card: ROCm has 8 devices"
    assert here.rocm_devices == 8 and bad(found) == set()


def test_rdna4_has_ocp_formats(tmp_path: Path) -> None:
    assert named(check(machine_of(tmp_path, RX9070)), "FP8 formats").evidence.startswith("e4m3fn and e5m2 in")


def test_cards_that_differ_are_told_apart(tmp_path: Path) -> None:
    here = machine_of(tmp_path, MI210, MI300X)
    found = [f for f in check(here) if f.name == "FP8 formats"]
    assert [f.verdict for f in found] == ["warn", "ok"]
    assert found[0].evidence.startswith("MI210 0000:03:00.0: ") and found[1].evidence.startswith("MI300X 0000:23:")


def test_processor_s_own_gpu_is_none_to_train_on(tmp_path: Path) -> None:
    here = machine_of(tmp_path, RYZEN)
    assert here.cards == () and len(here.built_in) == 1
    assert verdicts(check(here)) == {"architecture": "not applicable"}


def test_card_without_a_driver_fails(tmp_path: Path) -> None:
    here = machine_of(tmp_path, MI210, kfd=False)
    (tmp_path / "devices/pci0000:00/0000:00:01.0/0000:03:00.0/mem_info_vram_total").unlink()
    found = named(check(look(tmp_path)), "architecture")
    assert found.verdict == "fail" and "no driver has taken 0000:03:00.0" in found.evidence
    assert "modprobe amdgpu" in str(found.remedy)
    with_driver = named(check(here), "architecture")  # amdgpu is there, KFD is not
    assert with_driver.verdict == "fail" and "KFD" in with_driver.evidence


def test_unknown_architecture_is_said_to_be_unknown(tmp_path: Path) -> None:
    strange = named(check(machine_of(tmp_path, (0x7FFF, "", 16 << 30, 130000))), "FP8 formats")
    assert strange.verdict == "not applicable" and strange.evidence.startswith("not known: gfx1300 is not in the table")


def test_unreadable_node_is_named(tmp_path: Path) -> None:
    machine_of(tmp_path, MI210)
    (tmp_path / "class/kfd/kfd/topology/nodes/2").mkdir()
    assert "KFD node 2: No such file" in named(check(look(tmp_path)), "architecture").evidence


def test_unreadable_topology_does_not_mean_no_card(tmp_path: Path) -> None:
    (tmp_path / "class/kfd/kfd/topology/nodes/1").mkdir(parents=True)
    found = named(check(look(tmp_path)), "architecture")
    assert found.verdict == "not applicable" and found.evidence.startswith("not known: no AMD or NVIDIA card was found")


def test_kfd_alone_is_enough(tmp_path: Path) -> None:
    write(tmp_path / "class/kfd/kfd/topology/nodes/1/properties", "gfx_target_version 90010\nlocation_id 768\n")
    found = check(look(tmp_path))
    assert named(found, "FP8 formats").verdict == "warn"
    assert named(found, "PCIe").evidence.startswith("not known")


def test_sram_ecc(tmp_path: Path) -> None:
    machine_of(tmp_path, MI210)
    assert named(check(look(tmp_path)), "SRAM ECC").verdict == "ok"
    node = tmp_path / "class/kfd/kfd/topology/nodes/1/properties"
    node.write_text(node.read_text().replace(f"capability {1 << 26}", "capability 0"))
    assert named(check(look(tmp_path)), "SRAM ECC").verdict == "warn"


def test_ecc_errors_are_counted(tmp_path: Path) -> None:
    machine_of(tmp_path, MI210, MI210)
    assert named(check(look(tmp_path)), "ECC errors").evidence.startswith("not known")
    for index, (lost, corrected) in enumerate([(0, 5), (0, 7)]):
        card = tmp_path / f"devices/pci0000:00/0000:00:{index + 1:02x}.0/0000:{3 + 0x20 * index:02x}:00.0"
        write(card / "ras/umc_err_count", f"ue: {lost}\nce: {corrected}\n")
        write(card / "ras/gfx_err_count", "ue: 0\nce: 1\n")
    found = named(check(look(tmp_path)), "ECC errors")
    assert found.verdict == "ok" and "14 corrected, on 2 cards" in found.evidence
    write(card / "ras/gfx_err_count", "ue: 2\nce: 1\n")
    found = named(check(look(tmp_path)), "ECC errors")
    assert found.verdict == "fail" and "uncorrectable on 0000:23:00.0: 2" in found.evidence


def nvidia_machine(folder: Path, line: str, status: int = 0) -> machine.Machine:
    write(folder / "sys/bus/pci/devices/0000:1b:00.0/vendor", "0x10de")
    write(folder / "sys/bus/pci/devices/0000:1b:00.0/class", "0x030200")
    write(folder / "bin/nvidia-smi", f"#!/bin/sh\necho '{line}'\nexit {status}\n").chmod(0o755)
    return machine.look(folder / "sys", TABLES, {"PATH": str(folder / "bin")}, nvidia=True)


def test_nvidia_s_cards_are_told_of_by_their_own_tool(tmp_path: Path) -> None:
    line = "00000000:1B:00.0, NVIDIA H200, 9.0, 570.86.15, Disabled, Disabled, 16, 16, 5, 5"
    here = nvidia_machine(tmp_path, line)
    found = check(here)
    assert named(found, "architecture").evidence == "H200 (sm_90), by nvidia-smi"
    assert named(found, "FP8 formats").evidence.startswith("e4m3fn and e5m2 in")
    assert named(found, "SRAM ECC").verdict == "warn" and named(found, "partitions").evidence == "no MIG on 1 card"
    assert bad(found) == {"SRAM ECC"}


def test_nvidia_s_tool_that_fails(tmp_path: Path) -> None:
    here = nvidia_machine(tmp_path, "Driver/library version mismatch", 18)
    assert here.problems == ("nvidia-smi: exit status 18, Driver/library version mismatch",)
    found = named(check(here), "architecture")
    assert found.verdict == "fail" and "no driver has taken 0000:1b:00.0" in found.evidence


@pytest.mark.parametrize(
    ("changes", "verdict", "words"),
    [
        ({}, "ok", "x16 at 16 GT/s"),
        ({"current_link_width": 8}, "warn", "x8 at 16 GT/s; the card can do x16 at 16 GT/s"),
        ({"current_link_speed": "8.0 GT/s PCIe"}, "warn", "x16 at 8 GT/s"),
        ({"max_link_speed": "64.0 GT/s PCIe", "current_link_speed": "32.0 GT/s PCIe"}, "warn", "0000:00:01.0 no more"),
        ({"current_link_speed": "Unknown"}, "not applicable", "not known"),
        ({"current_link_width": 255}, "not applicable", "not known"),
    ],
)
def test_pcie_against_its_maximum(tmp_path: Path, changes: dict, verdict: str, words: str) -> None:
    found = named(check(machine_of(tmp_path, MI210, **changes)), "PCIe")
    assert found.verdict == verdict and words in found.evidence


def test_idle_desktop_card_s_slow_link_is_no_fault(tmp_path: Path) -> None:
    slow = {"current_link_speed": "2.5 GT/s PCIe", "gpu_busy_percent": 0}
    assert named(check(machine_of(tmp_path / "idle", RX9070, **slow)), "PCIe").verdict == "not applicable"
    slow["gpu_busy_percent"] = 90
    assert named(check(machine_of(tmp_path / "busy", RX9070, **slow)), "PCIe").verdict == "warn"


def test_bandwidth_is_judged_by_the_card_s_figure() -> None:
    here = [{"name": "AMD Instinct MI210"}]

    def judge(gigabytes, name="AMD Instinct MI210", partitioned=False, busy=False):
        item = {"index": 0, "bytes_per_second": gigabytes * 1e9, "error": None}
        return device.judge_bandwidth(item, [{"name": name}], TABLES, partitioned, busy)

    assert judge(1300).verdict == "ok" and "79% of AMD Instinct MI210's 1,638" in judge(1300).evidence
    assert judge(600).verdict == "warn"
    assert judge(600, busy=True).evidence.startswith("not known")
    assert judge(600, partitioned=True).evidence.startswith("not known")
    assert judge(600, name="Some Card").evidence.startswith("not known")
    failed = device.judge_bandwidth({"index": 0, "error": "out of memory"}, here, TABLES, False, False)
    assert failed.evidence == "not known: the copy failed: out of memory"


def test_bandwidth_is_not_made_up(tmp_path: Path) -> None:
    here = machine_of(tmp_path, MI210)
    assert named(check(here), "memory bandwidth").verdict == "not applicable"
    assert named(check(here, rocm(), bandwidth=True), "memory bandwidth").evidence.startswith("not known")


def test_copy_is_timed() -> None:
    assert survey.copy_rate(torch, "cpu", 1 << 20) > 0


def test_longest_name_wins_and_names_are_whole() -> None:
    assert TABLES.bandwidth("NVIDIA H200") == 4800
    assert TABLES.bandwidth("AMD Instinct MI250X") == TABLES.bandwidth("AMD Instinct MI250") == 1638
    assert TABLES.bandwidth("NVIDIA L40S") == 864
    assert TABLES.bandwidth("NVIDIA L40") is None and TABLES.bandwidth("MI3000X") is None


def test_formats_agree_with_those_that_trainings_use() -> None:
    listed = [entry["name"] for entry in TABLES.architecture]
    for arch in [*listed, "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]:
        used = tuple(fmt.name.removeprefix("float8_") for fmt in devices.hardware_formats(arch))
        assert TABLES.formats(arch) == used, arch


def test_user_s_table_comes_first(tmp_path: Path) -> None:
    own = write(
        tmp_path / "doctor.toml",
        '[[card]]\nname = "H200"\nbandwidth = 4000\n[[architecture]]\nname = "gfx1300"\nfp8 = ["e4m3fn"]\n'
        '[[together]]\ntorch = ["2.13"]\nrocm = ["8"]\n',
    )
    read = tables.load(own)
    assert read.bandwidth("NVIDIA H200") == 4000 and read.formats("gfx1300") == ("e4m3fn",)
    assert read.bandwidth("AMD Instinct MI210") == 1638


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[cards]]\nname = 'x'\n", "unknown table 'cards'"),
        ("[card]\nname = 'x'\n", "write [[card]]"),
        ("[[card]]\nname = 'x'\nspeed = 3\n", "[[card]] 1: unknown key 'speed'"),
        ("[[card]]\nbandwidth = 3\n", "needs a name"),
        ("[[card]]\nname = 'x'\nbandwidth = '3'\n", "bandwidth must be a number, not '3'"),
        ("[[together]]\ntorch = ['2']\n", "names two of"),
        ("[[together]]\ntorch = '2'\nrocm = ['6']\n", "torch must be a list of texts"),
        ("[[card]\n", "doctor.toml: "),
    ],
)
def test_bad_table_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    own = write(tmp_path / "doctor.toml", text)
    with pytest.raises(tables.TableError, match=r"doctor\.toml") as error:
        tables.load(own)
    assert words in str(error.value) and "\n" not in str(error.value)
