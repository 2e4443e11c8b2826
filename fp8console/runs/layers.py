"""Reading the layers' statistics of a run while they grow: one record a sample, layer and kind of tensor.

A missing file is an empty one: an old run has none, and a reader may come before the writer.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8console.protocol import paths, records
from fp8console.runs.reader import StepRecords


class LayerRecords:
    """The layer records of one rank.

    ``layers`` says what the columns are: a list of {"name", "type", "shape", "parameters", "kinds"} in the order of
    their index. ``formats`` has "forward" (weights, activations) and "backward" (gradients), each {"name", "max",
    "min_normal", "min_subnormal"}: the FP8 formats that saturated, underflowed and headroom are about. ``problem`` is
    one line when a file can't be read; it then counts as empty.
    """

    def __init__(self, run_dir: Path, rank: int = 0) -> None:
        self.layers: list[dict[str, Any]] = []
        self.formats: dict[str, dict[str, Any]] = {}
        self._records = StepRecords(paths.layers_file(Path(run_dir), rank))
        self._about = [paths.layers_about(Path(run_dir), rank), paths.layers_about(Path(run_dir))]
        self._stamp: tuple[int, int, int] | None = None
        self._about_problem: str | None = None
        self._starts: list[int] = []  # where each sample's records begin
        self._seen = 0  # records looked at for that
        self._generation = -1
        self.refresh()

    @property
    def problem(self) -> str | None:
        return self._records.problem or self._about_problem

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._starts)

    @property
    def records(self) -> StepRecords:
        """The records one by one, for who wants them all."""
        return self._records

    def refresh(self) -> int:
        """Looks at the files again; returns the number of samples now."""
        count = self._records.refresh()
        if self._records.generation != self._generation:
            self._generation, self._starts, self._seen = self._records.generation, [], 0
        if count > self._seen:
            if self._about_is_new():
                self._read_about()
            self._index(count)
        return len(self)

    def _index(self, count: int) -> None:
        try:
            # One record further back, so that a sample which has grown is not taken for two.
            steps = self._records.column("step", max(0, self._seen - 1), count)
        except KeyError:
            return
        changes = np.flatnonzero(steps[1:] != steps[:-1]) + 1
        if self._seen == 0:
            self._starts.append(0)
        self._starts.extend((changes + max(0, self._seen - 1)).tolist())
        self._seen = count

    def _about_is_new(self) -> bool:
        for path in self._about:
            try:
                stat = os.stat(path)
            except OSError:
                continue
            stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if stamp == self._stamp:
                return False
            self._stamp = stamp
            return True
        return False

    def _read_about(self) -> None:
        for path in self._about:
            try:
                about = json.loads(path.read_bytes())
                layers, formats = about["layers"], about["formats"]
                if not all(isinstance(layer["name"], str) for layer in layers):
                    raise ValueError("a layer without a name")
                self.layers, self.formats, self._about_problem = list(layers), dict(formats), None
                return
            except FileNotFoundError:
                continue
            except (OSError, ValueError, KeyError, TypeError) as error:
                self._about_problem = f"{path}: not a description of layers ({error})"
                return

    def samples(self, kind: str, name: str, last: int | None = None) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """One figure of all layers over time: ``steps`` (n,) and ``values`` (n, layers), NaN where unknown.

        ``kind`` is one of LAYER_KINDS, ``name`` one of LAYER_FIGURES (protocol/records.py); ``last`` takes that many
        samples from the end. A sample in which no layer has this kind is left out. Raises ValueError for an unknown
        kind and KeyError for a column that this file does not have.
        """
        wanted = _kind_index(kind)
        first = 0 if last is None else max(0, len(self._starts) - last)
        width = len(self.layers)
        if first >= len(self._starts) or last == 0:
            return np.empty(0, np.int64), np.empty((0, width), np.float32)
        begin, end = self._starts[first], self._seen
        chosen = self._records.column("kind", begin, end) == wanted
        layers = self._records.column("layer", begin, end)
        # Records of layers that the description does not have (it is written anew a moment later) wait for it.
        chosen = chosen & (layers >= 0) & (layers < width)
        sample = np.searchsorted(np.array(self._starts[first:]), np.flatnonzero(chosen) + begin, side="right") - 1
        present, rows = np.unique(sample, return_inverse=True)
        values = np.full((len(present), width), np.nan, np.float32)
        known = self._records.known(name, begin, end)[chosen]
        figures = self._records.column(name, begin, end)[chosen]
        values[rows[known], layers[chosen][known]] = figures[known]
        starts = np.array([self._starts[first + index] for index in present.tolist()], np.int64)
        steps = self._records.column("step")[starts] if len(starts) else np.empty(0)
        self._records.release_pages()
        return steps.astype(np.int64), values

    def latest(self, kind: str) -> list[dict[str, Any]]:
        """The newest figures of each layer that has this kind, in the order of the layers.

        Each {"step", "layer" (index), "name", then LAYER_FIGURES}, None where unknown. A layer that was not in the
        newest sample keeps its last figures, with their step. Raises ValueError for an unknown kind.
        """
        wanted = _kind_index(kind)
        found: dict[int, dict[str, Any]] = {}
        end = self._seen
        # From the end back: nearly always the newest sample has them all.
        for start in self._starts[: -LOOK_BACK - 1 : -1]:
            kinds = self._records.column("kind", start, end)
            layers = self._records.column("layer", start, end)
            for place in np.flatnonzero(kinds == wanted).tolist():
                layer = int(layers[place])
                if layer not in found and 0 <= layer < len(self.layers):
                    found[layer] = self._row(start + place, layer)
            end = start
            if len(found) == len(self.layers):
                break
        return [found[layer] for layer in sorted(found)]

    def _row(self, at: int, layer: int) -> dict[str, Any]:
        row: dict[str, Any] = {"step": int(self._records.column("step", at, at + 1)[0])}
        row.update(layer=layer, name=self.layers[layer]["name"])
        for name in records.LAYER_FIGURES:
            known = name in self._records.names and self._records.known(name, at, at + 1)[0]
            row[name] = float(self._records.column(name, at, at + 1)[0]) if known else None
        return row


#: Samples that ``latest`` goes back for a layer that the newest do not have.
LOOK_BACK = 50


def _kind_index(kind: str) -> int:
    if kind not in records.LAYER_KINDS:
        raise ValueError(f"{kind!r} is no kind of a layer's tensors; known: {', '.join(records.LAYER_KINDS)}")
    return records.LAYER_KINDS.index(kind)
