"""Checks of what this user and this place allow: device files, groups, limits, terminal, disk, logout."""

from __future__ import annotations

import grp
import os
import pwd
import re
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fp8console.doctor.findings import FAIL, NOT_APPLICABLE, OK, WARN, Finding, not_known, plural
from fp8console.doctor.machine import Machine, listing

GROUP = "access"
GIB = 1 << 30
#: Shared memory below which DataLoader workers and collectives soon fail; Docker gives 64 MiB.
LEAST_SHM = 1 * GIB
#: Free space of the run directory: below the first it won't hold a checkpoint, below the second not many.
NO_SPACE, LITTLE_SPACE = 1 * GIB, 10 * GIB
#: RDMA pins its buffers; below this a limit on locked memory makes it fail.
LEAST_MEMLOCK = 1 * GIB
NETWORK = ("nfs", "nfs4", "lustre", "cifs", "smb3", "beegfs", "gpfs", "ceph", "glusterfs", "9p", "afs", "panfs")


@dataclass(frozen=True)
class Device:
    """A device file: whether this process may use it, and the group that may, by name or number."""

    path: str
    usable: bool
    group: str
    mode: int = 0o660


@dataclass(frozen=True)
class Folder:
    """Where runs go: the nearest folder that exists, what it is on, bytes."""

    path: Path
    nearest: Path
    writable: bool
    kind: str | None
    free: int | None


@dataclass(frozen=True)
class Surroundings:
    """All that the checks look at, so that they can be tried on other surroundings. None is not known."""

    user: str
    root: bool
    groups: frozenset[str]
    kfd: Device | None
    render: tuple[Device, ...]
    nvidia: tuple[Device, ...]
    container: str | None
    shm: int | None
    memlock: int | None  # bytes; -1 for no limit
    rdma: bool
    runs: Folder | None
    killed_at_logout: str | None
    systemd: bool
    environ: Mapping[str, str] = field(default_factory=dict)


def look(
    environ: Mapping[str, str], runs: Path, logout: str | None, dev: Path = Path("/dev"), sys: Path = Path("/sys")
) -> Surroundings:
    """The surroundings of this process. ``logout``: what is known of processes ended at logout, as one line."""
    shm = os.statvfs(dev / "shm") if os.path.isdir(dev / "shm") else None
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return Surroundings(
        user=_user(os.geteuid()),
        root=os.geteuid() == 0,
        groups=frozenset(_group(number) for number in {*os.getgroups(), os.getegid()}),
        kfd=_device(dev / "kfd"),
        render=_devices(dev / "dri", "renderD*"),
        nvidia=_devices(dev, "nvidia[0-9]*"),
        container=_container(environ),
        shm=None if shm is None else shm.f_frsize * shm.f_blocks,
        memlock=-1 if soft == resource.RLIM_INFINITY else soft,
        rdma=bool(listing(sys / "class/infiniband", "*")),
        runs=_folder(runs),
        killed_at_logout=logout,
        systemd=os.path.isdir("/run/systemd/seats"),
        environ=environ,
    )


def check(machine: Machine, here: Surroundings) -> list[Finding]:
    """All of them."""
    found = [_groups(machine, here), _kfd(machine, here), _dri(machine, here)]
    found += [_nvidia(machine, here)] if machine.of("NVIDIA") else []
    found += [_shm(here), _memlock(here), _locale(here), _terminal(here)]
    return [*found, *_runs(here), _logout(here)]


# -- devices ----------------------------------------------------------------------------------------------------------
def _groups(machine: Machine, here: Surroundings) -> Finding:
    name = "groups"
    if not machine.of("AMD"):
        return Finding(GROUP, name, NOT_APPLICABLE, "no AMD card")
    refused = [device for device in ((here.kfd,) if here.kfd else ()) + here.render if not device.usable]
    mine = ", ".join(sorted(here.groups & {"render", "video"})) or "neither render nor video"
    if not refused:
        if here.kfd is None:
            return not_known(GROUP, name, f"{here.user} is in {mine}; there is no device file to try it on")
        return Finding(GROUP, name, OK, f"{here.user} may use the device files ({'root' if here.root else mine})")
    needed = sorted({device.group for device in refused} - here.groups)
    if not needed:
        modes = ", ".join(f"{device.path} is mode {device.mode:o}" for device in refused[:2])
        evidence = f"{here.user} may not use the device files although in their groups: {modes}"
        return Finding(GROUP, name, FAIL, evidence, f"sudo chmod g+rw {' '.join(device.path for device in refused)}")
    evidence = f"{here.user} is in {mine}; {refused[0].path} belongs to {refused[0].group}"
    words = ",".join(needed)
    remedy = f"sudo usermod -aG {words} {here.user}, then log in again"
    if here.container:
        remedy = "start the container with " + " ".join(f"--group-add {group}" for group in needed)
    return Finding(GROUP, name, FAIL, evidence, remedy)


