"""AMD GPUs through ``amd-smi`` or ``rocm-smi`` with JSON output, for machines where nothing better answers.

A command takes up to seconds, so it runs beside the sweeps and its values are as old as its last answer. The keys
change between versions and the exit status says nothing: what is looked for is a name and a unit, and a complete
table counts whatever the status.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from fp8console.hardware.gpu import (
    Gpu,
    Reading,
    Unavailable,
    address,
    degrees,
    known,
    percent,
    short_name,
    used_of,
    watts,
)

SECONDS_BETWEEN = 5.0
PATIENCE = 6.0  # with the next one less than the sampler may take for its start
LIST_PATIENCE = 3.0
ROCM_SMI = (
    *("--showuse", "--showmemuse", "--showmeminfo", "vram", "--showpower", "--showmaxpower", "--showtemp"),
    *("--showbus", "--showclocks", "--showuniqueid", "--showproductname", "--json"),
)
AMD_SMI = ("metric", "--usage", "--power", "--temperature", "--clock", "--mem-usage", "--json")
#: Patterns of flattened, lower-case keys, the better ones first.
KEYS = {
    "busy": (r"gpu use \(%\)", r"usage\.gfx_activity"),
    "memory_busy": (r"gpu memory use \(%\)", r"gpu memory read/write activity \(%\)", r"usage\.umc_activity"),
    "power_w": (
        *(r"current socket graphics package power \(w\)", r"average graphics package power \(w\)"),
        *(r".*package power.*\(w\)", r"power\.(current_)?socket_power", r"power\.average_socket_power"),
    ),
    "power_cap_w": (r"max graphics package power \(w\)", r"power\.(power_limit|max_power_limit)"),
    "temperature_c": (
        *(r"temperature \(sensor junction\) \(c\)", r"temperature\.(hotspot|junction)"),
        *(r"temperature \(sensor edge\) \(c\)", r"temperature\.edge"),
    ),
    "memory_temperature_c": (r"temperature \(sensor memory\) \(c\)", r"temperature\.(mem|memory|vram)"),
    "vram_total": (r"vram total memory \(b\)", r"mem_usage\.total_vram"),
    "vram_used": (r"vram total used memory \(b\)", r"mem_usage\.used_vram"),
    "clock_mhz": (r"clock\.gfx_?0?\.clk", r"sclk clock speed:?"),
    "memory_clock_mhz": (r"clock\.mem_?0?\.clk", r"mclk clock speed:?"),
}
RULES: dict[str, Any] = {
    "busy": percent,
    "memory_busy": percent,
    "power_w": watts,
    "power_cap_w": watts,
    "temperature_c": degrees,
    "memory_temperature_c": degrees,
}
UNITS = {"kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}


class SmiCommand:
    """One of the two commands. The first answer is waited for; later ones come when they come."""

    def __init__(self, name: str, path: str | None = None) -> None:
        """Raises Unavailable without the command or when its first answer has no GPU."""
        self.name = name
        found = path or shutil.which(name) or shutil.which(f"/opt/rocm/bin/{name}")
        if found is None:
            raise Unavailable(f"{name}: no such command")
        self._command = [found, *(AMD_SMI if name == "amd-smi" else ROCM_SMI)]
        self._running: tuple[subprocess.Popen[bytes], IO[bytes], float] | None = None
        self._answer: dict[str, dict[str, Any]] = {}
        self._answered = 0.0
        self._problem: str | None = None
        self._ask()
        while self._running is not None:
            time.sleep(0.02)
            self._poll()
        if not self._answer:
            raise Unavailable(f"{name}: {self._problem}")
        buses = _buses(found) if name == "amd-smi" else {}
        self._gpus = [self._about(key, {**buses.get(key, {}), **about}) for key, about in self._answer.items()]

    def gpus(self) -> list[Gpu]:
        return self._gpus

    def close(self) -> None:
        if self._running is not None:
            process, file, _ = self._running
            process.kill()
            process.wait()
            file.close()
            self._running = None

    def read(self, key: str, slow: bool, pids: frozenset[int]) -> Reading:
        """The last answer's values of a GPU, with its age. Raises Unavailable when it is too old."""
        self._poll()
        if self._running is None and time.monotonic() - self._answered >= SECONDS_BETWEEN:
            self._ask()
        age = time.monotonic() - self._answered
        if key not in self._answer or age > PATIENCE + SECONDS_BETWEEN:
            raise Unavailable(f"{self.name}: {self._problem or f'no answer for {age:.0f} s'}")
        return Reading(values_of(self._answer[key]), age=age)

    def _ask(self) -> None:
        file = tempfile.TemporaryFile()  # noqa: SIM115 (closed when the answer is there)
        try:
            process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.DEVNULL, env=_environment()
            )
        except OSError as error:
            file.close()
            self._problem = f"could not be started: {error.strerror}"
            return
        self._running = (process, file, time.monotonic())

    def _poll(self) -> None:
        if self._running is None:
            return
        process, file, began = self._running
        if process.poll() is None:
            if time.monotonic() - began > PATIENCE:
                self.close()
                self._problem = f"no answer in {PATIENCE:g} s"
            return
        file.seek(0)
        answer = cards(file.read().decode(errors="replace"))
        file.close()
        self._running = None
        if answer:
            self._answer, self._answered, self._problem = answer, time.monotonic(), None
        else:
            self._problem = f"its answer holds no GPU (exit status {process.returncode})"

    def _about(self, key: str, about: dict[str, Any]) -> Gpu:
        unique = re.fullmatch(r"(?:0x|GPU-)?([0-9a-f]{16})", str(about.get("unique id", "")).lower())
        name = about.get("card series") or about.get("name") or "AMD GPU"
        return Gpu(
            key=key,
            name=short_name(str(name)),
            bdf=address(about.get("pci bus") or about.get("bdf")),
            uuid=f"GPU-{unique[1]}" if unique else None,
        )


