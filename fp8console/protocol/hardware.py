"""One line of hardware.jsonl: a sample of all cards and the host, in a third of its JSON's length.

A sample is a dictionary whose "gpus" is a list with a dictionary for each card. On the line "gpus" has two parts: "all"
holds what is the same for every card, "each" a list by card for the rest; a name with a dot is part of a field, and
what no card knows is left out. So an absent field is unknown, and so is None. Older lines hold the list as it is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

#: What a card's part of a sample has, None where unknown: percent, bytes, watts, degrees Celsius, MHz, shares of the
#: time, bytes a second, GT/s, seconds. MEASURED of hardware/gpu.py says what a source reads.
GPU_FIELDS = (
    *("index", "name", "arch", "bdf", "uuid", "source", "reason", "torch_index", "torch_indices", "used"),
    *("busy", "memory_busy", "xcd_busy", "partition", "vram_used", "vram_total", "power_w", "power_cap_w"),
    *("temperature_c", "memory_temperature_c", "clock_mhz", "memory_clock_mhz", "throttle"),
    *("pcie_bytes_s", "xgmi_read_bytes_s", "xgmi_write_bytes_s"),
    *("pcie_width", "pcie_speed_gts", "pcie_width_max", "pcie_speed_max_gts"),
    *("ecc_correctable", "ecc_uncorrectable", "processes", "age"),
)
HOST_FIELDS = (
    *("cpu_percent", "memory_used", "memory_total", "run_dir_free", "run_dir_total"),
    *("process_cpu_percent", "process_rss", "load_1m"),
)
#: Fields that are dictionaries, and theirs.
PARTS = {"throttle": ("power", "thermal", "hbm"), "partition": ("compute", "memory")}
TEXTS = frozenset(("name", "arch", "bdf", "uuid", "source", "reason"))
#: Numbers beyond this are none that a machine has.
MOST = 1e18
#: From here on a fraction is no measurement.
WHOLE = 10_000.0
#: Cards that a line may have: one that claims more is damaged.
MOST_CARDS = 4096


def dump(sample: Mapping[str, Any]) -> str:
    """The line, without its end. Raises TypeError or ValueError for what is no sample."""
    line = dict(sample)
    time = line.get("time")
    if isinstance(time, float) and math.isfinite(time):
        line["time"] = round(time, 3)
    if line.get("gpus"):
        line["gpus"] = _packed(line["gpus"])
    if isinstance(line.get("host"), dict):
        line["host"] = _flat(line["host"])
    return json.dumps(line, separators=(",", ":"))


def parse(line: bytes | str) -> dict[str, Any] | None:
    """The sample of a line, also of an older one; None for a torn or a foreign line.

    Whatever stands there, "gpus" is a list of dictionaries, "host" one, and a field is of its kind or None.
    """
    try:
        sample = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(sample, dict):
        return None
    gpus, host = sample.get("gpus"), sample.get("host")
    if isinstance(gpus, dict):
        gpus = _unpacked(gpus)
        host = {**dict.fromkeys(HOST_FIELDS), **host} if isinstance(host, dict) else host
    sample["gpus"] = [_sound(gpu) for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []
    sample["host"] = {name: _figure(value) for name, value in host.items()} if isinstance(host, dict) else {}
    for name in ("source", "reason", "state"):
        if name in sample:
            sample[name] = _text(sample[name])
    return sample


# -- writing ----------------------------------------------------------------------------------------------------------
def _packed(gpus: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    cards = [_flat(gpu) for gpu in gpus]
    same: dict[str, Any] = {}
    each: dict[str, list[Any]] = {"index": [gpu.get("index") for gpu in gpus]}  # also tells how many there are
    for name in dict.fromkeys(name for card in cards for name in card if name != "index"):
        column = [card.get(name) for card in cards]
        if all(value == column[0] for value in column):
            same[name] = column[0]
        else:
            each[name] = column
    return {"all": same, "each": each}


def _flat(gpu: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in gpu.items():
        if value is None or (name == "torch_indices" and value == _alone(gpu.get("torch_index"))):
            continue
        if name in PARTS and isinstance(value, dict):
            found.update({f"{name}.{part}": _short(inner) for part, inner in value.items()})
        elif name == "processes" and isinstance(value, list):
            found[name] = [[process.get("pid"), process.get("vram")] for process in value]
        else:
            found[name] = [_short(item) for item in value] if isinstance(value, list) else _short(value)
    return {name: value for name, value in found.items() if value is not None}


def _alone(index: Any) -> list[Any]:
    """The ``torch_indices`` that go without saying."""
    return [] if index is None else [index]


def _short(value: Any) -> Any:
    """A figure without digits that nobody measured: four places, none of a large one. None for no number."""
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None  # JSON has no token for it, and it is no measurement
    value = round(value, 4) if abs(value) < WHOLE else round(value)
    return int(value) if value == int(value) else value


# -- reading ----------------------------------------------------------------------------------------------------------
def _unpacked(packed: Mapping[str, Any]) -> list[dict[str, Any]]:
    same, each = packed.get("all"), packed.get("each")
    if not isinstance(same, dict) or not isinstance(each, dict) or not isinstance(each.get("index"), list):
        return []
    if len(each["index"]) > MOST_CARDS:
        return []
    columns = {name: column for name, column in each.items() if isinstance(column, list)}
    return [
        _whole({**same, **{name: column[row] for name, column in columns.items() if row < len(column)}})
        for row in range(len(each["index"]))
    ]


def _whole(flat: Mapping[str, Any]) -> dict[str, Any]:
    gpu: dict[str, Any] = dict.fromkeys(GPU_FIELDS)
    for name, value in flat.items():
        field, dot, part = name.partition(".")
        if value is None:
            continue
        if dot and field in PARTS:
            gpu[field] = {**(gpu.get(field) or dict.fromkeys(PARTS[field])), part: value}
        elif name == "processes" and isinstance(value, list):
            gpu[name] = [dict(zip(("pid", "vram"), one)) if isinstance(one, list) else one for one in value]
        else:
            gpu[name] = value
    if gpu["torch_indices"] is None:
        gpu["torch_indices"] = _alone(gpu["torch_index"])
    return gpu


def _sound(gpu: Mapping[str, Any]) -> dict[str, Any]:
    """A card's part of a sample with None for what is not of a field's kind."""
    return {name: None if value is None else _of_kind(name, value) for name, value in gpu.items()}


def _of_kind(name: str, value: Any) -> Any:
    if name in TEXTS:
        return _text(value)
    if name in PARTS:
        kind = _figure if name == "throttle" else _text
        return {str(part): kind(inner) for part, inner in value.items()} if isinstance(value, dict) else None
    if name == "xcd_busy":
        return [_figure(item) for item in value] if isinstance(value, list) else None
    if name == "torch_indices":
        return [item for item in value if type(item) is int] if isinstance(value, list) else None
    if name == "processes":
        return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else None
    if name == "used":
        return value if isinstance(value, bool) else None
    return _figure(value) if name in GPU_FIELDS else value


def _figure(value: Any) -> Any:
    """A finite number of a size that a machine has, or None."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < MOST else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
