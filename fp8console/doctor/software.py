"""Checks of drivers, ROCm, torch and what is installed beside it."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path

from fp8console.doctor.device import arch_of, listed
from fp8console.doctor.environment import VISIBLE
from fp8console.doctor.findings import FAIL, NOT_APPLICABLE, OK, WARN, Finding, not_known, plural
from fp8console.doctor.inquiry import Answer
from fp8console.doctor.machine import Machine, text_in
from fp8console.doctor.tables import PARTS, Tables, fits, numbers

GROUP = "software"
_INSTALL = "install the build for {}: see pytorch.org, Get Started"
_NAMES = {"rocm": "ROCm", "cuda": "CUDA", "transformer_engine": "TransformerEngine", "nvidia_driver": "NVIDIA's driver"}


def check(
    machine: Machine,
    tables: Tables,
    answer: Answer,
    environ: Mapping[str, str],
    again: Callable[[], Answer] | None = None,
    proc: Path = Path("/proc"),
) -> list[Finding]:
    """All of them. ``again`` asks the same Python once more with ``amdsmi`` kept out: only where that can tell more."""
    driver = _nvidia_driver(machine, proc)
    found = [_driver(machine, driver), _rocm(machine, environ), _torch(machine, answer)]
    seeing, without = _devices(machine, answer, environ, again)
    found += [seeing, _amdsmi(machine, answer, without), _kernels(machine, tables, answer)]
    found += [_optional(answer, "torchao", "torchao"), _optional(answer, "transformer_engine", "TransformerEngine")]
    return [*found, _collectives(machine, answer), *_together(tables, answer, driver)]


# -- driver and ROCm --------------------------------------------------------------------------------------------------
def _nvidia_driver(machine: Machine, proc: Path) -> str | None:
    for card in machine.of("NVIDIA"):
        if card.told.get("driver_version"):
            return card.told["driver_version"]
    text = text_in(proc / "driver/nvidia/version") or "" if machine.of("NVIDIA") else ""
    words = [word for word in text.split() if word[:1].isdigit() and word.count(".") >= 1]
    return words[0] if words else None


def _driver(machine: Machine, nvidia: str | None) -> Finding:
    name = "kernel driver"
    if not machine.cards:
        return Finding(GROUP, name, NOT_APPLICABLE, f"no card to drive; Linux {platform.release()}")
    missing = [card for card in machine.cards if card.driver is None and not card.nodes]
    words = []
    if machine.of("AMD"):
        version = text_in(machine.root / "module/amdgpu/version")
        words.append(f"amdgpu {version}" if version else "amdgpu, the kernel's own")
    if machine.of("NVIDIA"):
        words.append(f"nvidia {nvidia}" if nvidia else "nvidia, version not known")
    if missing:
        modules = sorted({"amdgpu" if card.vendor == "AMD" else "nvidia" for card in missing})
        remedy = f"sudo modprobe {' '.join(modules)}; in a virtual machine: pass the card through"
        return Finding(GROUP, name, FAIL, f"none for {listed(tuple(missing))}; Linux {platform.release()}", remedy)
    return Finding(GROUP, name, OK, f"{', '.join(words)}; Linux {platform.release()}")


def rocm_folder(environ: Mapping[str, str]) -> Path:
    """Where ROCm is, or would be."""
    return Path(environ.get("ROCM_PATH") or environ.get("ROCM_HOME") or "/opt/rocm")


def _rocm(machine: Machine, environ: Mapping[str, str]) -> Finding:
    if not machine.of("AMD"):
        return Finding(GROUP, "ROCm", NOT_APPLICABLE, "no AMD card")
    folder = rocm_folder(environ)
    version = text_in(folder / ".info/version")
    if version:
        return Finding(GROUP, "ROCm", OK, f"{version} in {folder}")
    if os.path.isdir(folder):
        return not_known("software", "ROCm", f"{folder} has no .info/version")
    evidence = f"none in {folder}; torch's ROCm wheels bring their own libraries"
    return Finding(GROUP, "ROCm", NOT_APPLICABLE, evidence)


# -- torch ------------------------------------------------------------------------------------------------------------
def _torch(machine: Machine, answer: Answer) -> Finding:
    name = "torch"
    where = answer.python
    if answer.torch is None:
        if answer.trouble is not None:
            remedy = "see it with: " + f"{where} -c 'import torch'"
            return Finding(GROUP, name, FAIL, f"{where}: {answer.trouble}", remedy)
        if answer.facts.get("import_error"):
            evidence = f"{where}: import torch: {answer.facts['import_error']}"
            return Finding(GROUP, name, FAIL, evidence, "install torch anew in that environment")
        remedy = "install it there, or name the Python that has it: fp8console doctor --python PATH"
        return Finding(GROUP, name, FAIL, f"none in {where}", remedy)
    words = f"{answer.torch['version']}, {_built_for(answer)}"
    amd, nvidia = machine.of("AMD"), machine.of("NVIDIA")
    kind = _kind(answer)
    if amd and not nvidia and kind != "ROCm":
        return Finding(GROUP, name, FAIL, f"{words}, on a machine with {listed(amd)}", _INSTALL.format("ROCm"))
    if nvidia and not amd and kind != "CUDA":
        return Finding(GROUP, name, FAIL, f"{words}, on a machine with {listed(nvidia)}", _INSTALL.format("CUDA"))
    if amd and nvidia and kind is None:
        evidence = f"{words}, on a machine with {listed(machine.cards)}"
        return Finding(GROUP, name, FAIL, evidence, _INSTALL.format("CUDA or ROCm"))
    return Finding(GROUP, name, OK, words)


def _kind(answer: Answer) -> str | None:
    about = answer.torch or {}
    return "ROCm" if about.get("hip") else "CUDA" if about.get("cuda") else None


def _built_for(answer: Answer) -> str:
    about = answer.torch or {}
    if about.get("hip"):
        return f"built for ROCm {about['hip']}"
    return f"built for CUDA {about['cuda']}" if about.get("cuda") else "a CPU build"


def _fitting(machine: Machine, answer: Answer) -> str | None:
    """The maker whose cards this build of torch is for, if the machine has any."""
    maker = {"ROCm": "AMD", "CUDA": "NVIDIA"}.get(_kind(answer) or "")
    return maker if maker and machine.of(maker) else None


def _devices(
    machine: Machine, answer: Answer, environ: Mapping[str, str], again: Callable[[], Answer] | None
) -> tuple[Finding, Answer | None]:
    """Whether torch sees the cards; and the answer without ``amdsmi``, where that was asked for."""
    name = "torch's devices"
    if answer.torch is None:
        return not_known(GROUP, name, "torch could not be imported"), _unblocked(answer, again)
    if _fitting(machine, answer) is None and not answer.devices:
        evidence = "no card that this build is for" if _kind(answer) else "a CPU build has none"
        return Finding(GROUP, name, NOT_APPLICABLE, evidence), None
    if answer.trouble is not None:
        remedy = "see the driver's messages: sudo dmesg | tail"
        return Finding(GROUP, name, FAIL, answer.trouble, remedy), None
    if answer.count is None:
        return Finding(GROUP, name, FAIL, f"counting them failed: {answer.facts.get('count_error')}"), None
    maker = _fitting(machine, answer)
    there = machine.rocm_devices if maker == "AMD" else len(machine.of("NVIDIA")) if maker else None
    hidden = [variable for variable in VISIBLE if variable in environ]
    because = f" with {', '.join(f'{v}={environ[v]}' for v in hidden)}" if hidden else ""
    if answer.count == 0:
        runtime = answer.facts.get("runtime_count")
        words = "torch sees none" + (f" of {plural(there, 'device')}" if there else "") + because
        words += f"; the runtime itself has {runtime}" if runtime else ""
        error = answer.facts.get("runtime_error")
        words += f"; the runtime says: {error}" if error else ""
        without = _unblocked(answer, again)
        remedy = "see the amdsmi, environment and access checks below"
        return Finding(GROUP, name, FAIL, words, remedy), without
    words = f"torch sees {answer.count}" + (f" of {there}" if there else "") + because
    if there and answer.count < there and not hidden:
        remedy = "see the access checks below, and: sudo dmesg | grep -i -e amdgpu -e nvrm"
        return Finding(GROUP, name, WARN, words, remedy), None
    return Finding(GROUP, name, OK, words), None


def _unblocked(answer: Answer, again: Callable[[], Answer] | None) -> Answer | None:
    return again() if again is not None and "amdsmi" in answer.packages else None


def _amdsmi(machine: Machine, answer: Answer, without: Answer | None) -> Finding:
    """``amdsmi`` beside a ROCm torch: torch counts devices through it, and a second copy of its library counts none."""
    name = "amdsmi"
    version = answer.packages.get("amdsmi")
    version = "of unknown version" if version == "unknown" else version
    if not answer.facts:
        return not_known(GROUP, name, answer.trouble or "the Python tells nothing")
    if version is None:
        return Finding(GROUP, name, OK, "not beside torch, where it could hide the cards")
    build = answer.torch or (without.torch if without is not None else None)
    if build is not None and not build.get("hip"):
        return Finding(GROUP, name, OK, f"{version}, and torch here is no ROCm build")
    remedy = f"{answer.python} -m pip uninstall amdsmi; fp8console uses it from its own environment or ROCm's folder"
    if without is None:
        if answer.count:
            return Finding(GROUP, name, OK, f"{version} beside torch, which still sees its devices")
        return not_known(GROUP, name, f"{version} is importable beside torch; whether it hides cards was not seen")
    if answer.torch is None:
        if without.torch is not None:
            evidence = f"{version} beside torch: import torch fails, and works with amdsmi kept out"
            return Finding(GROUP, name, FAIL, evidence, remedy)
        return Finding(GROUP, name, OK, f"{version}; import torch fails with it kept out as well")
    runtime = answer.facts.get("runtime_count")
    if without.count or runtime:
        evidence = f"{version} beside a ROCm torch: torch counts 0 devices with it, {without.count or runtime} without"
        return Finding(GROUP, name, FAIL, evidence, remedy)
    return Finding(GROUP, name, OK, f"{version}; torch sees no device with it kept out either")


def _kernels(machine: Machine, tables: Tables, answer: Answer) -> Finding:
    name = "torch's kernels"
    if answer.torch is None:
        return not_known(GROUP, name, "torch could not be imported")
    maker = _fitting(machine, answer)
    archs = sorted({card.arch for card in machine.of(maker) if card.arch}) if maker else []
    archs = archs or sorted({arch_of(device) for device in answer.devices})
    if not archs:
        return Finding(GROUP, name, NOT_APPLICABLE, "no card that this build is for")
    built = answer.facts.get("archs") or []
    if not built:
        return not_known(GROUP, name, "torch tells no architectures that it was built for")
    missing = [arch for arch in archs if not has_kernels(arch, built)]
    if missing:
        evidence = f"none for {', '.join(missing)}; this build has {', '.join(built)}"
        return Finding(GROUP, name, FAIL, evidence, "install a build of torch for this card")
    late = [arch for arch in archs if _too_old(arch, tables, answer)]
    if late:
        since = (tables.about(late[0]) or {})["rocm"]
        evidence = f"torch's ROCm {(answer.torch or {})['hip']} is older than {since}, the first for {late[0]}"
        return Finding(GROUP, name, WARN, evidence, f"install torch built for ROCm {since} or newer")
    return Finding(GROUP, name, OK, f"for {', '.join(archs)}")


def has_kernels(arch: str, built: list[str]) -> bool:
    """Whether a build made for ``built`` runs on ``arch``.

    CUDA's code for a compute capability runs on later ones of the same major version, and PTX on all later ones.
    """
    if arch.startswith("gfx"):
        return arch in {item.split(":")[0] for item in built}
    number = int(arch.removeprefix("sm_").rstrip("af"))
    for item in built:
        kind, _, text = item.partition("_")
        digits = text.rstrip("af")
        if not digits.isdigit():
            continue
        same = int(digits) // 10 == number // 10 and int(digits) <= number
        # An "a" at its end: for that one capability alone.
        if kind == "sm" and (int(digits) == number if text.endswith("a") else same):
            return True
        if kind == "compute" and int(digits) <= number:
            return True
    return False


def _too_old(arch: str, tables: Tables, answer: Answer) -> bool:
    since = (tables.about(arch) or {}).get("rocm")
    hip = (answer.torch or {}).get("hip")
    return bool(since and hip and numbers(str(hip)) < numbers(since))


# -- beside torch -----------------------------------------------------------------------------------------------------
def _optional(answer: Answer, package: str, label: str) -> Finding:
    if not answer.facts:
        return not_known(GROUP, label, answer.trouble or "the Python tells nothing")
    version = answer.packages.get(package)
    if version is None:
        return Finding(GROUP, label, NOT_APPLICABLE, "not installed; nothing here needs it")
    return Finding(GROUP, label, OK, version)


def _collectives(machine: Machine, answer: Answer) -> Finding:
    name = "RCCL" if _kind(answer) == "ROCm" or (machine.of("AMD") and not machine.of("NVIDIA")) else "NCCL"
    if answer.torch is None:
        return not_known(GROUP, name, "torch could not be imported")
    version = answer.facts.get("nccl")
    if version:
        return Finding(GROUP, name, OK, f"{version}, in torch")
    if _kind(answer) is None:
        return Finding(GROUP, name, NOT_APPLICABLE, "a CPU build of torch has none")
    if answer.trouble:
        return not_known(GROUP, name, answer.trouble)
    remedy = "for more than one card install a build with it"
    return Finding(GROUP, name, WARN, "this build of torch has none", remedy)


# -- together ---------------------------------------------------------------------------------------------------------
def _together(tables: Tables, answer: Answer, nvidia_driver: str | None) -> list[Finding]:
    about = answer.torch
    if about is None:
        return [not_known(GROUP, "versions", "torch could not be imported")]
    there = {
        "torch": about["version"],
        "rocm": about["hip"],
        "cuda": about["cuda"],
        "torchao": answer.packages.get("torchao"),
        "transformer_engine": answer.packages.get("transformer_engine"),
        "nvidia_driver": nvidia_driver,
    }
    have = {part: str(version) for part, version in there.items() if version and numbers(str(version))}
    pairs = (("torch", "rocm"), ("torch", "torchao"), ("torch", "transformer_engine"), ("cuda", "nvidia_driver"))
    found = [_pair(tables, have, *pair) for pair in pairs if pair[0] in have and pair[1] in have]
    return found or [Finding(GROUP, "versions", NOT_APPLICABLE, "nothing here that must fit torch")]


def _pair(tables: Tables, have: Mapping[str, str], one: str, other: str) -> Finding:
    name = f"{_NAMES.get(one, one)} with {_NAMES.get(other, other)}"
    words = f"{have[one]} with {have[other]}"
    unfitting = None
    for entry in tables.together:
        parts = [part for part in PARTS if part in entry]
        if set(parts) != {one, other}:
            continue
        fitting = [part for part in parts if fits(have[part], entry[part])]
        if len(fitting) == 2:
            if entry.get("works", True):
                return Finding(GROUP, name, OK, f"{words}: known to work together")
            why = entry.get("why") or "known not to work together"
            return Finding(GROUP, name, FAIL, f"{words}: {why}", "install versions that go together")
        # The first part that an entry names is the one it speaks of.
        subject = next(key for key in entry if key in PARTS)
        if entry.get("otherwise") and fitting == [subject] and unfitting is None:
            unfitting = entry
    if unfitting is None:
        return not_known(GROUP, name, f"{words} is not in the table of versions", "if it works, add it to doctor.toml")
    verdict = FAIL if unfitting.get("verdict") == "fail" else WARN
    return Finding(GROUP, name, verdict, f"{words}: {unfitting['otherwise']}", "install versions that go together")
