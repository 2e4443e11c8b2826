"""What a sweep over the GPUs costs and how late the record is: ``python bench/sampler.py [--quick] [--json]``.

On a synthetic /sys of MI300Xs, and with the real package amdsmi over a library that is none: files in memory answer at
once, so this is the sampler's own part. A real driver's and firmware's come on top (about 5 ms for eight cards).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "hardware")]

import fake_library
from synthetic_sysfs import MI300X, build, change

from fp8console.hardware.launcher import Sampler

#: Share of one core that 8 GPUs once a second may cost.
SHARE = 0.02
#: Seconds from a change to its record: the sample in between, and the rest of the way.
DELAY = 1.0 + 0.1
TICK = os.sysconf("SC_CLK_TCK")


def figure(name: str, value: float, unit: str, budget: str, within: bool | None) -> dict[str, Any]:
    return {"name": name, "value": round(value, 4), "unit": unit, "budget": budget, "within": within}


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, without its children's."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def sweep_cost(folder: Path, source: str, cards: int, seconds: float) -> float:
    """CPU milliseconds of a sampler process for one sweep with its host figures and its line.

    Swept 20 times a second, for a clock that ticks 100 times a second; what is read only every 10 s is there as often
    as in 10 s of 1 Hz twenty times over, so its cost is in.
    """
    root = folder / f"{source}-{cards}"
    if not root.exists():
        build(root, MI300X, cards)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if source == "amdsmi":
        os.environ["PYTHONPATH"] = str(ROOT)
        environment |= fake_library.describe("amdsmi", [fake_library.mi300x(index) for index in range(cards)])
    command = [sys.executable, "-m", "fp8console.hardware.sampler", "--run-dir", str(folder), "--sysfs", str(root)]
    command += ["--source", source, "--interval", "0.05", "--pid", str(os.getpid())]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        begin, sweeps, end = None, 0, 0.0
        for line in process.stdout:
            sample = json.loads(line)
            if "reading" in sample:
                continue
            assert sample["source"] == source and len(sample["gpus"]) == cards, sample["reason"]
            if begin is None:
                begin, end = cpu_seconds(process.pid), time.monotonic() + seconds
                continue
            sweeps += 1
            if time.monotonic() > end:
                spent = cpu_seconds(process.pid) - begin
                break
        process.kill()
    return 1000 * spent / sweeps


async def delays(folder: Path, changes: int) -> list[float]:
    """Seconds from a change of a file to the sample with it in the supervisor, at one sample a second."""
    (device, *_) = build(folder / "delay", MI300X, 8)
    seen: dict[int, float] = {}
    sampler = Sampler(
        folder,
        lambda sample: seen.setdefault(
            next(iter(sample["gpus"]), {}).get("busy", -1) if sample["state"] == "ok" else -1, time.monotonic()
        ),
        sysfs=folder / "delay",
        source="sysfs",
    )
    task = asyncio.ensure_future(sampler.run())
    while not seen:
        await asyncio.sleep(0.01)
    found = []
    for number in range(changes):
        await asyncio.sleep(random.uniform(0.1, 1.1))
        began = time.monotonic()
        change(device / "gpu_busy_percent", number)
        while number not in seen:
            assert time.monotonic() < began + 10
            await asyncio.sleep(0.005)
        found.append(seen[number] - began)
    await sampler.stop()
    await task
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    seconds, rounds, changes = (3.0, 2, 8) if options.quick else (10.0, 3, 30)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        costs: dict[tuple[str, int], list[float]] = {}
        for _ in range(rounds):
            for source in ("sysfs", "amdsmi"):
                for cards in (1, 8):
                    costs.setdefault((source, cards), []).append(sweep_cost(folder, source, cards, seconds))
        late = asyncio.run(delays(folder, changes))
    figures = []
    for (source, cards), found in costs.items():
        cost = statistics.median(found)
        budget = f"{1000 * SHARE:g} ms, 2% of one core at 1 Hz" if cards == 8 else "none"
        within = cost <= 1000 * SHARE if cards == 8 else None
        figures.append(figure(f"sweep, {source}, {cards} GPU" + "s" * (cards > 1), cost, "CPU ms", budget, within))
    figures.append(figure("change to record, median", statistics.median(late), "s", "none", None))
    figures.append(figure("change to record, longest", max(late), "s", f"{DELAY:g} s", max(late) <= DELAY))
    if options.json:
        machine = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        date = time.strftime("%Y-%m-%d")
        print(
            json.dumps({"figures": figures, "machine": {**machine, "python": platform.python_version()}, "date": date})
        )
    else:
        for each in figures:
            verdict = {None: "", True: "within", False: "OVER"}[each["within"]]
            print(f"{each['name']:<32} {each['value']:>10} {each['unit']:<8} {each['budget']:<32} {verdict}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
