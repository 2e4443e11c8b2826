"""Which of torch's devices is which GPU of a library: their orders differ (reversed on some nodes).

What the training process says of its own device (UUID, PCI address) decides. Without it the number that HIP gives each
GPU when nothing is hidden, from the library or from the order of KFD's nodes, goes through the variables that hide
GPUs: HIP_VISIBLE_DEVICES on top of ROCR_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES where HIP's is not set. Unknown is None.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Variables that choose and order devices.
VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


@dataclass(frozen=True)
class RankDevice:
    """A rank's own device as torch there tells it. ``index`` is None for a rank on no GPU.

    ``visible`` are the variables of VISIBLE that the rank has; None where it did not say, and the launch's hold.
    """

    index: int | None
    uuid: str | None = None
    slot: str | None = None  # PCI address without the function: 0000:05:00
    visible: Mapping[str, str] | None = None


def rank_device(hello: Mapping[str, Any]) -> RankDevice | None:
    """From what a rank's probe says at joining; None when it does not say on which device it is."""
    device = str(hello.get("device"))
    match = re.fullmatch(r"cuda(?::(\d+))?", device)
    if match is None and device in ("unknown", "None"):
        return None
    about = hello.get("gpu")
    about = about if isinstance(about, dict) else {}
    visible = about.get("visible")
    return RankDevice(
        index=None if match is None else int(match[1] or 0),
        uuid=plain_uuid(about.get("uuid")),
        slot=about["slot"] if isinstance(about.get("slot"), str) else None,
        visible={str(key): str(value) for key, value in visible.items()} if isinstance(visible, dict) else None,
    )


def plain_uuid(text: Any) -> str | None:
    """A UUID's digits, however it is written: GPU-..., with dashes, or (torch on ROCm) as bytes of its digits."""
    digits = str(text or "").lower().removeprefix("gpu-").replace("-", "")
    if not re.fullmatch(r"[0-9a-f]+", digits) or not digits.strip("0"):
        return None
    if len(digits) == 32:
        inner = bytes.fromhex(digits)
        if re.fullmatch(rb"[0-9a-f]{16}", inner.lower()):
            return inner.decode().lower()
    return digits


def join(gpus: Sequence[dict[str, Any]], ranks: Sequence[RankDevice], environment: Mapping[str, str]) -> None:
    """Set torch_index, torch_indices and used of each GPU's sample, and take its "join" away.

    ``ranks`` are in order, ``environment`` is the launch's. A GPU has the number that the rank on it gives it, any
    other one the first rank's. ``torch_index`` is None where unknown, hidden, or where a partitioned card is several
    of torch's devices; those are ``torch_indices``.
    """
    about = [gpu.pop("join", None) or {} for gpu in gpus]
    own: list[tuple[int, int]] = []  # (torch's index, row) of each rank that could be found
    first: list[int | None] | None = None if ranks else order(gpus, about, environment)
    lost = not ranks
    for number, rank in enumerate(ranks):
        if rank.index is None:
            continue
        rows = order(gpus, about, environment if rank.visible is None else rank.visible)
        placed = rows[rank.index] if rows is not None and rank.index < len(rows) else None
        row = _named(rank, gpus)
        if row is not None and row != placed:
            rows = None  # the order is not what it was taken for
        row = placed if row is None else row
        if row is None:
            lost = True
        else:
            own.append((rank.index, row))
        first = rows if number == 0 else first
    for number, gpu in enumerate(gpus):
        indices = {index for index, row in own if row == number}
        used = bool(indices)
        if not used and first is not None:
            indices = {index for index, row in enumerate(first) if row == number}
        processes = gpu.get("processes")
        gpu["torch_indices"] = sorted(indices)
        gpu["torch_index"] = next(iter(indices)) if len(indices) == 1 else None
        if used or (isinstance(processes, list) and processes):
            gpu["used"] = True
        else:
            gpu["used"] = None if lost and not isinstance(processes, list) else False


def order(
    gpus: Sequence[Mapping[str, Any]], about: Sequence[Mapping[str, Any]], variables: Mapping[str, str]
) -> list[int | None] | None:
    """Rows of ``gpus`` by torch's index under ``variables`` (None: a device that is in no row); None when unknown."""
    kinds = {bool(known.get("nvidia")) for known in about}
    if len(kinds) != 1:
        return None
    uuids = {plain: row for row, gpu in enumerate(gpus) if (plain := plain_uuid(gpu.get("uuid"))) is not None}
    cuda = variables.get("CUDA_VISIBLE_DEVICES")
    if kinds == {True}:
        # CUDA puts the fastest first; among equal ones that is the order of their addresses.
        if variables.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and len({gpu.get("name") for gpu in gpus}) > 1:
            return None
        return _chosen(list(range(len(gpus))), cuda, uuids)
    devices = _all_devices(about)
    if devices is None:
        return None
    visible = _chosen(devices, variables.get("ROCR_VISIBLE_DEVICES"), uuids)
    # To HIP an empty variable is as good as none, and its own goes before CUDA's.
    return None if visible is None else _chosen(visible, variables.get("HIP_VISIBLE_DEVICES") or cuda or None, uuids)


def _all_devices(about: Sequence[Mapping[str, Any]]) -> list[int | None] | None:
    """Rows by HIP's number when nothing is hidden; None when a row's number is unknown or two rows have one."""
    numbers = [[known["hip_id"]] if known.get("hip_id") is not None else [] for known in about]
    if not all(numbers):
        numbers = [list(known.get("orders") or ()) for known in about]
    places = [(number, row) for row, mine in enumerate(numbers) for number in mine]
    if not all(numbers) or len({number for number, _ in places}) < len(places):
        return None
    found: list[int | None] = [None] * (1 + max(number for number, _ in places))
    for number, row in places:
        found[number] = row
    return found


def _chosen(devices: list[int | None], text: str | None, uuids: Mapping[str, int]) -> list[int | None] | None:
    """Those of ``devices`` that a variable's value keeps, in its order; the rest after a wrong word is hidden."""
    if text is None:
        return devices
    kept: list[int] = []
    for word in text.split(","):
        word = word.strip()
        if word.startswith("MIG-"):
            return None
        if re.fullmatch(r"\d{1,9}", word):
            place = int(word)
        else:
            plain = plain_uuid(word) if word else None
            rows = {row for uuid, row in uuids.items() if plain is not None and uuid.startswith(plain)}
            row = rows.pop() if len(rows) == 1 else None
            place = devices.index(row) if row is not None and row in devices else -1
        if not 0 <= place < len(devices):
            break
        if place in kept:
            return None  # the runtimes differ in what they make of a device named twice
        kept.append(place)
    return [devices[place] for place in kept]


def _named(rank: RankDevice, gpus: Sequence[Mapping[str, Any]]) -> int | None:
    """The row of a rank's own device, by UUID or else by address, where only one row has it."""
    by_uuid = [plain_uuid(gpu.get("uuid")) for gpu in gpus]
    by_slot = [str(gpu.get("bdf") or "").rpartition(".")[0] for gpu in gpus]
    for mine, theirs in ((rank.uuid, by_uuid), (rank.slot, by_slot)):
        if mine and theirs.count(mine) == 1:
            return theirs.index(mine)
    return None
