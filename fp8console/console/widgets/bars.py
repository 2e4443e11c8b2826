"""Bars of eighth blocks, or of '#' where those don't arrive."""

from __future__ import annotations

from fp8console.console.glyphs import Glyphs
from fp8console.console.lines import Line


def bar(share: float, width: int, glyphs: Glyphs) -> Line:
    """A bar of ``width`` cells filled to ``share`` (0 to 1, beyond is cut)."""
    share = min(1.0, max(0.0, share))
    parts = len(glyphs.blocks)
    eighths = round(share * width * parts)
    whole, rest = divmod(eighths, parts)
    filled = glyphs.blocks[-1] * whole + (glyphs.blocks[rest - 1] if rest else "")
    return [(filled, "bar"), (glyphs.bar_rest * (width - len(filled)), "bar-rest")]
