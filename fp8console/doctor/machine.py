"""Which GPUs a machine has: by KFD, the kernel's DRM devices, the PCI bus and NVIDIA's own tool; no GPU library."""

from __future__ import annotations

import glob
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from fp8console.doctor.tables import Tables

AMD, NVIDIA = 0x1002, 0x10DE
#: PCI classes of a GPU: VGA, 3D and display controllers, and processing accelerators.
GPU_CLASSES = (0x0300, 0x0302, 0x0380, 0x1200)
#: Bytes of memory below which an AMD GPU is taken for a processor's built-in one, which nobody trains on.
BUILT_IN = 4 << 30
#: Seconds that nvidia-smi may take.
NVIDIA_SMI_SECONDS = 20.0

_NVIDIA_FIELDS = (
    *("pci.bus_id", "name", "compute_cap", "driver_version", "ecc.mode.current", "mig.mode.current"),
    *("pcie.link.width.current", "pcie.link.width.max", "pcie.link.gen.current", "pcie.link.gen.max"),
)


@dataclass(frozen=True)
class Node:
    """A GPU node of KFD's topology: what ROCm shows as one device (one of several on a partitioned card)."""

    number: int
    arch: str
    bdf: str
    capability: int | None  # None where the kernel does not tell


@dataclass(frozen=True)
class Card:
    """A GPU. ``told``: nvidia-smi's fields by name, for NVIDIA's; ``device``: its folder in sysfs."""

    vendor: str
    name: str
    bdf: str
    device: Path | None = None
    number: int | None = None
    arch: str | None = None
    driver: str | None = None
    memory: int | None = None
    nodes: tuple[Node, ...] = ()
    told: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Machine:
    """Cards by address, built-in GPUs apart; ``problems`` are sources that should have told more, and why not."""

    root: Path
    cards: tuple[Card, ...] = ()
    built_in: tuple[Card, ...] = ()
    problems: tuple[str, ...] = ()

    def of(self, vendor: str) -> tuple[Card, ...]:
        """The cards of one maker."""
        return tuple(card for card in self.cards if card.vendor == vendor)

    @property
    def rocm_devices(self) -> int | None:
        """Devices that ROCm has with nothing hidden: KFD's nodes; None where KFD tells of no card."""
        return sum(len(card.nodes) for card in self.of("AMD")) or None


def look(root: Path, tables: Tables, environ: Mapping[str, str], nvidia: bool | None = None) -> Machine:
    """The machine whose /sys is ``root``. ``nvidia``: ask nvidia-smi; by default only where that is the real one."""
    nodes, problems = kfd_nodes(root)
    cards = [_complete(card, nodes, tables) for card in _pci_cards(root)]
    seen = {_slot(card.bdf) for card in cards}
    for node in nodes:
        if _slot(node.bdf) not in seen:  # no DRM device, no PCI folder: a container that was given /dev/kfd alone
            seen.add(_slot(node.bdf))
            cards.append(_complete(Card("AMD", "AMD GPU", node.bdf), nodes, tables))
    if root == Path("/sys") if nvidia is None else nvidia:
        told, problem = nvidia_smi(environ)
        cards = _with_nvidia(cards, told)
        if problem and any(card.vendor == "NVIDIA" for card in cards):
            problems.append(problem)
    cards.sort(key=lambda card: card.bdf)
    small = [card for card in cards if card.vendor == "AMD" and card.memory is not None and card.memory < BUILT_IN]
    return Machine(root, tuple(c for c in cards if c not in small), tuple(small), tuple(problems))


def gfx_name(version: int) -> str:
    """KFD's gfx_target_version as LLVM's name of it: 90010 -> gfx90a, 110001 -> gfx1101."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def kfd_nodes(root: Path) -> tuple[list[Node], list[str]]:
    """The GPU nodes of KFD's topology in their order, and which could not be read."""
    found: list[Node] = []
    refused: list[str] = []
    nodes = root / "class/kfd/kfd/topology/nodes"
    if os.path.lexists(root) and not os.access(root, os.R_OK | os.X_OK):
        return [], [f"{root} can't be read"]
    for folder in sorted((f for f in listing(nodes, "*") if f.name.isdigit()), key=lambda f: int(f.name)):
        try:
            lines = (folder / "properties").read_text(errors="replace").splitlines()
        except OSError as error:
            refused.append(f"KFD node {folder.name}: {error.strerror}")
            continue
        values = {name: int(text) for name, _, text in (line.partition(" ") for line in lines) if text.isdecimal()}
        version = values.get("gfx_target_version", 0)
        if version and values.get("vendor_id", AMD) == AMD:
            place = values.get("location_id", 0)
            # 8 bits of bus, 5 of device, 3 of function.
            bdf = f"{values.get('domain', 0):04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.0"
            found.append(Node(int(folder.name), gfx_name(version), bdf, values.get("capability")))
    return found, refused


