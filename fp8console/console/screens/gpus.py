"""Every GPU with all that is known of it, their utilisation over time, what is wrong, and the host."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.binding import Binding
from textual.events import Resize

from fp8console.console import lines
from fp8console.console.lines import Line
from fp8console.console.screens.base import RunScreen
from fp8console.console.snapshot import Snapshot
from fp8console.console.widgets.gpu_table import GpuTable
from fp8console.console.widgets.gpus import bound_spans, gpus_of
from fp8console.console.widgets.headline import Headline
from fp8console.console.widgets.heat_map import LEVELS, WIDTHS, HeatMap
from fp8console.console.widgets.host import Host
from fp8console.console.widgets.host import rows as host_rows
from fp8console.console.widgets.keyline import KeyLine
from fp8console.console.widgets.panel import Panel

#: From this height on there is room for headings and for a panel of what is wrong.
TALL = 30
ALERTS = 4

KEYS = (
    ("esc", "back", "app.pop_screen", 0),
    ("x", "XCDs", "screen.fold", 1),
    ("z", "seconds a column", "screen.zoom", 2),
    ("up down", "card", "screen.move(1)", 3),
    ("a", "alerts", "app.alerts", 4),
    ("?", "help", "app.help", 5),
)


class Bounds(Panel):
    """What bounds the step, and the hardware's troubles that are not over; in a low screen the host too."""

    low = False

    def draw(self, snapshot: Snapshot, width: int, height: int) -> list[Line]:
        body: list[Line] = [[(" ", "text"), *bound_spans(snapshot)]]
        alerts = snapshot.status.hardware_alerts
        if self.low:
            body += [[(" ", "text"), *host_rows(snapshot, self.glyphs, width - 3, True)[0]]]
        elif reason := _reason(snapshot):
            body.append([(f" {lines.clean(reason)}", "faint")])
        for alert in alerts[::-1][: max(0, height - 1 - len(body))]:
            body.append([(f" {self.glyphs.alert} ", "alert"), (lines.clean(str(alert.get("text"))), "alert")])
        note: Line = [(f"{len(alerts)} not over", "alarm")] if alerts else [("no trouble", "faint")]
        if not gpus_of(snapshot.status.hardware) and not alerts:
            note = []
        return lines.frame(body, width, height, self.glyphs, [("diagnosis", "title")], note, False, False)


def _reason(snapshot: Snapshot) -> str | None:
    """Why the samples don't come from a better source; None where there is no card, which the table explains."""
    sample = snapshot.status.hardware or {}
    reason = sample.get("reason") if gpus_of(sample) else None
    return f"by {sample.get('source')}: {reason}" if reason else None


class GpusScreen(RunScreen):
    """GPUs and host on a page of their own."""

    COMPONENT_CLASSES = {f"role--{level}" for level in LEVELS}
    BINDINGS = [
        Binding("escape", "app.pop_screen", "back", show=False),
        Binding("x", "fold", "XCDs of no card, of one, of all", show=False),
        Binding("z", "zoom", "seconds that a column stands for", show=False),
        Binding("up", "move(-1)", "the card above, or scroll", show=False),
        Binding("down", "move(1)", "the card below, or scroll", show=False),
        Binding("pageup", "move(-8)", "scroll up by eight rows", show=False),
        Binding("pagedown", "move(8)", "scroll down by eight rows", show=False),
    ]
    CSS = """
    GpuTable { height: 2; } HeatMap { height: 1fr; } Bounds { height: 2; } GpusScreen Host { height: 4; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._width = 0  # which of WIDTHS

    def compose(self) -> ComposeResult:
        yield Headline(glyphs=self.glyphs)
        yield GpuTable(glyphs=self.glyphs)
        yield HeatMap(glyphs=self.glyphs)
        yield Bounds(glyphs=self.glyphs)
        host = Host(glyphs=self.glyphs)
        host.last = True
        yield host
        yield KeyLine(KEYS)

    def on_unmount(self) -> None:
        self.console_app.want_utilisation(None)

    def on_resize(self, event: Resize) -> None:
        self.call_after_refresh(self._want)

    def show(self, snapshot: Snapshot) -> None:
        super().show(snapshot)
        self._arrange(snapshot)
        for panel in (GpuTable, HeatMap, Bounds, Host):
            if self.query_one(panel).display:
                self.query_one(panel).show(snapshot)

    def _arrange(self, snapshot: Snapshot) -> None:
        """Heights by what there is: the map has what the others leave."""
        height = self.app.size.height
        tall = height >= TALL
        table, host, bounds = self.query_one(GpuTable), self.query_one(Host), self.query_one(Bounds)
        table.heading = tall
        there = len(gpus_of(snapshot.status.hardware))
        table.styles.height = 1 + min(max(1, there) + int(tall and there > 0), max(1, (height - 8) // 2))
        told = min(ALERTS, len(snapshot.status.hardware_alerts)) + int(bool(_reason(snapshot)))
        bounds.styles.height = 2 + (told if tall else 1)
        bounds.low, host.display = not tall, tall
        self._want()

    def _want(self) -> None:
        if self.whole:
            self.console_app.want_utilisation((WIDTHS[self._width], self.query_one(HeatMap).columns))

    def action_fold(self) -> None:
        """Show the XCDs of no card, of one, of all."""
        self.query_one(HeatMap).fold()

    def action_zoom(self) -> None:
        """Let a column stand for more seconds, in the end for the whole run."""
        self._width = (self._width + 1) % len(WIDTHS)
        self.query_one(HeatMap).whole_run = WIDTHS[self._width] is None
        self._want()

    def action_move(self, rows: int) -> None:
        """Choose another card, or scroll the map."""
        self.query_one(HeatMap).move(rows)
