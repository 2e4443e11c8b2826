"""What all full screens share: the two first lines and the keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from textual.screen import Screen

from fp8console.console.glyphs import Glyphs
from fp8console.console.lines import ROLES
from fp8console.console.snapshot import Snapshot
from fp8console.console.widgets.headline import Headline
from fp8console.console.widgets.keyline import KeyLine

if TYPE_CHECKING:
    from fp8console.console.app import ConsoleApp


class RunScreen(Screen[None]):
    """A full screen that shows a run; ``show`` is called with every new snapshot.

    The roles' colours are component classes of the screen, not of each panel: Textual applies the stylesheet to every
    component of every widget, which with twenty roles in eight panels is what a first paint would spend its time on.
    """

    COMPONENT_CLASSES = {f"role--{role}" for role in ROLES}

    @property
    def console_app(self) -> ConsoleApp:
        """The app, by its own type."""
        return cast("ConsoleApp", self.app)

    @property
    def glyphs(self) -> Glyphs:
        """The characters to draw with."""
        return self.console_app.glyphs

    @property
    def whole(self) -> bool:
        """Whether all widgets are there: not yet while it is built, no longer while it is taken down."""
        return self.is_attached and bool(self.query(KeyLine))

    def show(self, snapshot: Snapshot) -> None:
        """Bring the screen up to date."""
        for headline in self.query(Headline):
            headline.show(snapshot)

    def tell(self, answer: tuple[str, str] | None) -> None:
        """Show what became of a command on the second line."""
        for headline in self.query(Headline):
            headline.tell(answer)

    def on_mount(self) -> None:
        if self.console_app.snapshot is not None:
            self.show(self.console_app.snapshot)
