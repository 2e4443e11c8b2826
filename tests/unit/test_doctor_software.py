"""The doctor's look at torch and what is beside it: Pythons that hold made-up torches, asked as real ones are."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import torch
from doctor_places import (
    CPU,
    MI210,
    MI300X,
    RX9070,
    TABLES,
    bad,
    environ,
    look,
    machine_of,
    named,
    python_with,
    rocm,
    script,
    torch_source,
    write,
)

from fp8console.doctor import inquiry, software
from fp8console.doctor.inquiry import Answer


def check(here, answer, env=None, again=None, proc=Path("/nonexistent")):
    return software.check(here, TABLES, answer, env or {"ROCM_PATH": "/nonexistent"}, again, proc)


def asked(here, python: str):
    """The findings as the command comes by them."""
    env = {**environ(), "ROCM_PATH": "/nonexistent"}
    answer = inquiry.ask(python, env)
    return answer, check(here, answer, env, lambda: inquiry.ask(python, env, without="amdsmi"))


# -- answers ----------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_real_torch_is_asked() -> None:
    answer = inquiry.ask(sys.executable, environ())
    assert answer.trouble is None and answer.torch is not None
    assert answer.torch["version"] == torch.__version__ and answer.count == torch.cuda.device_count()
    assert answer.packages["torch"] == torch.__version__.split("+")[0] or "+" in answer.packages["torch"]


def test_python_without_torch(tmp_path: Path) -> None:
    bare = script(tmp_path, f'exec {sys.executable} -S "$@"')
    _, found = asked(look(tmp_path), bare)
    assert named(found, "torch").verdict == "fail" and f"none in {bare}" == named(found, "torch").evidence
    assert "--python" in str(named(found, "torch").remedy)
    assert bad(found) == {"torch"}


def test_torch_that_can_t_be_imported(tmp_path: Path) -> None:
    python = python_with(tmp_path, torch="raise OSError('libamdhip64.so.6: cannot open shared object file')")
    _, found = asked(look(tmp_path), python)
    failed = named(found, "torch")
    assert failed.verdict == "fail" and "import torch: OSError: libamdhip64.so.6: cannot open" in failed.evidence


def test_torch_that_hangs_is_given_up(tmp_path: Path) -> None:
    python = python_with(tmp_path, torch="import time; time.sleep(600)")
    began = time.monotonic()
    answer = inquiry.ask(python, environ(), seconds=2.0)
    assert answer.trouble == "import torch: no answer within 2 s" and time.monotonic() - began < 60
    found = named(check(look(tmp_path), answer), "torch")
    assert found.verdict == "fail" and "no answer within 2 s" in found.evidence


def test_torch_that_crashes(tmp_path: Path) -> None:
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    python = python_with(tmp_path / "python", torch=torch_source(hip="6.4.1", counting=crash))
    answer, found = asked(machine_of(tmp_path / "sys", MI210), python)
    assert answer.trouble == "counting torch's devices: ended by SIGSEGV"
    assert named(found, "torch").verdict == "ok"
    assert named(found, "torch's devices").verdict == "fail"
    assert "SIGSEGV" in named(found, "torch's devices").evidence


def test_python_that_is_none(tmp_path: Path) -> None:
    answer = inquiry.ask(str(write(tmp_path / "notes.txt", "no program")), environ())
    assert "can't be started: Permission denied" in str(answer.trouble)
    found = check(look(tmp_path), answer)
    assert named(found, "torch").verdict == "fail" and named(found, "amdsmi").evidence.startswith("not known")


def test_what_libraries_print_is_kept_out(tmp_path: Path) -> None:
    source = "import os\nprint('{\"count\": 99}', flush=True)\nos.write(1, b'{\"count\": 98}\\n')\n" + torch_source()
    assert inquiry.ask(python_with(tmp_path, torch=source), environ()).count == 0


# -- builds -----------------------------------------------------------------------------------------------------------
def test_cuda_build_on_an_amd_machine(tmp_path: Path) -> None:
    python = python_with(tmp_path / "python", torch=torch_source(cuda="12.8"))
    _, found = asked(machine_of(tmp_path / "sys", MI210), python)
    failed = named(found, "torch")
    assert failed.verdict == "fail" and failed.evidence.startswith(
        "2.9.1, built for CUDA 12.8, on a machine with MI210"
    )
    assert "ROCm" in str(failed.remedy)
    assert bad(found) == {"torch"}


def test_cpu_build_on_an_amd_machine(tmp_path: Path) -> None:
    assert named(check(machine_of(tmp_path, MI300X), CPU), "torch").verdict == "fail"


def test_cpu_build_without_a_gpu_is_right(tmp_path: Path) -> None:
    assert bad(check(look(tmp_path), CPU)) == set()


def test_rocm_build_on_an_amd_machine(tmp_path: Path) -> None:
    python = python_with(tmp_path / "python", torch=torch_source(hip="6.4.43484", counting="return 2", runtime=2))
    answer, found = asked(machine_of(tmp_path / "sys", MI210, MI210), python)
    assert answer.devices[1]["arch"] == "gfx90a:sramecc+:xnack-"
    assert named(found, "torch's devices").evidence == "torch sees 2 of 2"
    assert named(found, "RCCL").evidence == "2.22.3, in torch"
    assert named(found, "torch with ROCm").verdict == "ok"
    assert bad(found) == set()


# -- amdsmi -----------------------------------------------------------------------------------------------------------
AMDSMI_COUNTS = """
        try:
            import amdsmi
        except ImportError:
            return {runtime}
        return 0
