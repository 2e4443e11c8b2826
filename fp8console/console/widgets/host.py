"""The host: processor, memory, room for the run directory, and the training's share."""

from __future__ import annotations

from typing import Any

from fp8console.console import lines
from fp8console.console.glyphs import Glyphs
from fp8console.console.lines import Line
from fp8console.console.snapshot import Snapshot
from fp8console.console.widgets.bars import bar
from fp8console.console.widgets.gpus import STALE, gpus_of, no_gpus, sample_age
from fp8console.console.widgets.panel import Panel
from fp8console.console.wording import bytes_text, of_text, percent_text

#: Less room than this for the run directory is a warning, in bytes.
LITTLE_ROOM = 2e9
#: Cells from which on words are written out.
WIDE = 60


class Host(Panel):
    """The newest hardware sample's host."""

    last = False
    compact = False

    def outline(self, width: int, height: int) -> list[Line]:
        return lines.frame([], width, height, self.glyphs, [("host", "title")], (), False, self.last)

    def draw(self, snapshot: Snapshot, width: int, height: int) -> list[Line]:
        body = rows(snapshot, self.glyphs, width - 3, self.compact)
        age = sample_age(snapshot.status.hardware, snapshot)
        note: Line = [(f"{age:.0f} s ago", "warning")] if age > STALE else []
        inside = [[(" ", "text"), *row] for row in body]
        return lines.frame(inside, width, height, self.glyphs, [("host", "title")], note, False, self.last)


def rows(snapshot: Snapshot, glyphs: Glyphs, width: int, compact: bool) -> list[Line]:
    """Two lines, or in a compact screen one (and one for why no GPU is shown)."""
    sample = snapshot.status.hardware
    host: dict[str, Any] = (sample or {}).get("host") or {}
    cpu = host.get("cpu_percent")
    gap, cells = ("   ", 8) if width >= WIDE else ("  ", 3)
    wait = snapshot.status.data_wait_share
    first: Line = [("cpu ", "faint")]
    first += [*bar(cpu / 100, cells, glyphs), (f" {cpu:.0f}%", "value")] if cpu is not None else [("unknown", "faint")]
    first += [(gap + "memory ", "faint"), (of_text(host.get("memory_used"), host.get("memory_total")), "value")]
    free = host.get("run_dir_free")
    role = "warning" if free is not None and free < LITTLE_ROOM else "value"
    first += [
        (gap + ("run directory " if width >= WIDE and not compact else "disk "), "faint"),
        (bytes_text(free), role),
        (" free", "faint"),
    ]
    if compact and wait is not None:
        first += [(gap + "data wait ", "faint"), (percent_text(wait), "value")]
    second: Line = [("training ", "faint"), *_training(host, snapshot, gap)]
    if compact:
        return [first] if gpus_of(sample) else [first, [(lines.clean(no_gpus(sample)), "faint")]]
    return [first, second]


def _training(host: dict[str, Any], snapshot: Snapshot, gap: str) -> Line:
    busy, resident = host.get("process_cpu_percent"), host.get("process_rss")
    status = snapshot.status
    spans: Line = [
        ("cpu ", "faint"),
        (f"{busy:.0f}%" if busy is not None else "unknown", "value"),
        (gap + "memory ", "faint"),
        (bytes_text(resident), "value"),
    ]
    if status.data_wait_share is not None:
        spans += [(gap + "data wait ", "faint"), (percent_text(status.data_wait_share), "value")]
    if status.device_memory:
        spans += [(gap + "on device ", "faint"), (bytes_text(status.device_memory), "value")]
    return spans
