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
from fp8console.diagnosis.bounds import BALANCE as UNEVEN
from fp8console.protocol.numbers import number

#: Cells that a GPU takes at least where several share a line, and what stands between two.
PACKED, PACKED_GAP = 16, "  "
#: A sample older than this, in seconds, no longer tells what a GPU does now.
STALE = 5.0


class Gpus(Panel):
    """The newest hardware sample's GPUs."""

    first = True
    last = False
    #: Rows at most; more GPUs than that are told by number.
    most = 16
    #: Whether a last row tells how evenly they work and what bounds the step.
    summary = True

    def outline(self, width: int, height: int) -> list[Line]:
        return lines.frame([], width, height, self.glyphs, [("GPUs", "title")], (), self.first, self.last)

    def draw(self, snapshot: Snapshot, width: int, height: int) -> list[Line]:
        sample = snapshot.status.hardware
        age = sample_age(sample, snapshot)
        room = max(1, height - 1 - int(self.last))
        title: Line = [("GPUs", "title")]
        summary = summary_spans(snapshot)
        if self.summary and room > 1 and gpus_of(sample):
            body = [*rows(sample, age, width - 3, self.glyphs, room - 1), summary]
        else:
            body = rows(sample, age, width - 3, self.glyphs, room)
            if gpus_of(sample):
                title += [("   ", "text"), *summary[:2]] if snapshot.status.balance is not None else []
            if bounds := snapshot.status.bounds:
                words = ", ".join(str(bound.get("what")) for bound in bounds)
                title += [("   bound by: ", "faint"), (lines.clean(words), "warning")]
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
        gpus = len(gpus_of(snapshot.status.hardware))
        rows = min(self.most, gpus)
        if gpus > self.most and (beside := _beside(gpus, self.size.width - 3, self.most)):
            rows = -(-gpus // beside)
        return 1 + max(1, rows) + int(self.summary and gpus > 0)


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


def summary_spans(snapshot: Snapshot) -> Line:
    """The balance over the run's cards, and what bounds the step; the first two spans are the balance."""
    status = snapshot.status
    spans: Line = []
    if status.balance is not None:
        role = "warning" if status.balance < UNEVEN else "value"
        spans += [("balance ", "faint"), (f"{status.balance:.2f}", role), ("   ", "faint")]
    return [*spans, *bound_spans(snapshot, short=True)]


def bound_spans(snapshot: Snapshot, short: bool = False) -> Line:
    """What bounds the step, all that is known to, or that it is not known; ``short``: all but the first in a word."""
    spans: Line = [("bound by: " if short else "step bound by: ", "faint")]
    for index, bound in enumerate(snapshot.status.bounds or ()):
        spans += [("; ", "faint")] if index else []
        text = str(bound.get("what" if short and index else "text"))
        spans.append((lines.clean(text.removesuffix(" of the time") if short else text), "warning"))
    return spans if len(spans) > 1 else [*spans, ("not known", "faint")]


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
    if len(gpus) > most and (fitting := packed(gpus, age, width, glyphs, most)):
        return fitting
    kept = gpus if len(gpus) <= most else gpus[: max(0, most - 1)]
    body = [row(gpu, age, width, glyphs) for gpu in kept]
    if len(kept) < len(gpus):
        body.append([(f"and {plural(len(gpus) - len(kept), 'more GPU')}: g shows all", "faint")])
    return body


def packed(gpus: list[dict[str, Any]], sampled: float, width: int, glyphs: Glyphs, most: int) -> list[Line]:
    """Several GPUs a line, in few words each; empty where even that has no room."""
    beside = _beside(len(gpus), width, most)
    if not beside:
        return []
    wide = (width + len(PACKED_GAP)) // beside - len(PACKED_GAP)
    body: list[Line] = []
    for index, gpu in enumerate(gpus):
        if index % beside == 0:
            body.append([])
        else:
            body[-1].append((PACKED_GAP, "text"))
        body[-1] += lines.fit(_small(gpu, sampled, wide, glyphs), wide)
    return body


def _beside(gpus: int, width: int, most: int) -> int:
    """How many GPUs share a line where there are ``most`` lines for them; 0 where they have no room."""
    beside = -(-gpus // most)
    return beside if (width + len(PACKED_GAP)) // beside - len(PACKED_GAP) >= PACKED else 0


def _small(gpu: dict[str, Any], sampled: float, width: int, glyphs: Glyphs) -> Line:
    """A GPU in a few cells: number, bar, utilisation, memory in GB, watts, degrees."""
    head: Line = [(f"{gpu.get('index', '?')!s:>2} ", "faint")]
    age = sampled + float(gpu.get("age") or 0.0)
    busy, used = gpu.get("busy"), gpu.get("vram_used")
    if busy is None or age > STALE:
        return [*head, (f"? since {age:.0f} s" if age > STALE else "unknown", "warning")]
    power, temperature = gpu.get("power_w"), gpu.get("temperature_c")
    figures: list[Line] = [
        [(f"{busy:>3.0f}%", "value")],
        [(f" {used / 1e9:>3.0f}G" if used is not None else "    ?", "text")],
        [(f" {temperature:>2.0f}{glyphs.degree or 'C'}" if temperature is not None else "   ?", "text")],
        [(f" {power:>3.0f}W" if power is not None else "    ?", "text")],
    ]
    while len(figures) > 1 and lines.width_of(head) + sum(map(lines.width_of, figures)) > width:
        figures.pop()
    room = width - lines.width_of(head) - sum(map(lines.width_of, figures)) - 1
    spans = [*head, *bar(busy / 100, room, glyphs), (" ", "text")] if room >= 2 else head
    return spans + [span for figure in figures for span in figure]


def short_name(name: Any) -> str:
    """A card's name without its maker's."""
    return lines.clean(str(name or "GPU")).removeprefix("NVIDIA ").removeprefix("AMD ").removeprefix("Instinct ")


def no_answer(age: float) -> str:
    """What is said of a card that has told nothing for a while."""
    return f"unknown (no answer since {age:.0f} s)"


def row(gpu: dict[str, Any], sampled: float, width: int, glyphs: Glyphs) -> Line:
    """Utilisation, memory, power and temperature of one GPU."""
    name = short_name(gpu.get("name"))
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
        reason = no_answer(age) if age > STALE else "unknown"
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
