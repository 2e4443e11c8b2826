"""How to leave: detach, stop or kill."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from fp8console.console.snapshot import Snapshot
from fp8console.console.wording import plural


class QuitScreen(ModalScreen[str]):
    """Answers "detach", "stop", "kill", or None to stay."""

    BINDINGS = [
        Binding("escape,q", "dismiss(None)", "stay", show=False),
        Binding("d", "choose('detach')", "detach", show=False),
    ]

    def __init__(self, snapshot: Snapshot | None) -> None:
        super().__init__()
        self._snapshot = snapshot

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as dialog:
            dialog.border_title = "leave the console"
            yield OptionList(
                Option("detach   the training goes on; come back with: fp8console attach", id="detach"),
                Option("stop     checkpoint at the next step, then end the training", id="stop"),
                Option(f"kill     end it now; {since_point(self._snapshot)}", id="kill"),
            )
            yield Static("enter choose    esc stay", classes="keys")

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_id)

    def action_choose(self, way: str) -> None:
        """Answer at once."""
        self.dismiss(way)


def since_point(snapshot: Snapshot | None) -> str:
    """What a kill would lose: only a checkpoint outlives the training."""
    if snapshot is None or snapshot.status.step is None:
        return "nothing has been trained yet"
    disk = [p["step"] for p in snapshot.status.restore_points if p["where"] == "disk" and not p.get("abandoned")]
    if not disk:
        return f"no checkpoint on disk, {plural(snapshot.count, 'step')} would be lost"
    return f"{plural(max(0, snapshot.status.step - max(disk)), 'step')} since the last checkpoint"
