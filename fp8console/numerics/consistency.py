"""Is this device's FP8 right? All checks of its casts and products, run in the training's own Python.

The entry ``main`` writes JSON lines: first ``{"machine": ...}``, then before each check ``{"begin": ...}`` and after it
``{"check": ...}``: so whoever reads knows which check a library crashed or hung in.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TextIO

import torch

from fp8console.numerics import product_checks
from fp8console.numerics.cast_checks import Check, check_casts, torch_casts
from fp8console.numerics.devices import accumulation_roundoff, architecture, hardware_formats
from fp8console.numerics.formats import FORMATS, Fp8Format, UnknownFormat, format_of
from fp8console.numerics.product_checks import Products, check_products

#: (group, name of the check, what to call).
Plan = Iterator[tuple[str, str, Callable[[], Check]]]


def formats_to_check(arch: str, wanted: list[Fp8Format]) -> list[Fp8Format]:
    """The formats asked for, else those that the device has in hardware, else all four, which are cast in software."""
    return wanted or list(hardware_formats(arch)) or list(FORMATS)


def choose_products(device: torch.device, arch: str, fmt: Fp8Format) -> tuple[Products, str | None]:
    """What multiplies in this format on this device, and why it is emulated where it is."""
    real = product_checks.scaled_mm(device, accumulation_roundoff(arch))
    if fmt in hardware_formats(arch):
        return real, None  # a refusal is then a failure of its own
    if device.type == "cpu" and product_checks.refusal(real, fmt) is None:
        return real, None
    reason = product_checks.refusal(real, fmt) or f"{arch} has no hardware for it"
    return product_checks.emulated(device), reason


def plan(device: torch.device, arch: str, fmt: Fp8Format, say: Callable[[dict[str, Any]], None]) -> Plan:
    """The checks of one format in order; what multiplies is tried out when the casts are done."""
    for name, check in check_casts(torch_casts(device), fmt):
        yield "casts", name, check
    say({"begin": {"group": "products", "format": fmt.name, "name": "start"}})
    products, reason = choose_products(device, arch, fmt)
    for name, check in check_products(products, fmt):
        yield "products", name, check if reason is None else partial(_emulated, check, reason)
        reason = reason and ""  # said once


def _emulated(check: Callable[[], Check], reason: str) -> Check:
    result = check()
    why = f" (torch._scaled_mm: {reason})" if reason else ""
    return replace(result, findings=[*result.findings, f"emulated in float32{why}"])


def run(device: torch.device, formats: list[Fp8Format], say: Callable[[dict[str, Any]], None]) -> bool:
    """Run every check, telling ``say`` about each; whether all passed. A check that raises has failed."""
    arch = architecture(device)
    chosen = formats_to_check(arch, formats)
    say({"machine": machine(device, arch, chosen)})
    good = True
    for fmt in chosen:
        for group, name, check in plan(device, arch, fmt, say):
            say({"begin": {"group": group, "format": fmt.name, "name": name}})
            began = time.perf_counter()
            try:
                result = check()
            except Exception as error:
                text = f"{type(error).__name__}: {product_checks.first_sentence(error)}"
                result = Check(group, fmt.name, name, "failed", text)
            good &= result.verdict in ("passed", "skipped")
            say({"check": {**result.to_json(), "seconds": time.perf_counter() - began}})
    return good


def machine(device: torch.device, arch: str, formats: list[Fp8Format]) -> dict[str, Any]:
    """What was checked: for the report."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {
        "device": str(device),
        "name": name,
        "architecture": arch,
        "torch": torch.__version__,
        "hip": getattr(torch.version, "hip", None),
        "cuda": getattr(torch.version, "cuda", None),
        "python": ".".join(map(str, sys.version_info[:3])),
        "hardware_formats": [fmt.name for fmt in hardware_formats(arch)],
        "formats": [fmt.name for fmt in formats],
        "accumulation_roundoff": accumulation_roundoff(arch),
    }


def main(words: list[str] | None = None) -> int:
    """Entry of the process: JSON lines on stdout, everything a library prints on stderr. 0 when all passed, else 1."""
    parser = argparse.ArgumentParser(prog="consistency")
    parser.add_argument("--device", default=None)
    parser.add_argument("--format", action="append", default=[])
    given = parser.parse_args(words)
    out = _own_stdout()

    def say(line: dict[str, Any]) -> None:
        print(json.dumps(_plain(line)), file=out, flush=True)

    try:
        formats = [format_of(name) for name in given.format]
        wanted = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
        if not re.fullmatch(r"cpu|cuda(:\d+)?", wanted):
            say({"error": f"--device must be cpu, cuda or cuda:N, not {wanted!r}"})
            return 2
        device = torch.device(wanted)
        if device.type == "cuda" and not torch.cuda.is_available():
            say({"error": f"--device {given.device}: torch {torch.__version__} sees no GPU"})
            return 2
        if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
            say({"error": f"--device {given.device}: torch sees {torch.cuda.device_count()} GPUs"})
            return 2
    except (UnknownFormat, RuntimeError) as error:
        say({"error": str(error).splitlines()[0]})
        return 2
    return 0 if run(device, formats, say) else 1


def _own_stdout() -> TextIO:
    """A copy of stdout for us alone; what libraries print to descriptor 1 goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def _plain(value: Any) -> Any:
    """NaN and inf by name, as everywhere in this project's JSON."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not (float("-inf") < value < float("inf")):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    return value


if __name__ == "__main__":
    sys.exit(main())
