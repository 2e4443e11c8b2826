"""Fixed-width binary records behind a JSON header that states their layout: one a step, and one a layer and kind.

File: one header line of JSON, padded with spaces to ``HEADER_BYTES`` and ended by a newline, then little-endian
records of equal size. A torn last record (file size not a whole number of records) is ignored by readers. Readers
take the layout from the header, never from this module, so that old runs stay readable.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

HEADER_BYTES = 2048
MAGIC = "fp8console-records"

#: Records that a rank keeps in shared memory (paths.spool_file), newest over oldest.
SPOOL_SLOTS = 4096

#: Largest float32: struct refuses to pack a larger finite number in an "f".
FLOAT32_MAX = (2.0 - 2.0**-23) * 2.0**127

#: struct codes a layout may use, all little-endian; numpy spells them "<" + the same letter's type.
NUMPY_CODES = {"q": "<i8", "i": "<i4", "I": "<u4", "d": "<f8", "f": "<f4"}


@dataclass(frozen=True)
class Field:
    """One field of a record: its name, struct code, unit and meaning."""

    name: str
    code: str
    unit: str
    meaning: str


STEP_FIELDS: tuple[Field, ...] = (
    Field("step", "q", "steps", "attempt of the optimizer to update, counted from 1; never goes back"),
    Field("time", "d", "s", "wall clock at the boundary, seconds since the epoch"),
    Field("duration", "d", "s", "since the previous boundary, pauses and the probe's own restores left out"),
    Field("loss", "d", "", "mean over the micro-batches of the loss as backpropagated, unscaled"),
    Field("grad_norm", "d", "", "global L2 norm of the gradients, unscaled, before clipping"),
    Field("clip_coef", "d", "", "factor that clipping applied to the gradients, 1 when it left them alone"),
    Field("lr", "d", "", "learning rate in effect in the first parameter group of the last optimizer"),
    Field("scale", "d", "", "loss scale that this step's backward used"),
    Field("growth_tracker", "i", "steps", "clean steps since the scale last changed, after the scaler's update"),
    Field("micro_batches", "i", "", "backward passes in this step"),
    Field("data_wait", "d", "s", "time the training thread waited for the DataLoader in this step"),
    Field("device_memory", "q", "bytes", "allocated on the training's device at the last sample"),
    Field("batch", "i", "batches", "batches that the DataLoader's iterator has given out"),
    Field("epoch_batches", "i", "batches", "the DataLoader's length"),
    Field("epoch", "i", "", "epochs begun by the training's DataLoader, counted from 1"),
    Field("clip_limit", "d", "", "norm that clipping allowed, unscaled; the smallest of several, inf for no limit"),
    Field("flags", "I", "", "bits of FLAGS"),
    Field("known", "I", "", "bit i is set when field i of this layout holds a measured value"),
)

#: Which of a layer's tensors a layer record is about; a record's ``kind`` is an index into this.
LAYER_KINDS = ("weight", "gradient", "activation", "activation_gradient")

LAYER_FIELDS: tuple[Field, ...] = (
    Field("step", "q", "steps", "the step whose values these are"),
    Field("layer", "i", "", "index into the layers of layers.json"),
    Field("kind", "i", "", "index into LAYER_KINDS"),
    Field("l2", "f", "", "L2 norm, NaN or inf when an element is"),
    Field("amax", "f", "", "largest finite magnitude"),
    Field("mean", "f", "", "mean of the finite elements"),
    Field("nonfinite", "f", "elements", "elements that are NaN or inf"),
    Field("elements", "f", "elements", "elements in all"),
    Field("saturated", "f", "share", "share of the elements that are finite and round beyond the format's maximum"),
    Field("underflowed", "f", "share", "share of the elements other than 0 that the format makes 0"),
    Field("headroom", "f", "bits", "log2 of the format's maximum over amax, inf when amax is 0"),
    Field("scale", "f", "", "loss scale that all the values above still carry, 1 when they carry none"),
    Field("known", "I", "", "bit i is set when field i of this layout holds a measured value"),
)
#: The measured fields of a layer record, in order.
LAYER_FIGURES = tuple(field.name for field in LAYER_FIELDS[3:-1])

FLAGS: dict[str, int] = {
    "skipped": 1 << 0,  # the scaler refused the step (found_inf)
    "loss_nonfinite": 1 << 1,
    "grad_nonfinite": 1 << 2,
    "clipped": 1 << 3,
    "restored": 1 << 4,  # the first step after a rollback
    "scaled_clip": 1 << 5,  # the script clipped gradients that were still scaled
    "paused": 1 << 6,  # the training was held at this boundary
}


def _struct(fields: tuple[Field, ...]) -> struct.Struct:
    return struct.Struct("<" + "".join(field.code for field in fields))


STEP_STRUCT = _struct(STEP_FIELDS)
LAYER_STRUCT = _struct(LAYER_FIELDS)
#: The fields before the last two, flags and known, which are always known; what stands there when they are not; and
#: ``known`` by which are missing: a training has a handful of such patterns.
_NAMES = [f.name for f in STEP_FIELDS[:-2]]
_BLANK = [math.nan if f.code == "d" else 0 for f in STEP_FIELDS[:-2]]
_ALWAYS_KNOWN = 0b11 << len(_NAMES)
_KNOWN: dict[tuple[bool, ...], int] = {}
_STEP_INDEX = {field.name: index for index, field in enumerate(STEP_FIELDS)}


def header(fields: tuple[Field, ...] = STEP_FIELDS, **about: Any) -> bytes:
    """The header of a record file: ``HEADER_BYTES`` bytes. Raises ValueError if ``about`` makes it too long."""
    text = json.dumps(
        {
            "magic": MAGIC,
            "version": 1,
            "record_bytes": _struct(fields).size,
            "fields": [[f.name, f.code, f.unit] for f in fields],
            "flags": FLAGS,
            **about,
        },
        separators=(",", ":"),
    ).encode()
    if len(text) >= HEADER_BYTES:
        raise ValueError(f"record header of {len(text)} bytes is over {HEADER_BYTES - 1}")
    return text.ljust(HEADER_BYTES - 1) + b"\n"


def parse_header(data: bytes) -> dict[str, Any]:
    """The header's JSON. Raises ValueError for anything that is not the start of a record file."""
    if len(data) < HEADER_BYTES:
        raise ValueError("not a record file: shorter than its header")
    try:
        parsed = json.loads(data[:HEADER_BYTES])
    except ValueError as error:
        raise ValueError(f"not a record file: {error}") from None
    if not isinstance(parsed, dict) or parsed.get("magic") != MAGIC:
        raise ValueError("not a record file: no magic")
    return parsed


