"""Utilisation over time: a row a card, or a row for each of its XCDs; a column stands for some seconds.

Height and colour say the same, so it reads in sixteen colours, in none, and in plain ASCII. What is unknown is a "?",
and where no sample was taken there is nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fp8console.console import lines
from fp8console.console.glyphs import Glyphs
from fp8console.console.lines import Line, Span
from fp8console.console.snapshot import Snapshot
from fp8console.console.widgets.gpus import gpus_of, short_name
from fp8console.console.widgets.panel import Panel
from fp8console.console.wording import clock_text
from fp8console.diagnosis.bounds import BALANCE
from fp8console.diagnosis.cards import xcd_balance

if TYPE_CHECKING:
    from fp8console.runs.utilisation import Row, Utilisation

#: Roles of the levels, from idle to busy.
LEVELS = tuple(f"heat-{level}" for level in range(5))
#: Cells before and after the map itself: the row's name and its newest figure.
LABEL, TAIL = 13, 6
#: How many cards show their XCDs.
UNFOLDED = ("cards", "card", "all")
#: Seconds a column stands for; None: as many as show the whole run.
WIDTHS: tuple[float | None, ...] = (1.0, 10.0, 60.0, None)


class HeatMap(Panel):
    """The map: cards alone, one of them with its XCDs, or all with theirs; scrolled by whole rows."""

    unfolded: str | None = None  # one of UNFOLDED; None: as there is room for
    chosen: str | None = None  # the card whose XCDs are shown, by its key
    top = 0
    whole_run = False

    @property
    def columns(self) -> int:
        """Columns that there is room for."""
        return max(1, self.size.width - 4 - LABEL - TAIL)

    def draw(self, snapshot: Snapshot, width: int, height: int) -> list[Line]:
        found, title = snapshot.utilisation, [("utilisation", "title")]
        if found is None or not found.rows:
            words = "reading" if found is None and gpus_of(snapshot.status.hardware) else ""
            return self._frame([[(words, "faint")]], width, height, title, [])
        room = height - 1
        if self.chosen is None:
            self.chosen = most_uneven(found)
        indices = shown(found, self.how_unfolded(found, room), self.chosen)
        self.top = max(0, min(self.top, len(indices) - room))
        part = indices[self.top : self.top + room]
        body = [row(found, index, width - 4, self.glyphs) for index in part]
        if len(body) + 2 <= room:
            body.append(axis(found, snapshot, width - 4, self.glyphs))
        title.append((f", {_each(found.width)}{', the whole run' if self.whole_run else ''}", "faint"))
        balance = snapshot.status.balance
        note: Line = []
        if len(indices) > room:
            note += [(f"rows {self.top + 1}-{self.top + len(part)} of {len(indices)}   ", "faint")]
        if balance is not None:
            note += [("balance ", "faint"), (f"{balance:.2f}", "warning" if balance < BALANCE else "value")]
        return self._frame(body, width, height, title, note)

    def how_unfolded(self, found: Utilisation, room: int) -> str:
        """Which XCDs have rows: as asked, else all where they have room, else one card's, else none."""
        if self.unfolded is not None:
            return self.unfolded
        fitting = (how for how in UNFOLDED[::-1] if len(shown(found, how, self.chosen)) <= room)
        return next(fitting, UNFOLDED[0])

    def fold(self) -> None:
        """Show the XCDs of no card, of one, of all, in turn."""
        found = self.snapshot.utilisation if self.snapshot is not None else None
        if found is not None:
            now = UNFOLDED.index(self.how_unfolded(found, self.size.height - 1))
            self.unfolded, self.top = UNFOLDED[(now + 1) % len(UNFOLDED)], 0
            self.redraw()

    def move(self, rows: int) -> None:
        """Choose another card to unfold, or scroll where none or all are; ``draw`` keeps it within the map."""
        found = self.snapshot.utilisation if self.snapshot is not None else None
        if found is None:
            return
        cards = [one.card for one in found.rows if one.xcd is None]
        room = self.size.height - 1
        if self.how_unfolded(found, room) == "card" and self.chosen in cards:
            place = max(0, min(len(cards) - 1, cards.index(self.chosen) + (1 if rows > 0 else -1)))
            self.chosen = cards[place]
            self.top = place if len(shown(found, "card", self.chosen)) > room else 0
        else:
            self.top = max(0, self.top + rows)
        self.redraw()

    def _frame(self, body: list[Line], width: int, height: int, title: Line, note: Line) -> list[Line]:
        inside = [[(" ", "text"), *line] for line in body]
        return lines.frame(inside, width, height, self.glyphs, title, note, False, False)


