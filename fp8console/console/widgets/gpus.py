"""GPUs: one row each, as old as it is, unknown where unknown."""

from __future__ import annotations

from typing import Any

from fp8console.console import lines
from fp8console.console.glyphs import Glyphs
from fp8console.console.lines import Line
from fp8console.console.snapshot import Snapshot
from fp8console.console.widgets.bars import bar
from fp8console.console.widgets.panel import Panel
from fp8console.console.wording import of_text, plural
from fp8console.protocol.numbers import number

#: A sample older than this, in seconds, no longer tells what a GPU does now.
STALE = 5.0


class Gpus(Panel):
    """The newest hardware sample's GPUs."""

    first = True
    last = False
    #: Rows at most; more GPUs than that are told by number.
    most = 16

    def outline(self, width: int, height: int) -> list[Line]:
        return lines.frame([], width, height, self.glyphs, [("GPUs", "title")], (), self.first, self.last)

    def draw(self, snapshot: Snapshot, width: int, height: int) -> list[Line]:
        sample = snapshot.status.hardware
        age = sample_age(sample, snapshot)
        body = rows(sample, age, width - 3, self.glyphs, max(1, height - 1 - int(self.last)))
        title: Line = [("GPUs", "title")]
        return lines.frame(
            [[(" ", "text"), *row] for row in body],
            width,
            height,
            self.glyphs,
            title,
            source_spans(snapshot),
            self.first,
            self.last,
        )

    def height_wanted(self, snapshot: Snapshot) -> int:
        """Lines with the title's, none when there is nothing but the reason to tell."""
        return 1 + max(1, min(self.most, len(gpus_of(snapshot.status.hardware))))


def gpus_of(sample: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The GPUs of a sample; none for None."""
    found = (sample or {}).get("gpus")
    return [gpu for gpu in found if isinstance(gpu, dict)] if isinstance(found, list) else []


def sample_age(sample: dict[str, Any] | None, snapshot: Snapshot) -> float:
    """Seconds since a sample was taken; 0 for the last one of an ended run, which is as old as the rest of it."""
    if sample is None or snapshot.ended:
        return 0.0
    return max(0.0, snapshot.time - (number(sample.get("time")) or snapshot.time))


def source_spans(snapshot: Snapshot) -> Line:
    """Where the newest sample comes from and how old it is."""
    sample = snapshot.status.hardware
    if sample is None:
        return [("no sample yet" if not snapshot.ended else "no sample", "faint")]
    source = lines.clean(str(sample.get("source") or "unknown source"))
    if snapshot.ended:
        return [(f"{source} · last sample", "faint")] if gpus_of(sample) else []
    age, state = sample_age(sample, snapshot), str(sample.get("state") or "ok")
    if state == "ok" and age <= STALE and not gpus_of(sample):
        return []
    words = f"{source} · {age:.1f} s ago"
    if state != "ok":
        words += f" · sampler {lines.clean(state)}"
    return [(words, "warning" if age > STALE or state != "ok" else "faint")]


def no_gpus(sample: dict[str, Any] | None) -> str:
    """Why no GPU is shown."""
    if sample is None:
        return "no GPU telemetry yet: no sample has arrived"
    reason = str(sample.get("reason") or "none found")
    return reason if reason.startswith("no GPU telemetry") else f"no GPU telemetry: {reason}"


def rows(sample: dict[str, Any] | None, age: float, width: int, glyphs: Glyphs, most: int) -> list[Line]:
    """One line a GPU, at most ``most`` lines; ``age`` is the sample's."""
    gpus = gpus_of(sample)
    if not gpus:
        return [[(lines.clean(no_gpus(sample)), "faint")]]
    kept = gpus if len(gpus) <= most else gpus[: max(0, most - 1)]
    body = [row(gpu, age, width, glyphs) for gpu in kept]
    if len(kept) < len(gpus):
        body.append([(f"and {plural(len(gpus) - len(kept), 'more GPU')}: g shows all", "faint")])
    return body


def row(gpu: dict[str, Any], sampled: float, width: int, glyphs: Glyphs) -> Line:
    """Utilisation, memory, power and temperature of one GPU."""
    name = lines.clean(str(gpu.get("name") or "GPU"))
    head: Line = [(f"{gpu.get('index', '?')} {name[:12]:<7} ", "text")]
    # The sampler tells the age of each value at the time of the sample.
    age = sampled + float(gpu.get("age") or 0.0)
    busy, used, total = gpu.get("busy"), gpu.get("vram_used"), gpu.get("vram_total")
    power, temperature = gpu.get("power_w"), gpu.get("temperature_c")
    tail: Line = [
        (f" {of_text(used, total):>10}", "text" if used is not None else "faint"),
        (f" {power:>4.0f} W" if power is not None else "    ? W", "text" if power is not None else "faint"),
        (f" {temperature:.0f}{glyphs.degree}" if temperature is not None else "  ?", "text"),
    ]
    if busy is None:
        reason = f"unknown (no answer for {age:.0f} s)" if age > STALE else "unknown"
        room = width - lines.width_of(head) - lines.width_of(tail)
        return [*head, *lines.fit([("gfx ", "faint"), (reason, "warning")], max(0, room), glyphs.ellipsis), *tail]
    room = width - lines.width_of(head) - lines.width_of(tail) - len("gfx  100%  mem ")
    gfx = min(16, max(0, room * 3 // 5))
    mem = min(10, max(0, room - gfx))
    spans = [*head, ("gfx ", "faint"), *bar(busy / 100, gfx, glyphs), (f" {busy:>3.0f}%", "value")]
    if mem >= 3 and used is not None and total:
        spans += [("  mem ", "faint"), *bar(used / total, mem, glyphs)]
    if age > STALE:
        return [*spans, (f"  {age:.0f} s old", "warning")]
    return [*spans, *tail]
