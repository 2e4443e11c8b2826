"""A form for what can be changed while the training runs: the scaler, the learning rate, clipping."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Label, Static

from fp8console.console.glyphs import Glyphs
from fp8console.console.lines import clean
from fp8console.console.snapshot import Snapshot
from fp8console.console.wording import percent_text, scale_text, short_number
from fp8console.protocol.commands import REFILLS, CommandError, validate
from fp8console.protocol.numbers import number


@dataclass(frozen=True)
class Setting:
    """One line of the form: the setting's name in a command, its name for people, what it is now, a note."""

    name: str
    title: str
    now: Callable[[Snapshot], str]
    note: Callable[[Snapshot], str] = lambda snapshot: ""
    scaler: bool = False
    own: bool = False  # only some scalers have it


def _of_scaler(name: str, unset: str = "unknown") -> Callable[[Snapshot], str]:
    def now(snapshot: Snapshot) -> str:
        value = (snapshot.status.scaler or {}).get(name)
        parsed = number(value)
        if parsed is None and isinstance(value, str):
            return clean(value)
        return unset if parsed is None else f"{parsed:,.10g}"

    return now


def _scale_now(snapshot: Snapshot) -> str:
    value = snapshot.status.scale
    return "unknown" if value is None else f"{value:,.10g}"


def _scale_note(snapshot: Snapshot) -> str:
    return scale_text(snapshot.status.scale) + "; or x2, /2"


def _limit(value: float | None) -> str:
    if value is None:
        return "none"
    power = scale_text(value)
    return f"{value:,.10g}" if "." in power else power


def _floor_note(snapshot: Snapshot) -> str:
    # A scaler that has a margin never goes without a floor.
    return "least scale" if "margin" in (snapshot.status.scaler or {}) else "least scale, or off"


def _refill_note(snapshot: Snapshot) -> str:
    now = (snapshot.status.scaler or {}).get("refill")
    return "or " + " or ".join(other for other in REFILLS if other != now)


def _lr_note(snapshot: Snapshot) -> str:
    lr = snapshot.status.lr
    return "" if lr is None else f"learning rate now {lr:.3g}"


def _clip_note(snapshot: Snapshot) -> str:
    share = snapshot.status.clipped_share
    return "a norm, auto, off" if share is None else f"or auto, off; clipped {percent_text(share)}"


SETTINGS = (
    Setting("scale", "loss scale", _scale_now, _scale_note, scaler=True),
    Setting("growth_factor", "growth_factor", _of_scaler("growth_factor"), lambda s: "over 1", scaler=True),
    Setting("backoff_factor", "backoff_factor", _of_scaler("backoff_factor"), lambda s: "between 0 and 1", scaler=True),
    Setting("growth_interval", "growth_interval", _of_scaler("growth_interval"), lambda s: "clean steps", scaler=True),
    Setting("floor", "floor", lambda s: _limit(s.status.floor), _floor_note, scaler=True),
    Setting("cap", "cap", lambda s: _limit(s.status.cap), lambda s: "largest scale, or off", scaler=True),
    Setting("margin", "margin, bits", _of_scaler("margin", "off"), lambda s: "below the edge, or off", True, own=True),
    Setting("hysteresis", "hysteresis", _of_scaler("hysteresis"), lambda s: "overflows to back off", True, own=True),
    Setting("refill", "refill", _of_scaler("refill"), _refill_note, True, own=True),
    Setting("smoothing", "smoothing", _of_scaler("smoothing"), lambda s: "of growth, 0 to 1", True, own=True),
    Setting("patience", "patience", _of_scaler("patience"), lambda s: "bad steps to back off", True, own=True),
    Setting(
        "underflow_tolerance",
        "underflow, share",
        _of_scaler("underflow_tolerance"),
        lambda s: "asks for growth",
        True,
        True,
    ),
    Setting(
        "saturation_tolerance",
        "saturation, share",
        _of_scaler("saturation_tolerance", "off"),
        lambda s: "is overflow, or off",
        True,
        True,
    ),
    Setting("lr_scale", "learning rate x", lambda s: _own(s.status.lr_scale, "1"), _lr_note),
    Setting("clip_norm", "clip max-norm", lambda s: _own(s.status.clip_norm, "the script's"), _clip_note),
    Setting("clip_z", "clip z-score", lambda s: _own(s.status.clip_z, "unknown"), lambda s: "of auto"),
)


def _own(value: float | str | None, unset: str) -> str:
    if isinstance(value, str):
        return clean(value)
    return unset if value is None else short_number(value)


class RetuneScreen(ModalScreen[dict[str, Any]]):
    """Answers the command to give, or None. What is typed is checked as it is typed."""

    BINDINGS = [
        Binding("escape", "dismiss(None)", "cancel", show=False),
        Binding("down", "app.focus_next", "next", show=False),
        Binding("up", "app.focus_previous", "previous", show=False),
    ]

    def __init__(self, snapshot: Snapshot, glyphs: Glyphs) -> None:
        super().__init__()
        self._snapshot = snapshot
        self._glyphs = glyphs

    def compose(self) -> ComposeResult:
        status = self._snapshot.status
        scaler = status.scaler
        with Vertical(classes="dialog") as dialog:
            dialog.border_title = "retune"
            name = str(scaler.get("class_name") or "GradScaler") if scaler else "no GradScaler"
            dialog.border_subtitle = Content(clean(name))
            with Horizontal(classes="setting"):
                yield Label("", classes="name")
                yield Label("now", classes="now faint")
                yield Label("new", classes="faint")
            for setting in settings_for(self._snapshot):
                with Horizontal(classes="setting"):
                    yield Label(setting.title, classes="name", markup=False)
                    yield Label(setting.now(self._snapshot), classes="now", markup=False)
                    yield Input(placeholder="keep", id=setting.name)
                    yield Label(setting.note(self._snapshot), classes="note", markup=False)
            yield Static("", id="trouble", classes="trouble", markup=False)
            yield Static("enter apply    tab next field    esc cancel", classes="keys")

    def on_mount(self) -> None:
        self.query(Input).first().focus()

    def on_input_changed(self) -> None:
        self.query_one("#trouble", Static).update(self._command()[1])

    def on_input_submitted(self) -> None:
        command, trouble = self._command()
        if command is not None:
            self.dismiss(command)
        elif not trouble:
            self.query_one("#trouble", Static).update("nothing is changed yet")

    def _command(self) -> tuple[dict[str, Any] | None, str]:
        return command_of({field.id or "": field.value for field in self.query(Input)})


def settings_for(snapshot: Snapshot) -> list[Setting]:
    """The settings that this run has: without a scaler only learning rate and clipping."""
    scaler = snapshot.status.scaler
    return [
        setting
        for setting in SETTINGS
        if setting.name != "clip_z" or snapshot.status.clip_norm == "auto"
        if not setting.scaler or (scaler is not None and (not setting.own or setting.name in scaler))
    ]


def command_of(fields: dict[str, str]) -> tuple[dict[str, Any] | None, str]:
    """The command for what was typed, or None with what is wrong with it; empty fields stay as they are."""
    given = {name: value.strip().replace(",", "") for name, value in fields.items() if name and value.strip()}
    if not given:
        return None, ""
    try:
        return validate({"name": "set", **given}), ""
    except CommandError as error:
        return None, str(error)
