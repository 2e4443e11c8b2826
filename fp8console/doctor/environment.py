"""Checks of the variables that decide what a GPU library does, against the cards that are there."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from fp8console.doctor.device import listed
from fp8console.doctor.findings import FAIL, NOT_APPLICABLE, OK, WARN, Finding, not_known, plural
from fp8console.doctor.inquiry import Answer
from fp8console.doctor.machine import Machine, gfx_name

GROUP = "environment"
VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
SLOW = ("HIP_LAUNCH_BLOCKING", "CUDA_LAUNCH_BLOCKING", "AMD_SERIALIZE_KERNEL", "AMD_SERIALIZE_COPY")


def check(
    machine: Machine, answer: Answer, environ: Mapping[str, str], interfaces: Collection[str] | None
) -> list[Finding]:
    """All of them; ``interfaces``: names of the network's, None where they can't be listed."""
    found = [_override(machine, environ), _rocm_arch(machine, environ), _serialised(environ)]
    found += _visible(machine, answer, environ)
    return [*found, *_socket_interfaces(environ, interfaces)]


def _override(machine: Machine, environ: Mapping[str, str]) -> Finding:
    name = "HSA_OVERRIDE_GFX_VERSION"
    value = environ.get(name)
    if not value:
        return Finding(GROUP, name, OK, "not set")
    cards = machine.of("AMD")
    if not cards and not machine.built_in:
        return Finding(GROUP, name, NOT_APPLICABLE, f"{value}, but there is no AMD card")
    match = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", value.strip())
    if match is None:
        return Finding(GROUP, name, WARN, f"{value!r} is no version such as 9.4.2", f"unset {name}")
    claimed = gfx_name(int(match[1]) * 10000 + int(match[2]) * 100 + int(match[3]))
    archs = sorted({node.arch for card in (*cards, *machine.built_in) for node in card.nodes})
    if not archs:
        return not_known(GROUP, name, f"{value} makes every card a {claimed}; what they are, KFD does not tell")
    wrong = [arch for arch in archs if arch != claimed]
    if not wrong:
        return Finding(GROUP, name, OK, f"{value} is {claimed}, what the cards are")
    evidence = f"{value} makes ROCm run {claimed} code on {', '.join(wrong)}"
    # From RDNA on (gfx10), code of the same minor version often runs, and cards that ROCm doesn't list are used so.
    family = all(arch[:-1] == claimed[:-1] and not arch.startswith("gfx9") for arch in wrong)
    if family:
        return Finding(
            GROUP, name, WARN, f"{evidence}: the same family, not supported", f"unset {name} if torch allows"
        )
    return Finding(GROUP, name, FAIL, f"{evidence}: kernels crash or compute wrongly", f"unset {name}")


def _rocm_arch(machine: Machine, environ: Mapping[str, str]) -> Finding:
    name = "PYTORCH_ROCM_ARCH"
    value = environ.get(name)
    if not value:
        return Finding(GROUP, name, OK, "not set")
    archs = sorted({card.arch for card in machine.of("AMD") if card.arch})
    if not archs:
        return Finding(GROUP, name, NOT_APPLICABLE, f"{value}, but there is no AMD card")
    listed_archs = {item.split(":")[0] for item in re.split(r"[;, ]+", value) if item}
    missing = [arch for arch in archs if arch not in listed_archs]
    if not missing:
        return Finding(GROUP, name, OK, f"{value} has {', '.join(archs)} in it")
    evidence = f"{value}: extensions built here have no code for {', '.join(missing)}"
    return Finding(GROUP, name, WARN, evidence, f"export {name}={';'.join(archs)}, and build them again")


def _serialised(environ: Mapping[str, str]) -> Finding:
    name = "serialised kernels"
    on = [variable for variable in SLOW if environ.get(variable, "").strip() not in ("", "0")]
    if not on:
        return Finding(GROUP, name, OK, "no variable that serialises them is on")
    words = " ".join(f"{variable}={environ[variable]}" for variable in on)
    evidence = f"{words}: for finding faults; every launch waits, training is slow"
    return Finding(GROUP, name, WARN, evidence, f"unset {' '.join(on)}")


# -- visible devices --------------------------------------------------------------------------------------------------
def _visible(machine: Machine, answer: Answer, environ: Mapping[str, str]) -> list[Finding]:
    amd, nvidia = machine.of("AMD"), machine.of("NVIDIA")
    rocm_build = bool((answer.torch or {}).get("hip"))
    found = []
    if amd or (rocm_build and not nvidia):
        found += _visible_on_rocm(machine, environ)
    if nvidia:
        found.append(_judge(environ, "CUDA_VISIBLE_DEVICES", len(nvidia), listed(nvidia)))
    if not found:
        given = [f"{variable}={environ[variable]}" for variable in VISIBLE if variable in environ]
        evidence = f"{', '.join(given)}, but there is no card" if given else "no card to hide"
        found.append(Finding(GROUP, "visible devices", NOT_APPLICABLE, evidence))
    return found


def _visible_on_rocm(machine: Machine, environ: Mapping[str, str]) -> list[Finding]:
    """ROCR_VISIBLE_DEVICES takes devices away first; HIP's, or with none CUDA's, picks from what is left."""
    rocr, hip, cuda = (environ.get(f"{which}_VISIBLE_DEVICES") for which in ("ROCR", "HIP", "CUDA"))
    name = "visible devices"
    if machine.of("NVIDIA"):
        cuda = None  # those of another maker are meant
    if rocr is None and hip is None and cuda is None:
        return [Finding(GROUP, name, OK, "none of ROCR, HIP and CUDA_VISIBLE_DEVICES is set")]
    there = machine.rocm_devices
    found = []
    left = there
    if rocr is not None:
        found.append(_judge(environ, "ROCR_VISIBLE_DEVICES", there, listed(machine.of("AMD"))))
        left = len(_chosen(rocr, there)[0])
    picking = "HIP_VISIBLE_DEVICES" if hip else "CUDA_VISIBLE_DEVICES" if cuda else None
    empty = "HIP_VISIBLE_DEVICES" if hip == "" else "CUDA_VISIBLE_DEVICES" if hip is None and cuda == "" else None
    if empty is not None:
        # The runtime looks at the first character (rocdevice.cpp), torch at whether there is a variable.
        evidence = "is empty: to HIP that is not set, to torch, where it counts through amdsmi, no device"
        found.append(Finding(GROUP, empty, WARN, evidence, f"unset {empty}"))
    if hip and cuda and hip != cuda:
        evidence = f"HIP_VISIBLE_DEVICES={hip} and CUDA_VISIBLE_DEVICES={cuda} disagree; ROCm and torch use HIP's"
        found.append(Finding(GROUP, name, WARN, evidence, "unset CUDA_VISIBLE_DEVICES"))
    if picking is not None:
        after = " that ROCR_VISIBLE_DEVICES leaves, counted anew from 0" if rocr is not None else ""
        found.append(_judge(environ, picking, left, listed(machine.of("AMD")), after))
    return found


def _judge(environ: Mapping[str, str], variable: str, there: int | None, cards: str, after: str = "") -> Finding:
    value = environ.get(variable)
    if value is None:
        return Finding(GROUP, variable, OK, "not set")
    if there is None:
        return not_known(GROUP, variable, f"{value}; how many devices there are is not known")
    chosen, problem = _chosen(value, there)
    of = f"of {plural(there, 'device')}{after}"
    if problem is not None:
        evidence = f"{value}: {problem}; {len(chosen)} {of} left"
        valid = f"0 to {there - 1}" if there else "none"
        return Finding(GROUP, variable, FAIL, evidence, f"name devices that are there ({valid}), or unset {variable}")
    if not chosen:
        evidence = f"{value!r} hides every card ({cards})"
        return Finding(GROUP, variable, FAIL, evidence, f"unset {variable}")
    if len(chosen) < there:
        evidence = f"{value}: {len(chosen)} {of}, the rest hidden"
        return Finding(GROUP, variable, WARN, evidence, f"unset {variable} to use them all, unless it is on purpose")
    return Finding(GROUP, variable, OK, f"{value}: all {of}" if there > 1 else f"{value}: the one device{after}")


def _chosen(value: str, there: int | None) -> tuple[list[str], str | None]:
    """The devices that a list leaves, and what is wrong with it: from the first one that can't be, all are hidden."""
    chosen: list[str] = []
    for item in (part.strip() for part in value.split(",")):
        if not item or item == "-1" or item.lower() == "nodevfiles":
            return chosen, None if not chosen and "," not in value else f"ends at {item or 'an empty place'!r}"
        if item.isdigit() and there is not None and int(item) >= there:
            return chosen, f"there is no device {item}"
        if item in chosen:
            return [], f"device {item} is named twice, which hides all"
        if not item.isdigit() and not re.match(r"(GPU|MIG)-", item):
            return chosen, f"{item!r} is no device"
        chosen.append(item)
    return chosen, None