def _kfd(machine: Machine, here: Surroundings) -> Finding:
    name = "/dev/kfd"
    if not machine.of("AMD"):
        return Finding(GROUP, name, NOT_APPLICABLE, "no AMD card")
    if here.kfd is None:
        remedy = "sudo modprobe amdgpu; see: sudo dmesg | grep -i kfd"
        if here.container:
            remedy = "start the container with --device /dev/kfd --device /dev/dri"
        return Finding(GROUP, name, FAIL, f"is not there{_in(here)}: ROCm can't work", remedy)
    if here.kfd.usable:
        return Finding(GROUP, name, OK, "can be read and written")
    return Finding(GROUP, name, FAIL, f"may not be used by {here.user}", "see groups above")


def _dri(machine: Machine, here: Surroundings) -> Finding:
    name = "/dev/dri"
    cards = [card for card in machine.of("AMD") if card.driver is not None or card.nodes]
    if not cards:
        return Finding(GROUP, name, NOT_APPLICABLE, "no AMD card")
    if not here.render:
        remedy = "start the container with --device /dev/dri" if here.container else "see: ls -l /dev/dri; sudo dmesg"
        return Finding(GROUP, name, FAIL, f"has no render node{_in(here)}", remedy)
    usable = [device for device in here.render if device.usable]
    words = f"{len(usable)} of {plural(len(here.render), 'render node')} can be used"
    if not usable:
        return Finding(GROUP, name, FAIL, words, "see groups above")
    # A partitioned card has a node for each partition: more nodes than cards is right.
    if len(usable) < len(cards):
        remedy = "start the container with all of --device /dev/dri" if here.container else "see groups above"
        return Finding(GROUP, name, WARN, f"{words}, for {plural(len(cards), 'card')}", remedy)
    return Finding(GROUP, name, OK, words)


def _nvidia(machine: Machine, here: Surroundings) -> Finding:
    name = "/dev/nvidia*"
    cards = machine.of("NVIDIA")
    usable = [device for device in here.nvidia if device.usable]
    words = f"{len(usable)} device files can be used, for {plural(len(cards), 'card')}"
    if len(usable) >= len(cards):
        return Finding(GROUP, name, OK, words)
    remedy = "start the container with --gpus all" if here.container else "sudo nvidia-modprobe -u -c=0"
    return Finding(GROUP, name, WARN if usable else FAIL, words, remedy)


def _in(here: Surroundings) -> str:
    return f" in this container ({here.container})" if here.container else ""


# -- limits -----------------------------------------------------------------------------------------------------------
def _shm(here: Surroundings) -> Finding:
    name = "shared memory"
    if here.shm is None:
        return not_known(GROUP, name, "there is no /dev/shm")
    words = f"/dev/shm holds {_size(here.shm)}{_in(here)}"
    if here.shm >= LEAST_SHM:
        return Finding(GROUP, name, OK, words)
    evidence = f"{words}: DataLoader workers and collectives run out of it"
    remedy = (
        "start the container with --ipc=host or --shm-size 16g"
        if here.container
        else ("sudo mount -o remount,size=50% /dev/shm")
    )
    return Finding(GROUP, name, WARN, evidence, remedy)


def _memlock(here: Surroundings) -> Finding:
    name = "locked memory"
    if here.memlock is None:
        return not_known(GROUP, name, "the limit can't be read")
    if here.memlock < 0:
        return Finding(GROUP, name, OK, "no limit")
    words = f"at most {_size(here.memlock)}"
    if not here.rdma:
        return Finding(GROUP, name, OK, f"{words}; only RDMA needs more, and there is none here")
    if here.memlock >= LEAST_MEMLOCK:
        return Finding(GROUP, name, OK, words)
    remedy = (
        "start the container with --ulimit memlock=-1"
        if here.container
        else ("memlock unlimited in /etc/security/limits.conf, then log in again")
    )
    return Finding(GROUP, name, WARN, f"{words}: too little for RDMA, which is here", remedy)


# -- terminal ---------------------------------------------------------------------------------------------------------
def _locale(here: Surroundings) -> Finding:
    name = "locale"
    given = [(variable, here.environ.get(variable)) for variable in ("LC_ALL", "LC_CTYPE", "LANG")]
    set_to = next(((variable, value) for variable, value in given if value), None)
    # Python writes LC_CTYPE=C.UTF-8 into its own environment in a POSIX locale (PEP 538).
    if set_to == ("LC_CTYPE", "C.UTF-8") and here.environ.get("LANG") in ("C", "POSIX"):
        set_to = ("LANG", here.environ["LANG"])
    if set_to is None:
        evidence = "none of LC_ALL, LC_CTYPE, LANG is set: the screen is drawn in ASCII"
        return Finding(GROUP, name, WARN, evidence, "export LANG=C.UTF-8")
    words = f"{set_to[0]}={set_to[1]}"
    if "utf8" in str(set_to[1]).lower().replace("-", ""):
        return Finding(GROUP, name, OK, words)
    return Finding(
        GROUP, name, WARN, f"{words} is not UTF-8: the screen is drawn in ASCII", f"export {set_to[0]}=C.UTF-8"
    )


