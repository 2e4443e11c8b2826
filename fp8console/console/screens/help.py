"""Help: what the screen means, and every key."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.widgets import Static

from fp8console.console.glyphs import Glyphs
from fp8console.console.screens.base import RunScreen
from fp8console.console.widgets.headline import Headline
from fp8console.console.widgets.keyline import KeyLine


class HelpScreen(RunScreen):
    """One page of words."""

    BINDINGS = [Binding("escape", "app.pop_screen", "back", show=False)]

    def compose(self) -> ComposeResult:
        yield Headline(glyphs=self.glyphs)
        page = VerticalScroll(Static(text(self.glyphs), markup=False), classes="page")
        page.border_title = "help"
        yield page
        yield KeyLine((("esc", "back", "app.pop_screen", 0), ("^p", "all commands", "app.command_palette", 0)))


def text(glyphs: Glyphs) -> str:
    """The page."""
    g = glyphs
    return f"""\
KEYS
  space    pause at the next step; again: go on
  n        take one step while paused
  c        checkpoint to disk at the next step
  r        roll back to a restore point
  + -      loss scale {g.times}2 and {g.divided}2
  t        retune scaler, learning rate, clipping
  1 2 3    one plot alone; again: all three where there is room
  z        all steps, the last 10 %, the last 1 %
  {g.arrows}       time cursor; with shift ten columns; esc: off
  a g o    alerts and other incidents; all GPUs; all output
  d        detach: the training goes on
  q        leave: detach, stop or kill
  ctrl+p   all commands by name

GPUS (g)
  x        XCDs of no card, of the card chosen, of all
  up down  choose the card, or scroll
  z        a column stands for 1 s, 10 s, a minute, or as much as
           shows the whole run; a ? there is unknown
  Balance: lowest over highest mean busy of the run's cards over
  10 s. What bounds the step is said when the numbers say so.

MARKS
  {g.skipped}  a step that the scaler refused (gradients not finite)
  {g.alert}  a loss or gradient norm that is NaN or inf: a gap in the curve
  {g.rollback}  a rollback, {g.dotted} where; {g.dashed} the steps it abandoned, dimmed above
  {g.restore_point}  a restore point: checkpoint on disk, or snapshot in memory

CURVES
  Each dot shows the lowest and highest value of its steps: no
  spike is averaged away, and nothing is joined across a gap.
  Gradient norm: global L2, unscaled, before clipping; its axis is
  logarithmic where the range asks. Loss scale: as a power of two.
  Step numbers count attempts of the optimizer and never go back.

STEERING
  Every command is "asked", then "applied at step N", or not applied
  and why: the second line says so. A rollback puts back parameters,
  buffers, optimizers, scaler, schedulers and random state and
  verifies them by digest. The script's own counters and its data do
  not go back: it goes on with new batches.
  This console can be closed at any time, or die: the training does
  not notice. Come back with: fp8console attach
"""
