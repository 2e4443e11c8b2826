"""Numbers and durations as they read on the screen. Unknown is None in and "unknown" or a dash out, never 0."""

from __future__ import annotations

import math

UNKNOWN = "unknown"


def short_number(value: float | None, spread: float | None = None) -> str:
    """About four significant digits; NaN and inf by name. With ``spread`` only as many as tell labels apart."""
    if value is None:
        return UNKNOWN
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if spread is not None and spread > 0:
        if abs(value) < spread * 1e-9:
            return "0"
        digits = max(0, 1 - math.floor(math.log10(spread)))
        if digits <= 4 and abs(value) < 1e6:
            return f"{value:,.{digits}f}"
        return f"{value:.2g}"
    size = abs(value)
    if size == 0:
        return "0"
    if 1e-3 <= size < 1e6:
        return f"{value:,.{max(0, 3 - math.floor(math.log10(size)))}f}" if size < 1e4 else f"{value:,.0f}"
    return f"{value:.3g}"


def scale_text(value: float | None) -> str:
    """A loss scale as a power of two: "2^12", "2^11.7"."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value) or value <= 0:
        return short_number(value)
    exponent = math.log2(value)
    return f"2^{round(exponent)}" if exponent == round(exponent) else f"2^{exponent:.1f}"


def count_text(value: int | None) -> str:
    """A whole number with thousands separators."""
    return UNKNOWN if value is None else f"{value:,}"


def plural(value: int, one: str, many: str | None = None) -> str:
    """ "1 skip", "2 skips"."""
    return f"{value:,} {one if value == 1 else many or one + 's'}"


def clock_text(seconds: float | None) -> str:
    """A short duration: "0:42", "1:02:03"."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    whole = max(0, int(seconds))
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def left_text(seconds: float | None) -> str:
    """A long duration, in hours and minutes: "0h 48m", "3d 4h"; with seconds under ten minutes."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    whole = max(0, int(seconds))
    if whole < 600:
        return clock_text(seconds)
    if whole >= 48 * 3600:
        return f"{whole // 86400}d {whole % 86400 // 3600}h"
    return f"{whole // 3600}h {whole % 3600 // 60:02}m"


def step_time_text(seconds: float | None) -> str:
    """The duration of a step, in the unit that reads best."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds >= 10:
        return f"{seconds:.1f} s"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    milliseconds = seconds * 1000
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.2g} ms"


def rate_text(per_second: float | None) -> str:
    """Steps a second: "24.4/s", or steps a minute when slow."""
    if per_second is None or not math.isfinite(per_second):
        return UNKNOWN
    if per_second >= 100:
        return f"{per_second:,.0f}/s"
    if per_second >= 0.1 or per_second == 0:
        return f"{per_second:.1f}/s"
    return f"{per_second * 60:.1f}/min"


def bytes_text(size: float | None) -> str:
    """A size in GB or below, powers of 1,000 as drives and GPU memory are sold by."""
    if size is None:
        return UNKNOWN
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            amount = size / factor
            return f"{amount:.0f} {unit}" if amount >= 100 else f"{amount:.1f} {unit}"
    return f"{size:.0f} B"


def of_text(used: float | None, total: float | None) -> str:
    """ "112/192 GB": both in the unit of the total."""
    if used is None or total is None:
        return UNKNOWN
    factor, unit = (1e9, "GB") if total >= 1e10 else (1e6, "MB")
    return f"{used / factor:.0f}/{total / factor:.0f} {unit}"


def percent_text(share: float | None) -> str:
    """A share of 1 as a percentage, with a digit behind the point when small."""
    if share is None or not math.isfinite(share):
        return UNKNOWN
    return f"{share * 100:.0f}%" if share >= 0.095 or share == 0 else f"{share * 100:.1f}%"


def one_line(text: object, width: int | None = None) -> str:
    """The text without line breaks and control characters, cut to ``width`` with an ellipsis."""
    clean = "".join(character if character.isprintable() else " " for character in str(text)).strip()
    return clean if width is None or len(clean) <= width else clean[: max(0, width - 1)] + "…"
