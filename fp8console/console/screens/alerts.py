"""The incidents of a run, newest first: alerts, skipped steps, rollbacks, faults of our own parts."""

from __future__ import annotations

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.widgets import DataTable

from fp8console.console.lines import clean
from fp8console.console.screens.base import RunScreen
from fp8console.console.snapshot import Snapshot, is_alert
from fp8console.console.widgets.events import kind_glyph
from fp8console.console.widgets.headline import Headline
from fp8console.console.widgets.keyline import KeyLine
from fp8console.console.wording import clock_text, plural


class AlertsScreen(RunScreen):
    """One row an incident."""

    BINDINGS = [Binding("escape", "app.pop_screen", "back", show=False)]

    def __init__(self) -> None:
        super().__init__()
        self._shown = -1

    def compose(self) -> ComposeResult:
        yield Headline(glyphs=self.glyphs)
        table: DataTable[Text] = DataTable(cursor_type="row", classes="page", zebra_stripes=False)
        table.border_title = "alerts"
        yield table
        yield KeyLine((("esc", "back", "app.pop_screen", 0), ("r", "roll back", "app.roll_back", 0)))

    def on_mount(self) -> None:
        table = self.query_one(DataTable)
        table.add_columns("", "step", "ago", "kind", "what")
        table.focus()
        super().on_mount()

    def show(self, snapshot: Snapshot) -> None:
        super().show(snapshot)
        if len(snapshot.incidents) == self._shown:
            return
        self._shown = len(snapshot.incidents)
        table = self.query_one(DataTable)
        others = len(snapshot.incidents) - snapshot.alerts
        table.border_subtitle = f"{plural(snapshot.alerts, 'alert')}, {plural(others, 'other incident')}"
        table.clear()
        for event in reversed(snapshot.incidents):
            glyph, _ = kind_glyph(event, self.glyphs)
            step = event.get("step")
            table.add_row(
                Text(glyph),
                Text(f"{step:>9,}" if isinstance(step, int) else ""),
                Text(clock_text(snapshot.time - event["time"])),
                Text("alert" if is_alert(event) else ""),
                Text(clean(str(event.get("text") or event["kind"]))),
            )
