"""All that is kept of the output, scrollable; it follows the end until scrolled away from it."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.binding import Binding
from textual.widgets import Log

from fp8console.console.lines import clean
from fp8console.console.screens.base import RunScreen
from fp8console.console.snapshot import OUTPUT_LINES, OUTPUT_LINES_MOST, Snapshot
from fp8console.console.widgets.headline import Headline
from fp8console.console.widgets.keyline import KeyLine


class OutputScreen(RunScreen):
    """The last lines that the training printed."""

    BINDINGS = [Binding("escape", "app.pop_screen", "back", show=False)]

    def __init__(self) -> None:
        super().__init__()
        self._shown: tuple[str, ...] = ()

    def compose(self) -> ComposeResult:
        yield Headline(glyphs=self.glyphs)
        log = Log(highlight=False, classes="page")
        log.border_title = "output"
        yield log
        yield KeyLine((("esc", "back", "app.pop_screen", 0), ("↑↓ pgup pgdn home end", "scroll", "app.output", 1)))

    def on_mount(self) -> None:
        super().on_mount()
        self.console_app.request(OUTPUT_LINES_MOST)
        self.query_one(Log).focus()

    def on_unmount(self) -> None:
        self.console_app.request(OUTPUT_LINES)

    def show(self, snapshot: Snapshot) -> None:
        super().show(snapshot)
        if snapshot.output_limit < OUTPUT_LINES_MOST or snapshot.output == self._shown:
            return
        log = self.query_one(Log)
        log.border_subtitle = f"the last {len(snapshot.output):,} lines of output.log"
        new = continuation(self._shown, snapshot.output)
        if new is None:
            log.clear()
            new = list(snapshot.output)
        self._shown = snapshot.output
        at_end = log.is_vertical_scroll_end or log.line_count <= 1
        log.write_lines([clean(line) for line in new], scroll_end=at_end)


def continuation(before: tuple[str, ...], now: tuple[str, ...]) -> list[str] | None:
    """The lines of ``now`` that follow ``before``, when all of ``before``'s last lines are still there; else None."""
    if not before:
        return list(now)
    last = before[-1]
    for index in range(len(now) - 1, -1, -1):
        if now[index] == last:
            length = min(index + 1, len(before))
            if now[index + 1 - length : index + 1] == before[-length:]:
                return list(now[index + 1 :])
    return None
