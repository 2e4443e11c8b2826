"""How stable the run has been: failures, skips, jitter and clipping, in words for any width."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8console.console import lines
from fp8console.console.lines import Line
from fp8console.console.snapshot import Snapshot
from fp8console.console.widgets.panel import Panel
from fp8console.console.wording import UNKNOWN, count_text, percent_text

if TYPE_CHECKING:
    from fp8console.runs.stability import StabilityFigures


class Stability(Panel):
    """The run's stability figures: two rows, or with ``compact`` one and the rule above it."""

    last = False
    compact = False

    def outline(self, width: int, height: int) -> list[Line]:
        return lines.frame([], width, height, self.glyphs, [("stability", "title")], (), False, self.last)

    def draw(self, snapshot: Snapshot, width: int, height: int) -> list[Line]:
        figures = snapshot.status.stability
        first, second = failure_clauses(figures), step_clauses(figures)
        note: Line = []
        if self.compact:
            first, second = first[:2], first[2:] + second
            note = joined(first, f" {self.glyphs.point} ", width - 16)
            body = [joined(second, "  ", width - 4)]
        else:
            body = [joined(clauses, "   ", width - 4) for clauses in (first, second)]
        inside = [[(" ", "text"), *row] for row in body]
        return lines.frame(inside, width, height, self.glyphs, [("stability", "title")], note, False, self.last)


def failure_clauses(figures: StabilityFigures) -> list[Line]:
    """Steps between failures, the longest stretch without one, how many the loss came back from."""
    if figures.failures is None:
        between: Line = [("between failures ", "faint"), (UNKNOWN, "value")]
    elif figures.mean_steps_between_failures is None:
        between = [("no failure in ", "faint"), (f"{count_text(figures.mean_steps_at_least)} steps", "value")]
    else:
        mean = figures.mean_steps_between_failures
        text = f"{mean:,.0f}" if mean >= 100 else f"{mean:.3g}"
        between = [("between failures ", "faint"), (f"{text} steps", "value")]
    recovered = f"{figures.recovered:,} of {figures.judged:,}" if figures.judged else UNKNOWN
    if figures.failures == 0:
        recovered = "no need"
    return [
        between,
        [("longest ", "faint"), (count_text(figures.longest_stable_stretch), "value")],
        [("recovered ", "faint"), (recovered, "value")],
    ]


def step_clauses(figures: StabilityFigures) -> list[Line]:
    """Skips of 1,000 steps, the loss's jitter, the share of clipped steps over the run and of late."""
    skips = figures.skips_per_1000_steps
    clipped, lately = figures.clip_frequency, figures.clip_frequency_recent
    clip: Line = [("clipped ", "faint"), (percent_text(clipped) if clipped is not None else UNKNOWN, "value")]
    if lately is not None:
        role = "warning" if lately > 0.1 else "value"
        clip += [(", lately ", "faint"), (percent_text(lately), role)]
    return [
        [("skips ", "faint"), (UNKNOWN if skips is None else f"{skips:.3g}/1,000", "value")],
        [("loss jitter ", "faint"), (percent_text(figures.loss_jitter), "value")],
        clip,
    ]


def joined(clauses: list[Line], gap: str, width: int) -> Line:
    """The clauses side by side; for lack of room a clause is cut down to its first figure, or left out."""
    spans: Line = []
    for clause in clauses:
        room = width - lines.width_of(spans) - (len(gap) if spans else 0)
        fitting = next((short for short in (clause, clause[:2]) if lines.width_of(short) <= room), [])
        spans += ([(gap, "faint")] if spans and fitting else []) + fitting
    return spans