def _terminal(here: Surroundings) -> Finding:
    name = "terminal"
    term = here.environ.get("TERM", "")
    if term in ("", "dumb", "unknown"):
        evidence = f"TERM={term}: the console can't draw" if term else "TERM is not set: the console can't draw"
        return Finding(
            GROUP, name, WARN, evidence, "log in with a terminal, or export TERM=xterm-256color if it is one"
        )
    notes = f"TERM={term}"
    if here.environ.get("NO_COLOR"):
        return Finding(GROUP, name, OK, f"{notes}, NO_COLOR is set: no colours")
    if here.environ.get("COLORTERM", "").lower() in ("truecolor", "24bit") or term.endswith("-direct"):
        return Finding(GROUP, name, OK, f"{notes}, 24-bit colour")
    if "256color" in term:
        return Finding(GROUP, name, OK, f"{notes}, 256 colours")
    if term in ("linux", "vt100", "vt220", "ansi", "xterm", "screen"):
        remedy = f"export TERM={term}-256color if yours can" if term in ("xterm", "screen") else None
        return Finding(GROUP, name, WARN, f"{notes}: 16 colours at most, as far as TERM tells", remedy)
    return Finding(GROUP, name, OK, f"{notes}; its colours are not known")


# -- run directory ----------------------------------------------------------------------------------------------------
def _runs(here: Surroundings) -> list[Finding]:
    if here.runs is None:
        return [not_known(GROUP, "run directory", "no folder for it")]
    runs = here.runs
    remedy = "export XDG_STATE_HOME=FOLDER, or launch with --run-dir"
    if not runs.writable:
        evidence = f"{runs.path}: {runs.nearest} can't be written; runs go to the temporary folder"
        return [Finding(GROUP, "run directory", WARN, evidence, remedy)]
    kind = f", on {runs.kind}" if runs.kind else ", file system not known"
    words = f"{runs.path} can be written{kind}"
    if runs.kind in ("tmpfs", "ramfs"):
        found = [Finding(GROUP, "run directory", WARN, f"{words}: in memory, gone after a reboot", remedy)]
    else:
        network = (runs.kind or "") in NETWORK
        found = [
            Finding(GROUP, "run directory", OK, words + (": a network's, which runs can live on" if network else ""))
        ]
    if runs.free is None:
        return [*found, not_known(GROUP, "free space", "the file system does not tell")]
    space = f"{_size(runs.free)} free"
    if runs.free < LITTLE_SPACE:
        verdict = FAIL if runs.free < NO_SPACE else WARN
        return [*found, Finding(GROUP, "free space", verdict, f"{space} for records and checkpoints", remedy)]
    return [*found, Finding(GROUP, "free space", OK, space)]


def _logout(here: Surroundings) -> Finding:
    name = "logout"
    if here.killed_at_logout is not None:
        return Finding(GROUP, name, WARN, "systemd ends your processes at logout", here.killed_at_logout)
    if not here.systemd:
        return Finding(GROUP, name, NOT_APPLICABLE, "no systemd-logind here")
    return Finding(GROUP, name, OK, "trainings that are left behind go on")


# -- looking ----------------------------------------------------------------------------------------------------------
def _device(path: Path) -> Device | None:
    try:
        about = path.stat()
    except OSError:
        return None
    usable = os.access(path, os.R_OK | os.W_OK, effective_ids=os.access in os.supports_effective_ids)
    return Device(str(path), usable, _group(about.st_gid), about.st_mode & 0o777)


def _devices(folder: Path, pattern: str) -> tuple[Device, ...]:
    found = (_device(path) for path in listing(folder, pattern))
    return tuple(device for device in found if device is not None)


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def _container(environ: Mapping[str, str]) -> str | None:
    if os.path.exists("/.dockerenv"):
        return "Docker"
    if os.path.exists("/run/.containerenv"):
        return "Podman"
    if environ.get("APPTAINER_CONTAINER") or environ.get("SINGULARITY_CONTAINER"):
        return "Apptainer"
    if environ.get("KUBERNETES_SERVICE_HOST"):
        return "Kubernetes"
    return environ.get("container") or None


def _folder(path: Path) -> Folder:
    nearest = path
    while not os.path.exists(nearest) and nearest != nearest.parent:
        nearest = nearest.parent
    writable = os.path.isdir(nearest) and os.access(nearest, os.W_OK | os.X_OK)
    try:
        about = os.statvfs(nearest)
        free = about.f_frsize * about.f_bavail
    except OSError:
        free = None
    return Folder(path, nearest, writable, _file_system(nearest), free)


def _file_system(path: Path) -> str | None:
    """The type of the file system that holds ``path``: the last mount whose point is the longest above it."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return None
    real = os.path.realpath(path)
    best: tuple[int, str] | None = None
    for line in lines:
        before, _, after = line.partition(" - ")
        if len(before.split()) < 5 or not after.split():
            continue
        point = re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), before.split()[4])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and (best is None or len(point) >= best[0]):
            best = len(point), after.split()[0]
    return best[1] if best else None


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"