def nvidia_smi(environ: Mapping[str, str]) -> tuple[list[dict[str, str]], str | None]:
    """A record of nvidia-smi's fields for each card, and why there is none, if the tool is there and tells nothing."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_NVIDIA_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=NVIDIA_SMI_SECONDS,
            env=dict(environ),
        )
    except FileNotFoundError:
        return [], None
    except (OSError, subprocess.SubprocessError) as error:
        return [], f"nvidia-smi: {type(error).__name__}"
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()
        return [], f"nvidia-smi: exit status {done.returncode}" + (f", {said[-1].strip()}" if said else "")
    lines = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines()]
    return [dict(zip(_NVIDIA_FIELDS, parts)) for parts in lines if len(parts) == len(_NVIDIA_FIELDS)], None


def _pci_cards(root: Path) -> list[Card]:
    found: dict[str, Card] = {}
    for folder in listing(root / "bus/pci/devices", "*"):
        vendor, kind = number_in(folder / "vendor"), number_in(folder / "class")
        # Connectors' and bridges' classes are others; a fake or old kernel may have none.
        if vendor in (AMD, NVIDIA) and kind is not None and kind >> 8 in GPU_CLASSES:
            card = _card(folder.resolve(), vendor)
            found[card.bdf] = card
    for folder in listing(root / "class/drm", "card*"):
        vendor = number_in(folder / "device/vendor")
        if re.fullmatch(r"card\d+", folder.name) and vendor in (AMD, NVIDIA):
            card = _card((folder / "device").resolve(), vendor)
            found.setdefault(card.bdf, card)
    return list(found.values())


def _card(device: Path, vendor: int) -> Card:
    bdf = device.name.lower()
    if not re.fullmatch(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", bdf):
        slot = re.search(r"^PCI_SLOT_NAME=(\S+)$", text_in(device / "uevent") or "", re.MULTILINE)
        bdf = slot[1].lower() if slot else bdf
    driver = (device / "driver").resolve().name if os.path.exists(device / "driver") else None
    if driver is None and vendor == AMD and os.path.exists(device / "mem_info_vram_total"):
        driver = "amdgpu"  # none but amdgpu makes that file
    name = (text_in(device / "product_name") or "").removeprefix("AMD ").removeprefix("Instinct ")
    memory = number_in(device / "mem_info_vram_total")
    number = number_in(device / "device")
    made = "AMD" if vendor == AMD else "NVIDIA"
    return Card(made, name, bdf, device, number, driver=driver, memory=memory or None)


def _complete(card: Card, nodes: list[Node], tables: Tables) -> Card:
    if card.vendor != "AMD":
        return replace(card, name=card.name or "NVIDIA GPU")
    mine = tuple(node for node in nodes if _slot(node.bdf) == _slot(card.bdf))
    known = tables.card_by_number(card.number)
    name = card.name or (known["name"] if known else "AMD GPU")
    return replace(card, name=name, nodes=mine, arch=mine[0].arch if mine else None)


def _with_nvidia(cards: list[Card], told: list[dict[str, str]]) -> list[Card]:
    by_bdf = {card.bdf: card for card in cards}
    for fields in told:
        bdf = re.sub(r"^0000(?=[0-9a-f]{4}:)", "", fields["pci.bus_id"].lower())
        card = by_bdf.get(bdf) or Card("NVIDIA", "", bdf)
        capability = re.fullmatch(r"(\d+)\.(\d+)", fields["compute_cap"])
        arch = f"sm_{capability[1]}{capability[2]}" if capability else None
        name = fields["name"].removeprefix("NVIDIA ")
        by_bdf[bdf] = replace(card, name=name, arch=arch, driver="nvidia", told=fields)
    return list(by_bdf.values())


def _slot(bdf: str) -> str:
    """An address without its function, which KFD uses to number a card's partitions."""
    return bdf.rpartition(".")[0]


def listing(folder: Path, pattern: str) -> list[Path]:
    """What is in a folder, by name; nothing where it may not be read."""
    return sorted(Path(name) for name in glob.glob(os.path.join(glob.escape(str(folder)), pattern)))


def text_in(path: Path) -> str | None:
    """A file's text without the space around it; None when it can't be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def number_in(path: Path) -> int | None:
    """The whole number that a file holds, also in hexadecimal; None where there is none."""
    try:
        return int(text_in(path) or "", 0)
    except ValueError:
        return None