"""


def test_amdsmi_that_hides_the_cards(tmp_path: Path) -> None:
    source = torch_source(hip="7.0", counting=AMDSMI_COUNTS.format(runtime=2), runtime=2)
    python = python_with(tmp_path / "python", torch=source, amdsmi="")
    _, found = asked(machine_of(tmp_path / "sys", MI210, MI210), python)
    failed = named(found, "amdsmi")
    assert failed.verdict == "fail" and "counts 0 devices with it, 2 without" in failed.evidence
    assert "pip uninstall amdsmi" in str(failed.remedy)
    assert named(found, "torch's devices").verdict == "fail"
    assert "the runtime itself has 2" in named(found, "torch's devices").evidence


def test_amdsmi_that_breaks_the_import(tmp_path: Path) -> None:
    source = "try:\n    import amdsmi\nexcept ImportError:\n    pass\nelse:\n    raise KeyError('libamd_smi.so')\n"
    python = python_with(
        tmp_path / "python", torch=source + torch_source(hip="7.0", counting="return 1", runtime=1), amdsmi=""
    )
    _, found = asked(machine_of(tmp_path / "sys", MI210), python)
    failed = named(found, "amdsmi")
    assert failed.verdict == "fail" and "import torch fails, and works with amdsmi kept out" in failed.evidence


def test_amdsmi_is_not_blamed_for_what_it_does_not_do(tmp_path: Path) -> None:
    here = machine_of(tmp_path / "sys", MI210)
    python = python_with(tmp_path / "a", torch=torch_source(hip="7.0"), amdsmi="")
    _, found = asked(here, python)
    assert named(found, "torch's devices").verdict == "fail" and named(found, "amdsmi").verdict == "ok"
    python = python_with(tmp_path / "b", torch=torch_source(hip="7.0", counting="return 1", runtime=1), amdsmi="")
    _, found = asked(here, python)
    assert named(found, "amdsmi").verdict == "ok" and "still sees" in named(found, "amdsmi").evidence
    assert named(check(look(tmp_path), CPU), "amdsmi").verdict == "ok"


# -- devices and kernels ----------------------------------------------------------------------------------------------
def test_fewer_devices_than_cards(tmp_path: Path) -> None:
    here = machine_of(tmp_path, MI210, MI210)
    assert named(check(here, rocm(1)), "torch's devices").verdict == "warn"
    hidden = {"ROCM_PATH": "/nonexistent", "HIP_VISIBLE_DEVICES": "1"}
    found = named(check(here, rocm(1), hidden), "torch's devices")
    assert found.verdict == "ok" and found.evidence == "torch sees 1 of 2 with HIP_VISIBLE_DEVICES=1"


def test_build_without_kernels_for_the_card(tmp_path: Path) -> None:
    found = named(check(machine_of(tmp_path, RX9070), rocm(arch="gfx1201")), "torch's kernels")
    assert found.verdict == "fail" and found.evidence.startswith("none for gfx1201; this build has gfx900")


def test_rocm_older_than_the_card(tmp_path: Path) -> None:
    answer = rocm(arch="gfx942")
    answer.facts["torch"]["hip"] = "5.7.31921"
    found = named(check(machine_of(tmp_path, MI300X), answer), "torch's kernels")
    assert found.verdict == "warn" and "older than 6.0" in found.evidence


@pytest.mark.parametrize(
    ("arch", "built", "runs"),
    [
        ("gfx90a", ["gfx90a"], True),
        ("gfx90a", ["gfx908", "gfx942"], False),
        ("sm_90", ["sm_80", "sm_90"], True),
        ("sm_86", ["sm_80"], True),  # the same major version, later
        ("sm_80", ["sm_86"], False),
        ("sm_90", ["sm_80"], False),
        ("sm_90", ["sm_80", "compute_80"], True),  # PTX is compiled for what comes later
        ("sm_100", ["sm_90a"], False),
        ("sm_90", ["sm_90a"], True),
        ("sm_120", ["sm_90", "sm_120"], True),
    ],
)
def test_code_for_one_architecture_on_another(arch: str, built: list[str], runs: bool) -> None:
    assert software.has_kernels(arch, built) is runs


# -- ROCm and versions ------------------------------------------------------------------------------------------------
def test_rocm_s_folder(tmp_path: Path) -> None:
    here = machine_of(tmp_path / "sys", MI210)
    write(tmp_path / "rocm/.info/version", "6.4.1-83")
    assert named(check(here, rocm(), {"ROCM_PATH": str(tmp_path / "rocm")}), "ROCm").evidence.startswith("6.4.1-83 in")
    assert named(check(here, rocm()), "ROCm").verdict == "not applicable"


def versions(
    torchao: str | None = None, torch_version: str = "2.9.1+rocm6.4", hip: str | None = "6.4.43484", cuda=None
):
    packages = {"torchao": torchao} if torchao else {}
    return Answer("python", {"torch": {"version": torch_version, "hip": hip, "cuda": cuda}, "packages": packages})


def test_versions_that_go_together_or_do_not(tmp_path: Path) -> None:
    here = look(tmp_path)
    assert named(check(here, versions("0.15.0")), "torch with torchao").verdict == "ok"
    apart = named(check(here, versions("0.16.0")), "torch with torchao")
    assert apart.verdict == "warn" and "torch 2.10.0 only" in apart.evidence
    assert named(check(here, versions("0.18.0", "2.13.0+cpu", None)), "torch with torchao").verdict == "ok"
    unknown = named(check(here, versions("0.99")), "torch with torchao")
    assert unknown.verdict == "not applicable" and unknown.evidence.startswith("not known")
    # A pair that is not in the table is not known, never wrong: AMD builds wheels of its own.
    assert named(check(here, versions(hip="7.1.2")), "torch with ROCm").evidence.startswith("not known")


@pytest.mark.parametrize(("driver", "verdict"), [("570.86.15", "ok"), ("525.60.13", "ok"), ("470.57.02", "fail")])
def test_nvidia_driver_for_a_cuda_build(tmp_path: Path, driver: str, verdict: str) -> None:
    write(tmp_path / "sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de")
    write(tmp_path / "sys/bus/pci/devices/0000:01:00.0/class", "0x030200")
    module = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Tue Jan 1 00:00:00 UTC 2025"
    write(tmp_path / "proc/driver/nvidia/version", module)
    answer = versions(None, "2.9.1+cu128", None, "12.8")
    found = check(look(tmp_path / "sys"), answer, proc=tmp_path / "proc")
    assert named(found, "CUDA with NVIDIA's driver").verdict == verdict


def test_survey_needs_nothing_of_ours(tmp_path: Path) -> None:
    assert os.path.isfile(inquiry.SURVEY)
    answer = inquiry.ask(script(tmp_path, f'cd / && PYTHONPATH= exec {sys.executable} -S "$@"'), environ())
    assert answer.trouble is None and answer.facts["python"]["version"] == sys.version.split()[0]
