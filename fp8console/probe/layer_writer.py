"""Samples of the layers' statistics on their way to the file: queued by the training thread, written by the link's."""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8console.numerics.formats import Fp8Format
from fp8console.numerics.statistics import FIELDS
from fp8console.probe.record_file import RecordFile
from fp8console.protocol import paths, records
from fp8console.protocol.numbers import dumps

#: Rows kept while the disk does not take them: at 64 bytes each, 13 MB. Older samples are lost then, and counted.
QUEUE_ROWS = 200_000


@dataclass
class Key:
    """What a row of statistics is about. ``stale``: measured again later in the same step, not to be written."""

    layers: tuple[int, ...]  # all that hold the tensor
    kind: int  # index into records.LAYER_KINDS
    scaled: bool  # the values carry the loss scale
    stale: bool = False


@dataclass
class Sample:
    """One step's statistics: ``rows`` are host tensors that hold the rows of ``keys``, one after the other."""

    step: int
    keys: list[Key]
    rows: list[Tensor]
    scale: float | None  # the step's loss scale, where some values carry it


class LayerWriter:
    """Appends samples to a rank's layer records, and keeps the description of the layers beside them.

    A layer keeps its index for the run, over restarts too: the file's reader knows it by that. Raises ValueError when
    there are records and no description of their layers that could be gone on with.
    """

    def __init__(self, run_dir: Path, rank: int, forward: Fp8Format, backward: Fp8Format, **about: Any) -> None:
        self.lost = 0
        self._formats = (forward, backward)
        self._file = RecordFile(paths.layers_file(run_dir, rank), records.LAYER_FIELDS, rank=rank, **about)
        self._about = paths.layers_about(run_dir, rank)
        self._layers: list[dict[str, Any]] = []
        if not self._file.fresh:
            try:
                self._layers = list(json.loads(self._about.read_bytes())["layers"])
            except FileNotFoundError:
                if self._file.last() is not None:
                    raise ValueError(f"{self._about.name}, which the layer records need, is gone") from None
        self._index = {str(layer["name"]): place for place, layer in enumerate(self._layers)}
        self._described = False
        self._about_problem: str | None = None
        self._queue: deque[Sample] = deque()
        self._queued = 0
        self._rest = b""  # records that the disk has not taken

    @property
    def problem(self) -> str | None:
        """Why samples can't be written at present, or None."""
        return self._about_problem or self._file.problem

    def describe(self, layers: list[dict[str, Any]]) -> list[int]:
        """The indices of these layers (``name`` and the other fields of layers.json); new names get new ones."""
        indices = []
        for layer in layers:
            place = self._index.get(layer["name"])
            if place is None:
                place = self._index[layer["name"]] = len(self._layers)
                self._layers.append(layer)
            else:
                self._layers[place] = layer
            indices.append(place)
        self._described = False
        return indices

    def add(self, sample: Sample) -> None:
        """Queue one sample; never waits."""
        self._queue.append(sample)
        self._queued += len(sample.keys)
        while self._queued > QUEUE_ROWS and len(self._queue) > 1:
            self._queued -= len(self._queue.popleft().keys)
            self.lost += 1

    def flush(self) -> None:
        """Write what is queued. A full or broken disk sets ``problem`` and keeps the queue for the next try."""
        if not self._queue and not self._rest:
            return
        if not self._described and not self._write_description():
            return
        while self._queue or self._rest:
            if not self._rest:
                try:
                    sample = self._queue.popleft()
                except IndexError:
                    return  # the training thread has just dropped the oldest
                self._queued -= len(sample.keys)
                self._rest = to_bytes(sample, self._formats)
            written = self._file.append(self._rest)
            self._rest = self._rest[written * self._file.width :]
            if self._rest:
                return

    def _write_description(self) -> bool:
        self._described = True  # set first: the training thread may add layers meanwhile
        forward, backward = (_format_about(fmt) for fmt in self._formats)
        text = dumps({"layers": list(self._layers), "formats": {"forward": forward, "backward": backward}}, indent=1)
        aside = self._about.with_name(f".{self._about.name}.{os.getpid()}")
        try:
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
                file.write(text + "\n")
            os.replace(aside, self._about)
        except OSError as error:
            self._described = False
            self._about_problem = str(error.strerror)
            try:
                aside.unlink(missing_ok=True)
            except OSError:
                pass
            return False
        self._about_problem = None
        return True


