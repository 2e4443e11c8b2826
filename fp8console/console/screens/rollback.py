"""Choosing a restore point to roll back to, with a new learning rate, loss scale or clip norm in the same move."""

from __future__ import annotations

from typing import Any

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import DataTable, Input, Label, Static

from fp8console.console.glyphs import Glyphs
from fp8console.console.headlines import verified_word
from fp8console.console.lines import clean
from fp8console.console.snapshot import Snapshot
from fp8console.console.wording import clock_text, plural, scale_text, short_number
from fp8console.protocol.commands import CommandError, validate


class RollBackScreen(ModalScreen[dict[str, Any]]):
    """Answers the command to give, or None."""

    BINDINGS = [
        Binding("escape", "dismiss(None)", "cancel", show=False),
        Binding("enter", "apply", "roll back", show=False),
    ]

    def __init__(self, snapshot: Snapshot, glyphs: Glyphs) -> None:
        super().__init__()
        self._snapshot = snapshot
        self._glyphs = glyphs
        self._points = newest_first(snapshot)

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as dialog:
            dialog.border_title = "roll back"
            yield DataTable(cursor_type="row", zebra_stripes=False)
            with Horizontal(classes="fields"):
                yield Label(f"learning rate {self._glyphs.times}")
                yield Input(placeholder="1.0", id="lr_scale")
                scaled = self._snapshot.status.scaler is not None
                if scaled:
                    yield Label("loss scale")
                    yield Input(placeholder="keep", id="scale")
                yield Label("clip norm")
                yield Input(placeholder="keep", id="clip_norm")
            yield Static("", id="consequence", classes="words", markup=False)
            yield Static("", id="trouble", classes="trouble", markup=False)
            yield Static("enter roll back    tab next field    esc cancel", classes="keys")

    def on_mount(self) -> None:
        table = self.query_one(DataTable)
        table.add_columns("step", "age", "loss", "norm", "scale", "where", "state")
        for point in self._points:
            table.add_row(*(Text(cell) for cell in row(point, self._snapshot.time)))
        table.move_cursor(row=preferred(self._points))
        table.focus()
        self._refresh()

    def on_data_table_row_highlighted(self) -> None:
        self._refresh()

    def on_data_table_row_selected(self) -> None:
        self.action_apply()

    def on_input_changed(self) -> None:
        self._refresh()

    def on_input_submitted(self) -> None:
        self.action_apply()

    def action_apply(self) -> None:
        """Answer the command, when there is a valid one."""
        command, _ = self._command()
        if command is not None:
            self.dismiss(command)

    def _chosen(self) -> dict[str, Any] | None:
        index = self.query_one(DataTable).cursor_row
        return self._points[index] if 0 <= index < len(self._points) else None

    def _command(self) -> tuple[dict[str, Any] | None, str]:
        point = self._chosen()
        if point is None:
            return None, "there is no restore point yet: c makes a checkpoint"
        command: dict[str, Any] = {"name": "rollback", "to": point["step"]}
        for field in self.query(Input):
            if field.id and field.value.strip():
                command[field.id] = field.value.strip()
        try:
            return validate(command), ""
        except CommandError as error:
            return None, str(error)

    def _refresh(self) -> None:
        point = self._chosen()
        words = consequence(self._snapshot, point) if point is not None else ""
        self.query_one("#consequence", Static).update(words)
        self.query_one("#trouble", Static).update(self._command()[1])


def newest_first(snapshot: Snapshot) -> list[dict[str, Any]]:
    """The restore points in the order of the table."""
    return sorted(snapshot.status.restore_points, key=lambda point: (-int(point["step"]), point["where"] != "memory"))


def preferred(points: list[dict[str, Any]]) -> int:
    """The row to begin on: the newest whole one from before any trouble, else the first."""
    for index, point in enumerate(points):
        if point.get("healthy") is not False and point.get("verified") is not False and not point.get("abandoned"):
            return index
    return 0


def row(point: dict[str, Any], now: float) -> tuple[str, ...]:
    """A restore point's cells."""
    age = None if point.get("time") is None else now - float(point["time"])
    state = [verified_word(point.get("verified"))]
    if point.get("healthy") is False:
        state.append("in trouble")
    if point.get("abandoned"):
        state.append("abandoned")
    where = point["where"] + (f"  {clean(point['tag'])}" if point.get("tag") else "")
    return (
        f"{point['step']:>9,}",
        clock_text(age),
        short_number(point.get("loss")),
        short_number(point.get("grad_norm")),
        scale_text(point.get("scale")) if point.get("scale") is not None else "",
        where,
        ", ".join(state),
    )


def consequence(snapshot: Snapshot, point: dict[str, Any]) -> str:
    """What goes back, what does not, and what is lost."""
    status = snapshot.status
    lost = max(0, (status.step or 0) - int(point["step"]))
    seconds = "" if status.step_seconds is None else f", about {_duration(lost * status.step_seconds)} of training"
    scaler = "scaler, " if status.scaler is not None else ""
    return (
        f"Weights, optimizer, {scaler}schedulers and random state go back to {point['step']:,}.\n"
        "The script's own counters and data do not: it goes on with new batches.\n"
        f"Loses {plural(lost, 'step')}{seconds}."
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else clock_text(seconds)