def shown(found: Utilisation, how: str, chosen: str | None) -> list[int]:
    """Which rows are drawn: the cards, and XCDs: of none ("cards"), of the chosen one ("card") or of "all"."""
    return [
        index
        for index, one in enumerate(found.rows)
        if one.xcd is None or how == "all" or (how == "card" and one.card == chosen)
    ]


def most_uneven(found: Utilisation) -> str | None:
    """The card whose XCDs lie furthest apart, relative to the busiest, by their means over the map."""
    worst: tuple[float, str | None] = (2.0, None)
    for card in dict.fromkeys(one.card for one in found.rows):
        part = found.values[[index for index, one in enumerate(found.rows) if one.card == card and one.xcd is not None]]
        means = [float(row[row == row].mean()) for row in part if (row == row).any()]
        even = xcd_balance(means)
        if even is not None and even < worst[0]:
            worst = even, card
    return worst[1] or (found.rows[0].card if found.rows else None)


def row(found: Utilisation, index: int, width: int, glyphs: Glyphs) -> Line:
    """One row: its name, its cells, its newest figure."""
    one = found.rows[index]
    room = max(1, width - LABEL - TAIL)
    values = found.values[index][-room:]
    sampled = found.sampled[-room:]
    spans: Line = [(_label(one).ljust(LABEL)[:LABEL], "faint" if one.xcd is not None else "text")]
    spans.append((" " * (room - len(values)), "text"))
    for value, there in zip(values.tolist(), sampled.tolist()):
        text, role = cell(value if there else None, glyphs)
        if spans[-1][1] == role:
            spans[-1] = (spans[-1][0] + text, role)
        else:
            spans.append((text, role))
    last = values[-1] if len(values) else float("nan")
    figure: Span = (f"{last:>4.0f}%", "value") if last == last else ("    ?", "warning")
    return [*spans, (" ", "text"), figure]


def cell(value: float | None, glyphs: Glyphs) -> Span:
    """A cell for percent busy: NaN is unknown, None that there was no sample."""
    if value is None:
        return " ", "text"
    if value != value:
        return "?", "faint"
    share = min(1.0, max(0.0, value / 100))
    mark = glyphs.heat[min(len(glyphs.heat) - 1, int(share * len(glyphs.heat)))]
    return mark, LEVELS[min(len(LEVELS) - 1, int(share * len(LEVELS)))]


def axis(found: Utilisation, snapshot: Snapshot, width: int, glyphs: Glyphs) -> Line:
    """How far back the map goes, and what its marks mean."""
    back = min(found.values.shape[1], max(1, width - LABEL - TAIL))
    scale: Line = [(" " * LABEL, "text"), ("0 ", "faint")]
    for level in range(len(glyphs.heat)):
        scale.append(cell((level + 0.5) * 100 / len(glyphs.heat), glyphs))
    scale += [(" 100%   ? unknown   ", "faint")]
    ago = f"{clock_text(back * found.width)} back"
    end = "the end" if snapshot.ended else "now"
    return lines.spread(scale, [(f"{ago} {glyphs.arrows[1]} {end}".ljust(len(ago)) + " " * TAIL, "faint")], width)


def _label(one: Row) -> str:
    if one.xcd is not None:
        return f"  XCD {one.xcd}"
    return f"{'?' if one.index is None else one.index} {short_name(one.name)[:10]}"


def _each(width: float) -> str:
    words: Any = f"{width:g} s" if width < 120 else f"{width / 60:g} min" if width < 7200 else f"{width / 3600:g} h"
    return f"{words} a column"