def pack_step(values: dict[str, float | int | None], flags: int) -> bytes:
    """One step record. A value that is missing or None is unknown: stored as 0 (NaN for floats), its bit unset.

    Raises struct.error for a float in an integer's field.
    """
    given = [values.get(name) for name in _NAMES]
    absent = tuple([value is None for value in given])
    known = _KNOWN.get(absent)
    if known is None:
        known = _KNOWN[absent] = _ALWAYS_KNOWN | sum(1 << i for i, missing in enumerate(absent) if not missing)
    return STEP_STRUCT.pack(*[d if v is None else v for v, d in zip(given, _BLANK)], flags, known)


def unpack_step(data: bytes) -> dict[str, float | int | None]:
    """The values of one packed step record of this version's layout; unknown ones are None. For tests and tools."""
    raw = dict(zip(_STEP_INDEX, STEP_STRUCT.unpack(data), strict=True))
    known = raw["known"]
    return {name: raw[name] if known & (1 << index) else None for name, index in _STEP_INDEX.items()}


def pack_layer(step: int, layer: int, kind: int, figures: Sequence[float | None]) -> bytes:
    """One layer record; ``figures`` in the order of LAYER_FIGURES, None where unknown (stored as NaN, its bit unset).

    A magnitude beyond float32 is stored as inf.
    """
    known = 0b111 | 1 << len(LAYER_FIELDS) - 1
    stored = []
    for place, figure in enumerate(figures, start=3):
        if figure is None:
            figure = math.nan
        else:
            known |= 1 << place
            if abs(figure) > FLOAT32_MAX:
                figure = math.copysign(math.inf, figure)
        stored.append(figure)
    return LAYER_STRUCT.pack(step, layer, kind, *stored, known)


def unpack_layer(data: bytes) -> dict[str, float | int | None]:
    """The values of one packed layer record of this version's layout; unknown ones are None. For tests and tools."""
    raw = LAYER_STRUCT.unpack(data)
    return {f.name: raw[i] if raw[-1] & (1 << i) else None for i, f in enumerate(LAYER_FIELDS)}