def cards(text: str) -> dict[str, dict[str, Any]]:
    """Flattened values by GPU out of a command's output, whatever stands before the JSON; empty when there are none."""
    for match in re.finditer(r"^[\[{]", text, re.MULTILINE):
        try:
            data, _ = json.JSONDecoder().raw_decode(text, match.start())
        except (ValueError, RecursionError):
            continue
        if isinstance(data, dict) and isinstance(data.get("gpu_data"), list):
            data = data["gpu_data"]
        if isinstance(data, list):
            listed = [about for about in data if isinstance(about, dict)]
            data = {str(about.get("gpu", number)): about for number, about in enumerate(listed)}
        found = {
            key: _flat(about) for key, about in data.items() if isinstance(about, dict) and not key.startswith("system")
        }
        if found:
            return found
    return {}


def values_of(about: dict[str, Any]) -> dict[str, Any]:
    """The values of MEASURED that a flattened answer holds."""
    values: dict[str, Any] = {}
    for name, patterns in KEYS.items():
        values[name] = None
        for pattern in patterns:
            for key, raw in about.items():
                if re.fullmatch(pattern, key):
                    values[name] = RULES.get(name, known)(_number(raw))
                    break
            if values[name] is not None:
                break
    values["vram_total"] = values["vram_total"] or None
    values["vram_used"] = used_of(values["vram_used"], values["vram_total"])
    values["power_cap_w"] = values["power_cap_w"] or None
    return values


def _flat(about: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in about.items():
        name = f"{prefix}{str(key).lower()}"
        if isinstance(value, dict) and set(value) == {"value", "unit"}:
            found[name] = (value["value"], str(value["unit"]).lower())
        elif isinstance(value, dict):
            found.update(_flat(value, f"{name}."))
        else:
            found[name] = value
    return found


def _number(raw: Any) -> Any:
    value, unit = raw if isinstance(raw, tuple) else (raw, "")
    if isinstance(value, str):
        match = re.match(r"\(?\s*(-?\d+(?:\.\d+)?)", value)
        if match is None:
            return None
        value = float(match[1]) if "." in match[1] else int(match[1])
    return value * UNITS[unit] if unit in UNITS and isinstance(value, (int, float)) else value


def _buses(path: str) -> dict[str, dict[str, Any]]:
    """amd-smi's list of GPUs, by their numbers: its metrics have no PCI address."""
    command = [path, "list", "--json"]
    try:
        answer = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIST_PATIENCE, env=_environment()
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return cards(answer.stdout.decode(errors="replace"))


def _environment() -> dict[str, str]:
    """Without our PYTHONPATH: the commands are Python programs of another installation."""
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}


def available(name: str) -> bool:
    return shutil.which(name) is not None or Path(f"/opt/rocm/bin/{name}").exists()
