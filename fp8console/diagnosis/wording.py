"""Hardware troubles in words: one line each, what and the figures that show it, and what may be done."""

from __future__ import annotations

from typing import Any

from fp8console.diagnosis.cards import Gpu, names

#: What each trouble is called in a few words.
TITLES = {
    "throttling_power": "held back by the power limit",
    "throttling_thermal": "throttled by heat",
    "throttling_hbm": "throttled by the memory's heat",
    "ecc_uncorrectable": "uncorrectable memory errors (ECC)",
    "ecc_correctable": "rising correctable memory errors (ECC)",
    "memory": "memory nearly full",
    "host_memory": "host memory nearly full",
    "disk": "little room for the run directory",
}

#: What holds a card back, in a word.
CAUSES = {"power": "power limit", "thermal": "heat", "hbm": "the memory's heat"}


def begun(what: str, gpus: list[Gpu], evidence: list[dict[str, Any]]) -> str:
    """An episode's first event: ``gpus`` are its cards (none for the host), ``evidence`` stands for each of them."""
    if what == "disk":
        free, total = evidence[0].get("run_dir_free"), evidence[0].get("run_dir_total")
        return f"{size(free)} of {size(total)} free where the run directory is: checkpoints and records may fail"
    if what == "host_memory":
        used, total = evidence[0].get("memory_used"), evidence[0].get("memory_total")
        full = percent(evidence[0].get("share"))
        return f"host memory is {full} full ({size(used)} of {size(total)}): the kernel may kill the training"
    who, many = names(gpus), len(gpus) > 1
    worst = max(evidence, key=lambda one: one.get("share") or one.get("new") or 0.0)
    of = f"GPU {worst.get('gpu')}: " if many else ""
    if what.startswith("throttling_"):
        share = ("up to " if many else "") + percent(worst.get("share"))
        return f"{who} {'are' if many else 'is'} {TITLES[what]} {share} of the time ({of}{_state(what, worst)})"
    if what == "memory":
        full = f"{percent(worst.get('share'))} full"
        sizes = f"{size(worst.get('vram_used'))} of {size(worst.get('vram_total'))}"
        return f"{who}: memory is {full} ({of}{sizes}): a larger allocation stalls or fails"
    new = int(worst.get("new") or 0)
    if what == "ecc_uncorrectable":
        errors = f"{new} new uncorrectable memory error{'' if new == 1 else 's'}"
        return f"{who}: {errors} (ECC): what it computed may be wrong; roll back to before, and have it checked"
    minutes = duration(worst.get("over_seconds"))
    return f"{who}: {new} correctable memory errors (ECC) within {minutes}: they rise; have it checked"


def over(what: str, gpus: list[Gpu], seconds: float, worst: float) -> str:
    """An episode's last event."""
    who = f"{names(gpus)}: " if gpus else ""
    if what.startswith("ecc_"):
        return f"{who}no more {TITLES[what].removeprefix('rising ')}"
    told = f"{size(worst)} free" if what == "disk" else percent(worst)
    return f"{who}{TITLES[what]}: over after {duration(seconds)}, at worst {told}"


def _state(what: str, evidence: dict[str, Any]) -> str:
    """The card's figures that belong to a cause of throttling."""
    power, cap, clock = (evidence.get(name) for name in ("power_w", "power_cap_w", "clock_mhz"))
    words = []
    if what == "throttling_power" and power is not None:
        words.append(f"{power:.0f} W" if cap is None else f"{power:.0f} of {cap:.0f} W")
    name = "memory_temperature_c" if what == "throttling_hbm" else "temperature_c"
    if what != "throttling_power" and evidence.get(name) is not None:
        words.append(f"{'memory' if what == 'throttling_hbm' else 'hottest spot'} {evidence[name]:.0f} C")
    if clock is not None:
        words.append(f"{clock:,.0f} MHz")
    return ", ".join(words) or f"over {evidence.get('over_seconds'):.0f} s"


def percent(share: float | None) -> str:
    """A share of 1 in percent."""
    return "an unknown share" if share is None else f"{100 * share:.0f}%"


def size(count: float | None) -> str:
    """Bytes in GB or TB, powers of 1,000."""
    if count is None:
        return "unknown"
    if count >= 1e12:
        return f"{count / 1e12:.1f} TB"
    return f"{count / 1e9:.1f} GB" if count < 1e10 else f"{count / 1e9:.0f} GB"


def duration(seconds: float | None) -> str:
    """Seconds, minutes or hours, whole ones."""
    if seconds is None:
        return "an unknown time"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
