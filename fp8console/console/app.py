"""The console: an app of screens and keys over one run directory."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from textual.app import App, SystemCommand
from textual.binding import Binding
from textual.message import Message
from textual.screen import Screen

from fp8console.console import themes
from fp8console.console.glyphs import choose
from fp8console.console.screens.base import RunScreen
from fp8console.console.screens.main import MainScreen
from fp8console.console.snapshot import Reader, Snapshot
from fp8console.console.steering import Steering, is_held

#: Seconds without a snapshot after which the screen says that it is old.
SILENCE = 3.0


class SnapshotReady(Message):
    """A new snapshot, or why there is none. A newer one takes the place of one that still waits."""

    def __init__(self, answer: Snapshot | Exception) -> None:
        super().__init__()
        self.answer = answer

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, SnapshotReady)


class ConsoleApp(App[str]):
    """Shows a run and steers it. Its result says how it was left."""

    CSS_PATH = "console.tcss"
    TITLE = "fp8console"
    ENABLE_COMMAND_PALETTE = True
    BINDINGS = [
        Binding("space", "pause", "pause, or go on"),
        Binding("n", "one_step", "one step while paused"),
        Binding("c", "checkpoint", "checkpoint to disk now"),
        Binding("r", "roll_back", "roll back to a restore point"),
        Binding("plus,equals_sign", "scale('x2')", "loss scale x2", key_display="+"),
        Binding("minus", "scale('/2')", "loss scale /2", key_display="-"),
        Binding("t", "retune", "retune scaler, learning rate, clipping"),
        Binding("a", "alerts", "alerts and other incidents"),
        Binding("g", "gpus", "all GPUs"),
        Binding("o", "output", "all output"),
        Binding("question_mark,f1", "help", "help", key_display="?"),
        Binding("d", "detach", "detach: the training goes on"),
        Binding("q,ctrl+q", "leave", "quit: detach, stop or kill"),
    ]

    def __init__(
        self,
        run_dir: Path,
        theme: str = themes.DEFAULT,
        refresh_hz: float = 5.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        no_colour = bool(os.environ.get("NO_COLOR"))
        super().__init__(ansi_color=True if no_colour else None)
        self.run_dir = run_dir
        self.glyphs = choose(os.environ)
        self.snapshot: Snapshot | None = None
        self._refresh_hz = refresh_hz
        self._reader = Reader(run_dir, self._deliver, clock)
        self._steering = Steering(self)
        self._silent = 0
        self._troubled = False
        found, self._theme_problems = themes.load_all([themes.own_folder(), themes.user_folder()])
        for known in found:
            self.register_theme(known)
        wanted = "sixteen" if no_colour else theme
        if wanted in self.available_themes:
            self.theme = wanted
        else:
            self._theme_problems.append(f"no theme {wanted!r}; known: {', '.join(sorted(t.name for t in found))}")
            self.theme = themes.DEFAULT if themes.DEFAULT in self.available_themes else "textual-dark"

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return themes.variable_defaults(self.current_theme)

    def get_default_screen(self) -> Screen[None]:
        return MainScreen(self.glyphs)

    def on_mount(self) -> None:
        # After the first paint: the reader imports numpy, which would hold it up.
        self.call_after_refresh(self._start_reading)
        # Told to end, the console puts the terminal back as it was; the training goes on.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.exit, "detached")
        if self._theme_problems:
            self.notify("\n".join(self._theme_problems), title="themes", severity="warning", markup=False)

    def on_unmount(self) -> None:
        self._reader.stop()

    def _start_reading(self) -> None:
        self._reader.start()
        self._reader.request()
        self.set_interval(1 / self._refresh_hz, self._tick)

    # Snapshots ------------------------------------------------------------------------------------------------------

    def request(self, output_lines: int | None = None) -> None:
        """Ask for a new snapshot at once; from now on with so many lines of output."""
        if output_lines is not None:
            self._reader.output_lines = output_lines
        self._reader.request()

    def want_utilisation(self, wanted: tuple[float | None, int] | None) -> None:
        """From now on have the cards' utilisation in the snapshots: seconds a column (None: all the run), columns."""
        if wanted != self._reader.utilisation:
            self._reader.utilisation = wanted
            self._reader.request()

    def _deliver(self, answer: Snapshot | Exception) -> None:
        self.post_message(SnapshotReady(answer))

    def _tick(self) -> None:
        self._reader.request()
        self._silent += 1
        seconds = self._silent / self._refresh_hz
        if seconds > SILENCE:
            self._troubled = True
            self.tell((f"the run directory has not answered for {seconds:.0f} s: what is shown is old", "alarm"))

    def on_snapshot_ready(self, message: SnapshotReady) -> None:
        if isinstance(message.answer, Exception):
            self._troubled = True
            self.tell((f"can't read the run: {message.answer}: {self.run_dir}", "alarm"))
            return
        if self._troubled:
            self._troubled = False
            self.tell(None)
        self._silent = 0
        self.snapshot = message.answer
        for screen in self.screen_stack:
            if isinstance(screen, RunScreen) and screen.whole:
                screen.show(message.answer)
        if self._steering.leaving and message.answer.ended:
            self.exit(self._steering.leaving)

    def tell(self, answer: tuple[str, str] | None) -> None:
        """Put (text, role) on the second line of every screen, or give it back."""
        for screen in self.screen_stack:
            if isinstance(screen, RunScreen) and screen.whole:
                screen.tell(answer)

    # Commands -------------------------------------------------------------------------------------------------------

    def give(self, command: dict[str, Any], leaving: str | None = None) -> None:
        """Give a command to the supervisor; what becomes of it is told as it happens. Never blocks."""
        self._steering.give(command, leaving)

    def action_pause(self) -> None:
        """Pause a running training, or let a paused one go on."""
        self.give({"name": "resume" if self.snapshot is not None and is_held(self.snapshot) else "pause"})

    def action_one_step(self) -> None:
        """Let a paused training take one step."""
        self.give({"name": "step", "count": 1})

    def action_checkpoint(self) -> None:
        """Write a checkpoint at the next step."""
        self.give({"name": "checkpoint"})

    def action_scale(self, change: str) -> None:
        """Multiply or divide the loss scale."""
        self.give({"name": "set", "scale": change})

    # Screens: imported when they are first wanted, because their widgets would delay the first paint ------------------

    def action_roll_back(self) -> None:
        """Open the drawer of restore points."""
        from fp8console.console.screens.rollback import RollBackScreen

        if self.snapshot is not None:
            self.push_screen(RollBackScreen(self.snapshot, self.glyphs), self._dialog_done)

    def action_retune(self) -> None:
        """Open the form of settings."""
        from fp8console.console.screens.retune import RetuneScreen

        if self.snapshot is not None:
            self.push_screen(RetuneScreen(self.snapshot, self.glyphs), self._dialog_done)

    def _dialog_done(self, command: dict[str, Any] | None) -> None:
        if command is not None:
            self.give(command)

    def action_output(self) -> None:
        """Show the output, scrollable."""
        from fp8console.console.screens.output import OutputScreen

        self._open(OutputScreen())

    def action_gpus(self) -> None:
        """Show every GPU with all that is known of it."""
        from fp8console.console.screens.gpus import GpusScreen

        self._open(GpusScreen())

    def action_alerts(self) -> None:
        """Show the incidents of the run."""
        from fp8console.console.screens.alerts import AlertsScreen

        self._open(AlertsScreen())

    def action_help(self) -> None:
        """Show what the screen means and what the keys do."""
        from fp8console.console.screens.help import HelpScreen

        self._open(HelpScreen())

    def _open(self, screen: RunScreen) -> None:
        """Put a screen over the main one; the same key again closes it."""
        same = type(self.screen) is type(screen)
        while len(self.screen_stack) > 1:
            self.pop_screen()
        if not same:
            self.push_screen(screen)

    # Leaving --------------------------------------------------------------------------------------------------------

    def action_detach(self) -> None:
        """Leave; the training goes on."""
        self.exit("ended" if self._is_over() else "detached")

    async def action_leave(self) -> None:
        """Ask how to leave, unless the training is over."""
        if self._is_over():
            self.exit("ended")
            return
        from fp8console.console.screens.quit import QuitScreen

        if not isinstance(self.screen, QuitScreen):
            self.push_screen(QuitScreen(self.snapshot), self._leave_by)

    def _leave_by(self, way: str | None) -> None:
        if way == "detach":
            self.action_detach()
        elif way in ("stop", "kill"):
            self.give({"name": way}, leaving="stopped" if way == "stop" else "killed")

    def _is_over(self) -> bool:
        return self.snapshot is not None and self.snapshot.ended

    # Command palette ------------------------------------------------------------------------------------------------

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        bindings = [*self.BINDINGS, *(MainScreen.BINDINGS if isinstance(screen, MainScreen) else ())]
        for binding in bindings:
            if isinstance(binding, Binding):
                shown = binding.key_display or binding.key.partition(",")[0]
                words = binding.description[:1].upper() + binding.description[1:]
                yield SystemCommand(words, f"key: {shown}", partial(self._perform, screen, binding.action))
        yield SystemCommand("Theme", "Change the colours", self.action_change_theme)

    def _perform(self, screen: Screen[Any], action: str) -> None:
        self.run_worker(screen.run_action(action))


def run_console(run_dir: Path, *, theme: str = themes.DEFAULT, refresh_hz: float = 5.0) -> str:
    """Show the run until the operator leaves. Returns "detached", "stopped", "killed" or "ended".

    Raises SystemExit, with one line, when the console itself failed; Textual has then printed why.
    """
    # Inherited as ignored (nohup), a hang-up would leave the console spinning on a terminal that is gone.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    app = ConsoleApp(run_dir, theme, refresh_hz)
    left = app.run()
    if app.return_code:
        raise SystemExit("the console failed; the training goes on, see: fp8console attach")
    return left or "detached"
