"""The best source for each GPU: amdsmi, else sysfs, else ROCm's commands; nvml for NVIDIA's.

A GPU that a source does not answer for goes one step down, and its reason is told with each sample; the better source
is asked again with the next slow reading.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from fp8console.hardware.gpu import MEASURED, Gpu, Reading, Unavailable
from fp8console.hardware.rates import Rates
from fp8console.protocol.settings import GPU_SOURCES

SLOW_SECONDS = 10.0

#: In the order in which they are tried.
SOURCES = GPU_SOURCES


class Source(Protocol):
    """What a source is; its constructor raises Unavailable."""

    name: str

    def gpus(self) -> list[Gpu]: ...
    def read(self, key: str, slow: bool, pids: frozenset[int]) -> Reading: ...
    def close(self) -> None: ...


@dataclass
class Row:
    """One GPU and the sources that list it, the best first."""

    gpu: Gpu
    sources: list[tuple[Source, str]]
    missing: list[str] = field(default_factory=list)  # why sources before the first are not among them
    refused: dict[str, str] = field(default_factory=dict)  # source -> why it is not asked until the next slow reading
    slow: dict[str, dict[str, Any]] = field(default_factory=dict)  # source -> its last slow values


class Chain:
    """Reads every GPU through its best source.

    ``openers``: a name of SOURCES and what makes the source, in order. ``reading`` is called with the name of each part
    before it is touched; ``skipped`` are parts that hung in an earlier process and are left out.
    """

    def __init__(
        self,
        openers: Iterable[tuple[str, Callable[[], Source]]],
        reading: Callable[[str], None],
        skipped: set[str],
        forced: str | None = None,
        nothing: str = "no GPU found",
    ) -> None:
        self._reading = reading
        self._skipped = skipped
        self._rates = Rates()
        self._slow_at = -SLOW_SECONDS
        self._sources: list[Source] = []
        self.rows: list[Row] = []
        self.reasons: list[str] = []  # of sources that could not be opened
        for name, opener in openers:
            if name in ("amd-smi", "rocm-smi") and forced is None and self.rows:
                continue
            if name in skipped:
                self.reasons.append(f"{name} did not answer and is left out for now")
                continue
            reading(name)
            try:
                self._add(opener())
            except Unavailable as error:
                self.reasons.append(str(error))
            except Exception as error:
                self.reasons.append(f"{name}: {type(error).__name__}: {error}")
        if not self.rows and not self.reasons:
            self.reasons.append(nothing)

    def _add(self, source: Source) -> None:
        self._sources.append(source)
        listed = [row for row in self.rows if row.sources[0][0].name != "nvml"] if source.name != "nvml" else []
        for gpu in source.gpus():
            row = next((row for row in listed if _same(row.gpu, gpu)), None)
            if row is None and listed and (gpu.bdf is None or any(row.gpu.bdf is None for row in listed)):
                continue  # one that can't be told from those that are listed already
            if row is None:
                row = Row(gpu, [], [] if source.name == "nvml" else self._why_not_better())
                self.rows.append(row)
            row.sources.append((source, gpu.key))

    def _why_not_better(self) -> list[str]:
        unlisted = [f"{source.name} does not list this GPU" for source in self._sources[:-1] if source.name != "nvml"]
        return [*self.reasons, *unlisted]

    def sweep(self, pids: frozenset[int]) -> list[dict[str, Any]]:
        """A sample of each GPU: its identity, values, source and reason; "join" is for joins.py."""
        slow = time.monotonic() - self._slow_at >= SLOW_SECONDS
        if slow:
            self._slow_at = time.monotonic()
        return [self._sample(number, row, slow, pids) for number, row in enumerate(self.rows)]

    def reason(self, samples: list[dict[str, Any]]) -> str | None:
        """Why not all comes from the best source, in one line."""
        if not samples:
            return "no GPU telemetry: " + "; ".join(self.reasons)
        reasons: dict[str, list[str]] = {}
        for sample in samples:
            if sample["reason"]:
                reasons.setdefault(sample["reason"], []).append(str(sample["index"]))
        if len(reasons) == 1 and len(next(iter(reasons.values()))) == len(samples):
            return next(iter(reasons))
        return "; ".join(f"GPU {', '.join(numbers)}: {reason}" for reason, numbers in reasons.items()) or None

    def close(self) -> None:
        for source in self._sources:
            self._reading(source.name)
            source.close()

    def _sample(self, number: int, row: Row, slow: bool, pids: frozenset[int]) -> dict[str, Any]:
        if slow:
            row.refused.clear()
        reasons = list(row.missing)
        best: tuple[Source, Reading] | None = None
        for source, key in row.sources:
            part = f"{source.name} {row.gpu.bdf or key}"
            if part in self._skipped:
                reasons.append(f"{source.name} did not answer and is left out for now")
                continue
            if source.name in row.refused:
                reasons.append(row.refused[source.name])
                continue
            self._reading(part)
            first_time = source.name not in row.slow
            try:
                reading = source.read(key, slow or first_time, pids)
            except Exception as error:
                text = str(error) if isinstance(error, Unavailable) else f"{source.name}: {error!r}"
                row.refused[source.name] = text
                reasons.append(text)
                continue
            if slow or first_time:
                row.slow[source.name] = reading.slow
            if reading.whole and reading.known():
                best = (source, reading)
                break
            # Another source may know more; if none does, this one is as good as it gets.
            if not reading.whole:
                row.refused[source.name] = reading.note or f"{source.name} failed"
                reasons.append(row.refused[source.name])
            if best is None or reading.known() > best[1].known():
                best = (source, reading)
        if best is not None:
            row.refused.pop(best[0].name, None)
        return self._record(number, row, best, reasons, bool(pids))

    def _record(
        self, number: int, row: Row, best: tuple[Source, Reading] | None, reasons: list[str], with_processes: bool
    ) -> dict[str, Any]:
        gpu = row.gpu
        sample: dict[str, Any] = {
            "index": number,
            "name": gpu.name,
            "arch": gpu.arch,
            "bdf": gpu.bdf,
            "uuid": gpu.uuid,
            "source": best[0].name if best is not None else "none",
            "reason": None,
            **dict.fromkeys(MEASURED),
            "age": None,
            "join": {"hip_id": gpu.hip_id, "orders": list(gpu.orders), "nvidia": row.sources[0][0].name == "nvml"},
        }
        if best is not None:
            source, reading = best
            rates = self._rates.of(f"{source.name} {number}", reading.counters, time.monotonic())
            if not with_processes:  # nothing to look for, which is not the same as none found
                row.slow.get(source.name, {}).pop("processes", None)
            for values in (row.slow.get(source.name, {}), reading.values, rates):
                sample.update({name: value for name, value in values.items() if name in MEASURED and value is not None})
            sample["age"] = round(reading.age, 1)
            if reading.note and reading.note not in reasons:
                reasons.append(reading.note)
        sample["reason"] = "; ".join(dict.fromkeys(reasons)) or None
        return sample


def _same(one: Gpu, other: Gpu) -> bool:
    if one.bdf is not None and other.bdf is not None:
        return one.bdf == other.bdf
    return one.uuid is not None and one.uuid == other.uuid
