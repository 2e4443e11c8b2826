"""Every GPU with all that is known of it, and the host."""

from __future__ import annotations

from typing import Any

from textual.app import ComposeResult
from textual.binding import Binding

from fp8console.console import lines
from fp8console.console.glyphs import Glyphs
from fp8console.console.lines import Line
from fp8console.console.screens.base import RunScreen
from fp8console.console.snapshot import Snapshot
from fp8console.console.widgets.bars import bar
from fp8console.console.widgets.gpus import gpus_of, no_gpus, sample_age, source_spans
from fp8console.console.widgets.headline import Headline
from fp8console.console.widgets.host import Host
from fp8console.console.widgets.keyline import KeyLine
from fp8console.console.widgets.panel import Panel
from fp8console.console.wording import UNKNOWN, bytes_text


class GpuTable(Panel):
    """One block of two lines a GPU."""

    def draw(self, snapshot: Snapshot, width: int, height: int) -> list[Line]:
        sample = snapshot.status.hardware
        stale = sample_age(sample, snapshot)
        body: list[Line] = []
        for gpu in gpus_of(sample):
            body += [[(" ", "text"), *line] for line in block(gpu, stale, width - 4, self.glyphs)]
        if not body:
            body = [[(" " + lines.clean(no_gpus(sample)), "faint")]]
        title: Line = [("GPUs", "title")]
        return lines.frame(body, width, height, self.glyphs, title, source_spans(snapshot), True, False)


def block(gpu: dict[str, Any], sampled: float, width: int, glyphs: Glyphs) -> list[Line]:
    """A GPU's name and age, then its figures; unknown ones say so."""

    def figure(name: str, unit: str) -> Line:
        value = gpu.get(name)
        return [(UNKNOWN, "warning")] if value is None else [(f"{value:,.0f}{unit}", "value")]

    age = sampled + float(gpu.get("age") or 0.0)
    head: Line = [
        (f"{gpu.get('index', '?')} {lines.clean(str(gpu.get('name') or 'GPU'))}", "title"),
        (f"   {lines.clean(str(gpu.get('bdf') or ''))}   {age:.1f} s ago", "faint"),
    ]
    figures: Line = [("  busy ", "faint")]
    busy = gpu.get("busy")
    figures += [*bar(busy / 100, 16, glyphs), (" ", "text")] if busy is not None else []
    figures += [*figure("busy", "%"), ("   memory ", "faint")]
    used, total = gpu.get("vram_used"), gpu.get("vram_total")
    if used is not None and total:
        figures += [*bar(used / total, 16, glyphs), (f" {bytes_text(used)} of {bytes_text(total)}", "value")]
    else:
        figures += [(UNKNOWN, "warning")]
    figures += [("   memory busy ", "faint"), *figure("memory_busy", "%")]
    more: Line = [("  power ", "faint"), *figure("power_w", " W"), (" of ", "faint"), *figure("power_cap_w", " W")]
    more += [("   hottest spot ", "faint"), *figure("temperature_c", glyphs.degree + "C")]
    more += [("   memory ", "faint"), *figure("memory_temperature_c", glyphs.degree + "C")]
    return [head, lines.fit(figures, width, glyphs.ellipsis), lines.fit(more, width, glyphs.ellipsis), []]


class GpusScreen(RunScreen):
    """GPUs and host on a page of their own."""

    BINDINGS = [Binding("escape", "app.pop_screen", "back", show=False)]
    CSS = "GpuTable { height: 1fr; } GpusScreen Host { height: 4; }"

    def compose(self) -> ComposeResult:
        yield Headline(glyphs=self.glyphs)
        yield GpuTable(glyphs=self.glyphs)
        host = Host(glyphs=self.glyphs)
        host.last = True
        yield host
        yield KeyLine((("esc", "back", "app.pop_screen", 0), ("?", "help", "app.help", 0)))

    def show(self, snapshot: Snapshot) -> None:
        super().show(snapshot)
        self.query_one(GpuTable).show(snapshot)
        self.query_one(Host).show(snapshot)
