"""The last line: the keys that work here, each of them a place to click."""

from __future__ import annotations

from rich.cells import cell_len
from rich.segment import Segment
from textual.events import Click
from textual.strip import Strip
from textual.widget import Widget

#: Key as shown, words, action, and how soon it is left out of a narrow line (0: never).
Key = tuple[str, str, str, int]

GAP = 2


class KeyLine(Widget):
    """Keys with their words, the least important left out until the line fits."""

    COMPONENT_CLASSES = {"keyline--key", "keyline--words"}

    def __init__(self, keys: tuple[Key, ...]) -> None:
        super().__init__()
        self._keys = keys

    def show_keys(self, keys: tuple[Key, ...]) -> None:
        """Show other keys."""
        if keys != self._keys:
            self._keys = keys
            self.refresh()

    def render_line(self, y: int) -> Strip:
        key_style = self.get_component_rich_style("keyline--key")
        words_style = self.get_component_rich_style("keyline--words")
        segments = [Segment(" ", words_style)]
        for key, words, _, _ in fitting(self._keys, self.size.width - 1):
            segments += [Segment(key, key_style), Segment(f" {words}" + " " * GAP, words_style)]
        return Strip(segments).adjust_cell_length(self.size.width, words_style)

    async def _on_click(self, event: Click) -> None:
        place = 1
        for key, words, action, _ in fitting(self._keys, self.size.width - 1):
            end = place + cell_len(key) + 1 + cell_len(words)
            if place <= event.x < end:
                await self.run_action(action)
                return
            place = end + GAP


def fitting(keys: tuple[Key, ...], width: int) -> list[Key]:
    """The keys that fit into ``width`` cells, in their order."""
    kept = list(keys)
    while kept and sum(cell_len(key) + cell_len(words) + 1 + GAP for key, words, _, _ in kept) - GAP > width:
        least = max(kept, key=lambda entry: entry[3])
        if least[3] == 0:
            break
        kept.remove(least)
    return kept
