"""The characters the screen is drawn with: Unicode, or plain ASCII where the locale can't carry more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Glyphs:
    """One set of characters; every character is one cell wide."""

    braille: bool = True
    horizontal: str = "─"
    vertical: str = "│"
    top_left: str = "┌"
    top_right: str = "┐"
    bottom_left: str = "└"
    bottom_right: str = "┘"
    tee_left: str = "├"
    tee_right: str = "┤"
    dotted: str = "┆"
    dashed: str = "┄"
    running: str = "●"
    starting: str = "○"
    paused: str = "⏸"
    stopping: str = "◌"
    ended: str = "■"
    failed: str = "✗"
    lost: str = "?"
    skipped: str = "×"
    alert: str = "!"
    rollback: str = "◂"
    restore_point: str = "◆"
    resumed: str = "▸"
    check: str = "✓"
    asked: str = "…"
    up: str = "▲"
    down: str = "▼"
    level: str = "→"
    point: str = "·"
    blocks: str = "▏▎▍▌▋▊▉█"
    bar_rest: str = "░"
    heat: str = "▁▂▃▄▅▆▇█"
    ellipsis: str = "…"
    arrows: str = "←→"
    times: str = "×"
    divided: str = "÷"
    degree: str = "°"


UNICODE = Glyphs()
ASCII = Glyphs(
    braille=False,
    horizontal="-",
    vertical="|",
    top_left="+",
    top_right="+",
    bottom_left="+",
    bottom_right="+",
    tee_left="+",
    tee_right="+",
    dotted=":",
    dashed="-",
    running="*",
    starting="o",
    paused="=",
    stopping="~",
    ended="#",
    failed="X",
    lost="?",
    skipped="x",
    alert="!",
    rollback="<",
    restore_point="o",
    resumed=">",
    check="v",
    asked="~",
    up="^",
    down="v",
    level="-",
    point="-",
    blocks="#",
    bar_rest=".",
    heat=".:-=+*#%@",
    ellipsis="~",
    arrows="<>",
    times="x",
    divided="/",
    degree="",
)


def choose(environ: Mapping[str, str]) -> Glyphs:
    """The set that this environment's locale can carry: by LC_ALL, LC_CTYPE, LANG, the first that is set.

    With none set the locale is POSIX's. Python itself then puts LC_CTYPE=C.UTF-8 into its environment (PEP 538), which
    says nothing about the terminal: an LC_CTYPE that disagrees with an explicit LANG=C is taken for that.
    """
    for name in ("LC_ALL", "LC_CTYPE", "LANG"):
        value = environ.get(name, "")
        if not value:
            continue
        if name == "LC_CTYPE" and value in ("C.UTF-8", "C.utf8", "UTF-8") and environ.get("LANG") in ("C", "POSIX"):
            return ASCII
        return UNICODE if "utf8" in value.lower().replace("-", "") else ASCII
    return ASCII