# -- network ----------------------------------------------------------------------------------------------------------
def _socket_interfaces(environ: Mapping[str, str], interfaces: Collection[str] | None) -> list[Finding]:
    found = []
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = environ.get(variable)
        if not value:
            if variable == "NCCL_SOCKET_IFNAME":
                found.append(Finding(GROUP, variable, OK, "not set: NCCL and RCCL choose themselves"))
            continue
        if interfaces is None:
            found.append(not_known(GROUP, variable, f"{value}; the network's interfaces can't be listed here"))
            continue
        fitting = matching(value, interfaces) if variable.startswith("NCCL") else _named(value, interfaces)
        there = f"here are {', '.join(sorted(interfaces))}" if interfaces else "here is none"
        if fitting:
            found.append(Finding(GROUP, variable, OK, f"{value}: {', '.join(fitting)}"))
        else:
            evidence = f"{value} names no interface; {there}"
            found.append(Finding(GROUP, variable, FAIL, evidence, f"name one of them, or unset {variable}"))
    return found


def matching(value: str, interfaces: Collection[str]) -> list[str]:
    """The interfaces that NCCL's pattern lets through: beginnings of names, ``=`` whole names, ``^`` all others."""
    excluding = value.startswith("^")
    text = value.removeprefix("^")
    exact = text.startswith("=")
    names = [name for name in text.removeprefix("=").split(",") if name]

    def fits(interface: str) -> bool:
        hit = any(interface == name if exact else interface.startswith(name) for name in names)
        return hit != excluding

    return [interface for interface in sorted(interfaces) if fits(interface)]


def _named(value: str, interfaces: Collection[str]) -> list[str]:
    names = [name.strip() for name in value.split(",")]
    return names if all(name in interfaces for name in names) else []
