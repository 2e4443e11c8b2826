"""The main screen: three curves over one step axis, beside them GPUs, host, events and output."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Container, Vertical
from textual.events import Resize

from fp8console.console.glyphs import Glyphs
from fp8console.console.headlines import no_step_words
from fp8console.console.screens.base import RunScreen
from fp8console.console.snapshot import Snapshot
from fp8console.console.widgets.events import Events
from fp8console.console.widgets.gpus import Gpus, gpus_of
from fp8console.console.widgets.headline import Headline
from fp8console.console.widgets.host import Host
from fp8console.console.widgets.keyline import Key, KeyLine
from fp8console.console.widgets.output import Output
from fp8console.console.widgets.plot import GUTTER, LOSS, NORM, SCALE, Plot, Role, View
from fp8console.console.widgets.stability import Stability

#: From this width on plots and panels stand side by side, and from this height on all three plots are shown.
WIDE, TALL = 112, 40
SHARES = (1.0, 0.1, 0.01)


class MainScreen(RunScreen):
    """Loss, gradient norm and loss scale over the same steps; one of them alone where there is little room."""

    BINDINGS = [
        Binding("1", "plot(0)", "loss", show=False),
        Binding("2", "plot(1)", "gradient norm", show=False),
        Binding("3", "plot(2)", "loss scale", show=False),
        Binding("z", "zoom", "zoom: all, last 10 %, last 1 % of steps", show=False),
        Binding("left", "earlier(1)", "time cursor to earlier steps", show=False),
        Binding("right", "later(1)", "time cursor to later steps", show=False),
        Binding("shift+left", "earlier(10)", "time cursor ten columns back", show=False),
        Binding("shift+right", "later(10)", "time cursor ten columns on", show=False),
        Binding("escape", "cursor_off", "no time cursor", show=False),
    ]

    def __init__(self, glyphs: Glyphs) -> None:
        super().__init__()
        named = (("loss", LOSS), ("norm", NORM), ("scale", SCALE))
        self._plots = [Plot(series, id=name, glyphs=glyphs) for name, series in named]
        self._gpus = Gpus(id="gpus", glyphs=glyphs)
        self._host = Host(id="host", glyphs=glyphs)
        self._stability = Stability(id="stability", glyphs=glyphs)
        self._events = Events(id="events", glyphs=glyphs)
        self._output = Output(id="output", glyphs=glyphs)
        self._keys = KeyLine(keys(glyphs.arrows, ended=False))
        self._view = View()
        self._alone: int | None = None
        self._stacked = False

    def compose(self) -> ComposeResult:
        yield Headline(id="headline", glyphs=self.glyphs)
        with Container(id="body"):
            with Vertical(id="plots"):
                yield from self._plots
            with Vertical(id="side"):
                yield from (self._gpus, self._host, self._stability, self._events, self._output)
        yield self._keys

    def on_mount(self) -> None:
        self._arrange()
        super().on_mount()

    def on_resize(self, event: Resize) -> None:
        self._arrange()

    def show(self, snapshot: Snapshot) -> None:
        super().show(snapshot)
        self._arrange_side(snapshot)
        words = no_step_words(snapshot) if not snapshot.count else ()
        for plot in self._plots:
            plot.empty = words if plot.role.first else ()
            if plot.display:
                plot.show(snapshot)
        for panel in (self._gpus, self._host, self._stability, self._events, self._output):
            if panel.display:
                panel.show(snapshot)
        self._keys.show_keys(keys(self.glyphs.arrows, snapshot.ended))

    def _arrange(self) -> None:
        """Places for what the size of the screen has room for."""
        if not self.whole:
            return
        width, height = self.app.size
        self._stacked = width < WIDE
        self.query_one("#body").set_class(self._stacked, "stacked")
        plots = self._plots
        single = self._stacked and height < TALL
        alone = self._alone if self._alone is not None else (0 if single else None)
        shown = [plot for index, plot in enumerate(plots) if alone is None or index == alone]
        others = tuple(plot.series for plot in plots if plot not in shown)
        for plot in plots:
            plot.display = plot in shown
            plot.place(
                Role(
                    first=plot is shown[0],
                    axis=plot is shown[-1],
                    bottom=plot is shown[-1] and not self._stacked,
                    rug=plot is shown[0],
                    others=others,
                )
            )
        if (snapshot := self.console_app.snapshot) is not None and self.whole:
            self._arrange_side(snapshot)
            self.call_after_refresh(self._redraw)

    def _redraw(self) -> None:
        if self.console_app.snapshot is not None and self.whole:
            self.show(self.console_app.snapshot)

    def _arrange_side(self, snapshot: Snapshot) -> None:
        """Heights that depend on what there is: GPUs, and in the end the output in the events' place."""
        height = self.app.size.height
        gpus, host, events, output = self._gpus, self._host, self._events, self._output
        stability = self._stability
        ended = snapshot.ended
        there = bool(gpus_of(snapshot.status.hardware))
        gpus.first = not self._stacked
        host.compact = stability.compact = self._stacked
        if self._stacked:
            gpus.most, gpus.summary = (3, False) if height < TALL else (8, True)
            gpus.display = there and height >= 20
            host.display = height >= 18
            stability.display = height >= 24
            events.display = not ended
            output.display = ended or height >= TALL
            rows = 4 if height < TALL else 8
            events.styles.height = rows + int(not output.display)
            output.styles.height = (8 if height < TALL else 12) if ended else 7
        else:
            gpus.most, gpus.summary = max(1, height - 30), height >= 32
            gpus.display = host.display = stability.display = True
            events.display = not ended
            output.display = True
            events.styles.height, output.styles.height = "3fr", "2fr"
        events.last = not output.display
        gpus.styles.height = gpus.height_wanted(snapshot)
        stability.styles.height = 2 if self._stacked else 3
        host.styles.height = 1 + (1 if self._stacked and there else 2)

    def action_plot(self, index: int) -> None:
        """Show one plot alone; the same key again shows all where there is room."""
        self._alone = None if self._alone == index else index
        self._arrange()

    def action_zoom(self) -> None:
        """Show the next share of the newest steps."""
        share = SHARES[(SHARES.index(self._view.share) + 1) % len(SHARES)]
        self._look(View(share, self._view.cursor))

    def action_earlier(self, columns: int) -> None:
        """Move the time cursor back by columns of the plots."""
        self._move(-columns)

    def action_later(self, columns: int) -> None:
        """Move the time cursor on by columns of the plots; beyond the newest step it goes."""
        self._move(columns)

    def _move(self, columns: int) -> None:
        from fp8console.console.widgets.envelope import window

        snapshot = self.console_app.snapshot
        if snapshot is None or not snapshot.count:
            return
        newest = snapshot.count - 1
        shown = window(snapshot.count, self._view.share, snapshot.ended)
        cells = max(1, next(plot.size.width for plot in self._plots if plot.display) - GUTTER - 3)
        by = max(1, shown.length // cells) * columns
        place = (newest if self._view.cursor is None else self._view.cursor) + by
        cursor = None if place > newest else max(shown.start, place)
        self._look(View(self._view.share, cursor))

    def action_cursor_off(self) -> None:
        """Take the time cursor away."""
        self._look(View(self._view.share, None))

    def _look(self, view: View) -> None:
        self._view = view
        for plot in self._plots:
            plot.view = view
            if plot.display:
                plot.redraw()


def keys(arrows: str, ended: bool) -> tuple[Key, ...]:
    """The keys of the last line; of an ended run only those that still do something."""
    steering: tuple[Key, ...] = (
        ("space", "pause", "app.pause", 0),
        ("n", "one step", "app.one_step", 8),
        ("c", "checkpoint", "app.checkpoint", 3),
        ("r", "roll back", "app.roll_back", 1),
        ("+ -", "scale", "app.scale('x2')", 4),
        ("t", "retune", "app.retune", 2),
    )
    looking: tuple[Key, ...] = (
        ("a", "alerts", "app.alerts", 7),
        ("g", "GPUs", "app.gpus", 9),
        ("o", "output", "app.output", 5),
        ("1 2 3", "plots", "screen.plot(0)", 10),
        ("z", "zoom", "screen.zoom", 11),
        (arrows, "cursor", "screen.earlier(1)", 12),
        ("?", "help", "app.help", 0),
        ("d", "detach", "app.detach", 6),
        ("q", "quit", "app.leave", 0),
    )
    return looking if ended else steering + looking