def _format_about(fmt: Fp8Format) -> dict[str, Any]:
    return {"name": fmt.name, "max": fmt.max, "min_normal": fmt.min_normal, "min_subnormal": fmt.min_subnormal}


def to_bytes(sample: Sample, formats: tuple[Fp8Format, Fp8Format]) -> bytes:
    """The records of a sample, one for each layer and kind, as ``records.pack_layer`` would pack them one by one.

    Put together by a few operations on whole columns: the training waits for the interpreter while this runs.
    """
    with torch.no_grad():
        rows = torch.cat([part.to("cpu", torch.float64) for part in sample.rows])
        places: dict[tuple[int, int], list[int]] = {}
        for place, key in enumerate(sample.keys):
            if not key.stale:
                for layer in key.layers:
                    places.setdefault((layer, key.kind), []).append(place)
        if not places:
            return b""
        first = [found[0] for found in places.values()]
        table = rows[torch.tensor(first, device="cpu")]
        for at, found in enumerate(places.values()):
            if len(found) > 1:
                table[at] = torch.tensor(combined(rows[found].tolist()), dtype=torch.float64, device="cpu")
        maxima = [math.log2(formats[kind in _BACKWARD].max) for _, kind in places]
        scale = math.nan if sample.scale is None else sample.scale
        scales = [scale if sample.keys[place].scaled else 1.0 for place in first]
        beside = torch.tensor([maxima, scales], dtype=torch.float64, device="cpu")
        headroom = beside[0] - table[:, 1].log2()
        figures = torch.cat((table[:, :7], headroom[:, None], beside[1][:, None]), 1)
        known = ~figures.isnan()
        known[:, 0] = True  # an L2 that is NaN has been measured
        bits = (known.long() << torch.arange(3, 12, device="cpu")).sum(1) | _ALWAYS_KNOWN
        count = len(places)
        columns = (
            torch.full((count, 1), sample.step, dtype=torch.int64, device="cpu"),
            torch.tensor(list(places), dtype=torch.int32, device="cpu"),
            figures.float(),
            bits.to(torch.int32)[:, None],
        )
        packed = torch.cat([column.contiguous().view(torch.uint8).reshape(count, -1) for column in columns], 1)
        return ctypes.string_at(packed.data_ptr(), packed.numel())


_BACKWARD = frozenset(index for index, kind in enumerate(records.LAYER_KINDS) if "gradient" in kind)
_ALWAYS_KNOWN = 0b111 | 1 << len(records.LAYER_FIELDS) - 1
assert FIELDS[:7] == records.LAYER_FIGURES[:7]


def combined(rows: list[list[float]]) -> list[float]:
    """Several rows of statistics as one, as if the tensors had been one: a layer used twice, or with two weights.

    amax: the largest. l2: root of the sum of squares. Counts add up. Means and shares are weighted by what they are
    shares of.
    """
    l2s, amaxes, means, bad, elements, saturated, underflowed, nonzero = zip(*rows)
    finite = [n - b for n, b in zip(elements, bad)]
    nonzeros = [share * n for share, n in zip(nonzero, elements)]
    total = sum(elements)
    return [
        math.nan if any(map(math.isnan, l2s)) else math.hypot(*l2s),
        max((amax for amax in amaxes if not math.isnan(amax)), default=math.nan),
        _weighted(means, finite),
        sum(bad),
        total,
        _weighted(saturated, elements),
        _weighted(underflowed, nonzeros),
        sum(nonzeros) / total,
    ]


def _weighted(values: tuple[float, ...], weights: Any) -> float:
    # A weight of 0 comes with a value of NaN: a mean of nothing.
    pairs = [(value, weight) for value, weight in zip(values, weights) if weight > 0]
    weight = sum(weight for _, weight in pairs)
    return sum(value * share for value, share in pairs) / weight if weight else math.nan
