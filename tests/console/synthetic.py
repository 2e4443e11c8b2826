"""Run directories made up for tests: records and events through the writers of fp8console.protocol, every odd value in.

As a program: ``python tests/console/synthetic.py DIR [--steps N] [--live HZ] [--state STATE]``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import socket
import time
from pathlib import Path
from typing import Any

from fp8console.diagnosis.hardware import HardwareEpisodes
from fp8console.protocol import events, identity, numbers, paths, records

STEP_SECONDS = 0.041


class SyntheticRun:
    """Writes a run directory as a probe and a supervisor would, step by step, with a clock of its own."""

    def __init__(
        self,
        run_dir: Path,
        scaler: bool = True,
        gpus: int = 0,
        start: float | None = None,
        seed: int = 7,
        machine: str | None = None,
    ) -> None:
        self.run_dir, self.scaler, self.gpus, self.machine = run_dir, scaler, gpus, machine
        self.random = random.Random(seed)
        self.step = 0
        self.clock = time.time() if start is None else start
        self.scale = 2.0**15
        self.trajectory = 0  # steps that still count
        self.restored = False
        run_dir.mkdir(parents=True, exist_ok=True)
        me = identity.identify(os.getpid()).to_json()
        self.info: dict[str, Any] = {
            "id": run_dir.name,
            "name": "char_gpt.py",
            "command": ["python", "char_gpt.py", "--precision", "fp8-e5m2", "--steps", "20000"],
            "cwd": str(run_dir),
            "created": self.clock,
            "host": socket.gethostname(),
            "versions": {"fp8console": "0.1.0", "torch": "2.13.0"},
            "settings": {"total_steps": 20000},
            "socket": str(run_dir / "none.sock"),
            "supervisor": me,
            "training": me,
            "world_size": 1,
            "exit_status": None,
            "signal": None,
            "ended": None,
            "error": None,
        }
        self.write_info()
        self.steps = open(paths.steps_file(run_dir, 0), "wb", buffering=0)  # noqa: SIM115
        self.steps.write(records.header())
        self.probe_events = open(paths.events_file(run_dir, 0), "ab", buffering=0)  # noqa: SIM115
        self.supervisor_events = open(paths.events_file(run_dir), "ab", buffering=0)  # noqa: SIM115
        self.output = open(run_dir / paths.OUTPUT, "ab", buffering=0)  # noqa: SIM115
        self.hardware = open(run_dir / paths.HARDWARE, "ab", buffering=0)  # noqa: SIM115
        self.event("launched", "launched: python char_gpt.py", supervisor=True, pid=os.getpid())
        self.event("rank_joined", "rank 0 joined: torch 2.13.0, cpu", supervisor=True, torch="2.13.0", world_size=1)
        if scaler:
            self.event(
                "scaler",
                "GradScaler found",
                class_name="GradScaler",
                scale=self.scale,
                growth_factor=2.0,
                backoff_factor=0.5,
                growth_interval=2000,
                floor=None,
                cap=None,
            )

    def write_info(self) -> None:
        aside = self.run_dir / "run.json.tmp"
        aside.write_text(numbers.dumps(self.info))
        aside.replace(self.run_dir / paths.RUN)

    def event(self, kind: str, text: str, supervisor: bool = False, step: int | None = None, **fields: Any) -> None:
        event = events.make(kind, text, step, **fields)
        event["time"] = self.clock
        file = self.supervisor_events if supervisor else self.probe_events
        file.write(numbers.dumps(event).encode() + b"\n")

    def typical_loss(self) -> float:
        return 1.9 + 2.3 * math.exp(-self.trajectory / 500) + self.random.gauss(0, 0.03)

    def take(self, loss: float | None = None, norm: float | None = None, skipped: bool = False) -> None:
        """One step; what is not given is typical."""
        self.step += 1
        self.trajectory += 1
        duration = STEP_SECONDS * self.random.uniform(0.95, 1.08)
        self.clock += duration
        loss = self.typical_loss() if loss is None else loss
        norm = math.exp(self.random.gauss(-0.2, 0.12)) if norm is None else norm
        if skipped:
            norm = math.inf
        flags = records.FLAGS["skipped"] * skipped
        flags |= records.FLAGS["loss_nonfinite"] * (not math.isfinite(loss))
        flags |= records.FLAGS["grad_nonfinite"] * (not math.isfinite(norm))
        flags |= records.FLAGS["clipped"] * (math.isfinite(norm) and norm > 1)
        flags |= records.FLAGS["restored"] * self.restored
        self.restored = False
        values: dict[str, float | int | None] = {
            "step": self.step,
            "time": self.clock,
            "duration": duration,
            "loss": loss,
            "grad_norm": norm,
            "clip_coef": min(1.0, 1.0 / norm) if norm and math.isfinite(norm) else None,
            "lr": 3e-4,
            "scale": self.scale if self.scaler else None,
            "growth_tracker": self.step % 2000 if self.scaler else None,
            "micro_batches": 1,
            "data_wait": duration * 0.03,
            "batch": self.step % 2600,
            "epoch_batches": 2600,
            "epoch": 1 + self.step // 2600,
        }
        self.steps.write(records.pack_step(values, flags))
        if skipped:
            self.scale /= 2

    def point(self, disk: bool = False, tag: str | None = None) -> None:
        kind = "checkpoint" if disk else "snapshot"
        point = {
            "step": self.step,
            "kind": kind,
            "tag": tag,
            "time": self.clock,
            "loss": self.typical_loss(),
            "grad_norm": 0.84,
            "scale": self.scale if self.scaler else None,
            "lr": 3e-4,
            "bytes": 48_000_000,
            "seconds": 0.004,
            "verified": True,
            "healthy": True,
        }
        self.event(kind, f"{kind} at step {self.step:,}, verified", step=self.step, point=point)

    def roll_back(self, to: int) -> None:
        before = {"step": self.step, "loss": 9.81, "scale": self.scale, "lr": 3e-4}
        self.scale /= 2
        self.trajectory = to
        self.restored = True
        self.event(
            "rolled_back",
            f"rolled back to {to:,} at step {self.step:,}: loss 9.81 -> 2.04",
            step=self.step,
            to=to,
            where="disk",
            before=before,
            after={"step": to, "loss": 2.04, "scale": self.scale, "lr": 3e-4},
            digests_equal=True,
            data_rewound=False,
        )

    def say(self, line: str) -> None:
        self.output.write(line.encode() + b"\n")

    def sample(self) -> None:
        if self.machine is not None:
            self.hardware.write(json.dumps(MACHINES[self.machine](self.clock, self.random)).encode() + b"\n")
            return
        gpus = [
            {
                "index": index,
                "name": "MI300X",
                "bdf": f"0000:{index:02x}:00.0",
                "busy": None if index == 3 else 87 - 11 * index,
                "memory_busy": 40,
                "vram_used": 112_000_000_000,
                "vram_total": 192_000_000_000,
                "power_w": 612 - 20 * index,
                "power_cap_w": 750,
                "temperature_c": 61 - index,
                "memory_temperature_c": 55,
                "age": 14.0 if index == 3 else 0.6,
            }
            for index in range(self.gpus)
        ]
        sample = {
            "time": self.clock,
            "source": "sysfs" if gpus else "none",
            "reason": None if gpus else "no AMD GPU in /sys/class/drm",
            "state": "ok",
            "gpus": gpus,
            "host": {
                "cpu_percent": 21.0,
                "memory_used": 61_000_000_000,
                "memory_total": 1_024_000_000_000,
                "run_dir_free": 798_000_000_000,
                "run_dir_total": 800_000_000_000,
                "process_cpu_percent": 180.0,
                "process_rss": 1_900_000_000,
            },
        }
        self.hardware.write(json.dumps(sample).encode() + b"\n")

    def sample_back(self, seconds: int) -> None:
        """A sample a second up to now, for all that looks back."""
        now = self.clock
        for second in range(seconds, -1, -1):
            self.clock = now - second
            self.sample()
        self.clock = now

    def alerts(self) -> None:
        """The events that the supervisor makes of all samples so far."""
        watch = HardwareEpisodes()
        for line in (self.run_dir / paths.HARDWARE).read_text().splitlines():
            for found in watch.take(json.loads(line)):
                self.event(found.pop("kind"), found.pop("text"), supervisor=True, step=self.step, **found)

    def end(self, exit_status: int = 0, error: str | None = None, signal: str | None = None) -> None:
        self.info.update(exit_status=exit_status, error=error, signal=signal, ended=self.clock)
        self.write_info()
        text = f"the training ended, exit {exit_status}" + (f": {error}" if error else "")
        self.event("ended", text, supervisor=True, exit_status=exit_status, signal=signal, error=error)

    def close(self) -> None:
        for file in (self.steps, self.probe_events, self.supervisor_events, self.output, self.hardware):
            file.close()


def hardware_sample(time: float, source: str, gpus: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """A line of hardware.jsonl as the supervisor writes it."""
    host = {"cpu_percent": 21.0, "memory_used": 61e9, "memory_total": 1.024e12, "load_1m": 14.2}
    host |= {"run_dir_free": 2.1e12, "run_dir_total": 8e12, "process_cpu_percent": 820.0, "process_rss": 19e9}
    about = {"time": time, "source": source, "reason": None, "state": "ok", "silent": 0.4}
    return {**about, **fields, "gpus": gpus, "host": fields.get("host", host)}


def mi300x(time: float, rng: random.Random, cards: int = 8) -> dict[str, Any]:
    """MI300X cards with eight XCDs each: 2 is held back by heat and behind, 5 has not answered for 14 s."""
    gpus = []
    for index in range(cards):
        hot, dead = index == 2, index == 5
        busy = min(100.0, max(0.0, rng.gauss(44 if hot else 88, 3)))
        wave = 6 * math.sin(time / 7 + index)
        xcds = [min(100.0, max(0.0, busy + wave * (x - 3.5) / 3.5 + rng.gauss(0, 2))) for x in range(8)]
        thermal = min(1.0, max(0.0, rng.gauss(0.34, 0.05))) if hot else 0.0
        values: dict[str, Any] = {
            "busy": round(busy), "memory_busy": 40, "xcd_busy": [round(x) for x in xcds],
            "vram_used": 112e9, "vram_total": 192e9,
            "power_w": 391 if hot else 612 + index, "power_cap_w": 750,
            "temperature_c": 98 if hot else 61, "memory_temperature_c": 71 if hot else 55,
            "clock_mhz": 1410 if hot else 1980, "memory_clock_mhz": 1300,
            "throttle": {"power": 0.08, "thermal": thermal, "hbm": 0.0},
            "pcie_bytes_s": 2.1e9, "xgmi_read_bytes_s": 41e9, "xgmi_write_bytes_s": 38e9,
            "pcie_width": 16, "pcie_speed_gts": 32, "pcie_width_max": 16, "pcie_speed_max_gts": 32,
            "ecc_correctable": 1 if index == 7 else 0, "ecc_uncorrectable": 0,
            "partition": {"compute": "SPX", "memory": "NPS1"}, "processes": [{"pid": 4000 + index, "vram": 112e9}],
        }  # fmt: skip
        about = {"index": index, "name": "MI300X", "arch": "gfx942", "bdf": f"0000:{5 + index * 32:02x}:00.0"}
        about |= {"uuid": None, "source": "amdsmi", "reason": None, "torch_index": index, "used": True}
        gpus.append({**about, **(dict.fromkeys(values) if dead else values), "age": 14.0 if dead else 0.1})
    return hardware_sample(time, "amdsmi", gpus)


def h100(time: float, rng: random.Random) -> dict[str, Any]:
    """Two NVIDIA cards by NVML, which tells neither XCDs nor XGMI."""
    gpus = [
        {
            "index": index, "name": "NVIDIA H100 80GB HBM3", "arch": None, "bdf": f"0000:{0x18 + index:02x}:00.0",
            "uuid": f"GPU-{index}", "source": "nvml", "reason": None, "torch_index": index, "used": True,
            "busy": min(100, round(rng.gauss(93, 2))), "memory_busy": 62, "xcd_busy": None, "partition": None,
            "vram_used": 71e9, "vram_total": 85e9, "power_w": 640, "power_cap_w": 700, "temperature_c": 66,
            "memory_temperature_c": None, "clock_mhz": 1755, "throttle": None, "ecc_correctable": 0,
            "ecc_uncorrectable": 0, "pcie_width": 8, "pcie_speed_gts": 32, "pcie_width_max": 16,
            "pcie_speed_max_gts": 32, "age": 0.0,
        }
        for index in range(2)
    ]  # fmt: skip
    return hardware_sample(time, "nvml", gpus)


def no_gpus(time: float, rng: random.Random) -> dict[str, Any]:
    """A machine without a card."""
    return hardware_sample(time, "none", [], reason="no GPU telemetry: no AMD GPU in /sys/class/drm")


MACHINES = {"mi300x": mi300x, "h100": h100, "none": no_gpus}


def eventful(run: SyntheticRun, steps: int) -> None:
    """Overflows at the start, a NaN, a spike and a rollback, then health."""
    spike, nan = steps * 56 // 100, steps * 30 // 100
    while run.step < steps:
        number = run.step + 1
        if number in (3, 12) and run.scaler:
            run.event("skipped", f"step {number} skipped: overflow at scale 2^{math.log2(run.scale):.0f}", step=number)
            run.take(skipped=True)
        elif nan <= number < nan + max(2, steps // 400):
            if number == nan:
                run.event("nonfinite", f"loss is NaN since step {number:,}", step=number, what="loss", value=math.nan)
            run.take(loss=math.nan, norm=math.nan)
        elif spike <= number < spike + max(3, steps // 50):
            run.take(loss=2 + (number - spike) * 8 / max(3, steps // 50), norm=60.0)
            if number == spike + max(3, steps // 50) - 1:
                run.roll_back(spike - max(3, steps // 50))
        else:
            run.take()
        if number % max(10, steps // 12) == 0:
            run.point(disk=number % max(30, steps // 4) < max(10, steps // 12))
        if number % max(1, steps // 40) == 0:
            run.say(f"iter {number}: loss {run.typical_loss():.4f}, time 40.8ms")
        if number % max(1, steps // 20) == 0:
            run.sample()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--steps", type=int, default=4210)
    parser.add_argument("--live", type=float, default=0.0, help="steps a second to go on with")
    parser.add_argument("--state", default="running")
    parser.add_argument("--no-scaler", action="store_true")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--machine", choices=sorted(MACHINES))
    options = parser.parse_args()
    start = time.time() - options.steps * STEP_SECONDS
    run = SyntheticRun(options.run_dir, scaler=not options.no_scaler, gpus=options.gpus, start=start)
    run.machine = options.machine
    eventful(run, options.steps)
    if run.machine is not None:
        run.hardware.truncate(0)
        run.clock = time.time()
        run.sample_back(600)
        run.alerts()
    if options.state == "paused":
        run.event("paused", f"paused at step {run.step:,}", step=run.step)
    if options.state == "failed":
        for line in ("Traceback (most recent call last):", '  File "train.py", line 12, in <module>', "    main()"):
            run.say(line)
        run.say("RuntimeError: the sky fell")
        run.end(1, "RuntimeError: the sky fell")
    if options.state == "finished":
        run.end(0)
    while options.live:
        time.sleep(1 / options.live)
        run.clock = time.time()
        run.take()
        if run.step % 25 == 0:
            run.say(f"iter {run.step}: loss {run.typical_loss():.4f}, time 40.8ms")
        if run.step % max(1, round(options.live)) == 0:
            run.sample()
        if run.step % 200 == 0:
            run.point()
    print("ready", flush=True)
    if options.state in ("running", "paused"):
        time.sleep(3600)


if __name__ == "__main__":
    main()
