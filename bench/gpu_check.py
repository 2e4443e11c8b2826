"""Checks the probe and FP8 on a real device, CUDA or ROCm, in under three minutes; says "no device" elsewhere.

Synchronisations: hooked steps run with torch.cuda.set_sync_debug_mode("error"), through snapshots and an overflow.
Overhead: hooked and bare steps in turns, ratio of medians. Restore points: digests, and the same steps taken again.
Casts: every bf16 value, on the device as on the CPU. Products: torch._scaled_mm against float64 of the same codes.

    python bench/gpu_check.py [--json] [--quick] [--device cuda|cpu]

``--device cpu`` tries this script itself where there is no device. The exit status is 1 when a figure is not within
its budget.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts; bit-equal matrix products need it

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fp8console.numerics.casts import cast_through
from fp8console.numerics.formats import FORMATS, Fp8Format
from fp8console.probe import hooks
from fp8console.probe.core import Probe
from fp8console.probe.digest import digest
from fp8console.probe.restore_points import RestorePoints
from fp8console.protocol.settings import Settings

BLOCK = 10  # steps between two changes of mode


@dataclass
class Figure:
    """One measured figure; ``within`` is None where there is no budget."""

    name: str
    value: float
    unit: str
    budget: float | None
    within: bool | None


def at_most(name: str, value: float, unit: str, budget: float) -> Figure:
    return Figure(name, value, unit, budget, value <= budget)


class Training:
    """A perceptron on random data that lives on the device; every choice that a step could synchronise on is off."""

    def __init__(self, device: torch.device, width: int, depth: int, batch: int, scaler: bool = False) -> None:
        torch.manual_seed(0)
        layers: list[torch.nn.Module] = []
        for _ in range(depth):
            layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
        self.model = torch.nn.Sequential(*layers).to(device)
        # A scaler asks the device whether to step, unless the optimizer is fused and finds out by itself.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=scaler or None)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.999**step)
        self.scaler = torch.amp.GradScaler(device.type) if scaler else None
        self._shape = (batch, width)
        self._device = device

    def step(self, bad: bool = False) -> None:
        inputs = torch.randn(self._shape, device=self._device)
        loss = (self.model(inputs) - inputs).square().mean()
        if bad:
            loss = loss * float("inf")
        self.optimizer.zero_grad()
        if self.scaler is None:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.schedule.step()

    def digest(self) -> str:
        return digest(self.model.state_dict().values())


class Hooked:
    """The probe in this very process, with its hooks put in and taken out at will."""

    def __init__(self, folder: Path) -> None:
        self.probe = Probe(folder, None, Settings(snapshot_budget=0.0))
        self._patches = hooks.Patches()

    @contextmanager
    def on(self) -> Iterator[Probe]:
        """Hooks are in while the body runs."""
        from torch.optim import optimizer

        tables: list[Any] = [optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks]
        saved = [dict(table) for table in tables]
        hooks.install(self.probe.observer, self._patches)
        try:
            yield self.probe
        finally:
            self._patches.undo()
            for table, entries in zip(tables, saved):
                table.clear()
                table.update(entries)

    def points(self) -> RestorePoints:
        assert self.probe.points is not None
        return self.probe.points


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- synchronisations ---------------------------------------------------------------------------------------------
def check_syncs(device: torch.device, folder: Path, steps: int) -> list[Figure]:
    """Hooked steps under a torch that refuses to synchronise; a part of the probe that tried is switched off."""
    figures = []
    for scaler in (False, True):
        hooked = Hooked(folder / f"syncs-{scaler}")
        hooked.probe.run_dir.mkdir()
        with hooked.on() as probe:
            training = Training(device, 256, 4, 64, scaler)
            for _ in range(5):
                training.step()
            hooked.points().set_cadence(20, probe.step)
            with refusing_to_synchronize(device):
                for number in range(steps):
                    training.step(bad=scaler and number == steps // 2)
            synchronize(device)
            probe.catch_up()
            probe.close()
        for part, reason in probe.guard.off.items():
            print(f"  {part} switched off: {reason}", file=sys.stderr)
        what = "with a scaler" if scaler else "without a scaler"
        figures.append(at_most(f"parts of the probe that synchronise, {what}", len(probe.guard.off), "parts", 0))
        taken = len(hooked.points().ring.points)
        figures.append(Figure(f"snapshots meanwhile, {what}", taken, "", None, taken > 1))
        recorded = int(probe.last["step"])
        figures.append(Figure(f"steps recorded, {what}", recorded, "steps", steps + 5, recorded == steps + 5))
    return figures


@contextmanager
def refusing_to_synchronize(device: torch.device) -> Iterator[None]:
    """torch raises on every synchronisation in the body. Raises RuntimeError when it does not notice one."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        try:
            torch.ones(1, device=device).item()
        except RuntimeError:
            pass
        else:
            raise RuntimeError("torch.cuda.set_sync_debug_mode('error') does not notice .item() here")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# -- overhead -----------------------------------------------------------------------------------------------------
def check_overhead(device: torch.device, folder: Path, blocks: int) -> list[Figure]:
    """Median step time with the hooks in over that with them out, mode changed every ten steps."""
    batch = 8192 if device.type == "cuda" else 64
    figures = []
    for name, width, depth, rows in (("step", 1024, 16, batch), ("trivial step", 8, 1, 4)):
        hooked = Hooked(folder / name.replace(" ", "-"))
        hooked.probe.run_dir.mkdir()
        training = Training(device, width, depth, rows)
        with hooked.on():
            training.step()
        times: dict[bool, list[float]] = {False: [], True: []}
        for block in range(2 * blocks):
            with_hooks = block % 2 == 1
            if with_hooks:
                with hooked.on():
                    seconds = time_block(device, training.step)
            else:
                seconds = time_block(device, training.step)
            if block >= 2:  # the first of each mode warms up
                times[with_hooks].append(seconds / BLOCK)
        hooked.probe.close()
        bare, with_probe = statistics.median(times[False]), statistics.median(times[True])
        figures.append(Figure(f"{name}, bare", bare * 1e3, "ms", None, None))
        if depth > 1:
            figures.append(at_most(f"{name}, hooked over bare", with_probe / bare, "ratio", 1.01))
        else:
            figures.append(at_most(f"{name}, added by the hooks", (with_probe - bare) * 1e6, "us", 60.0))
    return figures


def time_block(device: torch.device, step: Callable[[], None]) -> float:
    """Seconds for BLOCK steps, the device's work included."""
    synchronize(device)
    began = time.perf_counter()
    for _ in range(BLOCK):
        step()
    synchronize(device)
    return time.perf_counter() - began


# -- restore points -----------------------------------------------------------------------------------------------
def check_restore_points(device: torch.device, folder: Path) -> list[Figure]:
    """Parameters with and without the probe; roll back, compare digests, take the same steps again."""
    torch.use_deterministic_algorithms(True)
    width = 2048 if device.type == "cuda" else 512
    bare = Training(device, width, 4, 256, scaler=True)
    for _ in range(20):
        bare.step()
    hooked = Hooked(folder / "restore")
    hooked.probe.run_dir.mkdir()
    with hooked.on() as probe:
        training = Training(device, width, 4, 256, scaler=True)
        for _ in range(20):
            training.step()
        same = training.digest() == bare.digest()
        point = hooked.points().snapshot(probe.step, probe.about_now())
        assert point is not None
        rounds, equal, again, seconds = 3, 0, 0, []
        for _ in range(10):
            training.step()
        wanted = training.digest()
        for _ in range(rounds):
            synchronize(device)
            began = time.perf_counter()
            result = hooked.points().roll_back(point.step)
            synchronize(device)
            seconds.append(time.perf_counter() - began)
            equal += result["digests_equal"]
            for _ in range(10):
                training.step()
            again += training.digest() == wanted
        targets = [torch.empty_like(tensor, device=device) for tensor in point.host]
        copies = []
        for _ in range(rounds):
            synchronize(device)
            began = time.perf_counter()
            for target, source in zip(targets, point.host):
                target.copy_(source)
            synchronize(device)
            copies.append(time.perf_counter() - began)
        probe.close()
    torch.use_deterministic_algorithms(False)
    ratio = statistics.median(seconds) / statistics.median(copies)
    return [
        Figure("parameters equal with and without the probe", int(same), "", 1, same),
        Figure("rollbacks with equal digests", equal, f"of {rounds}", rounds, equal == rounds),
        Figure("rollbacks whose next steps came out equal", again, f"of {rounds}", rounds, again == rounds),
        Figure("rollback", statistics.median(seconds) * 1e3, "ms", None, None),
        at_most("rollback over a plain copy of its tensors", ratio, "ratio", 2.0),
    ]


# -- FP8 ----------------------------------------------------------------------------------------------------------
def check_casts(device: torch.device) -> list[Figure]:
    """Every bf16 value through each format on the device, against the CPU."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    figures = []
    for fmt in FORMATS:
        wrong = 0
        for saturate in (False, True):
            try:
                got = cast_through(every.to(device), fmt, saturate).cpu()
            except RuntimeError as error:
                print(f"  {fmt.name} can't be cast here: {str(error).splitlines()[0]}", file=sys.stderr)
                break
            want = cast_through(every, fmt, saturate)
            wrong += int(((got != want) & ~(got.isnan() & want.isnan())).sum())
        else:
            figures.append(at_most(f"{fmt.name} casts unlike the CPU's", wrong, f"of {2 * len(every)}", 0))
    return figures


def product_formats(device: torch.device) -> list[tuple[Fp8Format, Fp8Format]]:
    """The pairs of formats whose product the device has in hardware; empty where FP8 is emulation."""
    named = {fmt.name: fmt for fmt in FORMATS}
    if device.type != "cuda":
        return []
    properties = torch.cuda.get_device_properties(device)
    architecture = str(getattr(properties, "gcnArchName", "")).split(":")[0]
    if architecture in ("gfx940", "gfx941", "gfx942"):
        suffix = "fnuz"
    elif architecture.startswith(("gfx950", "gfx120")) or (
        not architecture and (properties.major, properties.minor) >= (8, 9)
    ):
        suffix = ""
    else:
        return []
    e4m3, e5m2 = named["e4m3" + (suffix or "fn")], named["e5m2" + suffix]
    return [(e4m3, e4m3), (e5m2, e4m3)]


def check_products(device: torch.device) -> list[Figure]:
    """torch._scaled_mm against float64 of the same codes, relative to the product of the magnitudes."""
    figures = []
    generator = torch.Generator().manual_seed(0)
    one = torch.ones((), device=device)
    for left, right in product_formats(device):
        for rows, inner, columns in ((512, 256, 1024), (128, 4096, 128)):
            a = cast_through(torch.randn(rows, inner, generator=generator), left, saturate=True)
            b = cast_through(torch.randn(columns, inner, generator=generator), right, saturate=True)
            got = torch._scaled_mm(
                a.to(device).to(left.dtype),
                b.to(device).to(right.dtype).t(),
                scale_a=one,
                scale_b=one,
                out_dtype=torch.bfloat16,
                use_fast_accum=False,
            )
            got = got.double().cpu()
            want = a.double() @ b.double().t()
            magnitude = a.double().abs() @ b.double().abs().t()
            error = float(((got - want).abs() / magnitude).max()) if bool(got.isfinite().all()) else float("inf")
            # Half a unit of bf16's eight bits, and an accumulator that is known to keep fewer bits than float32.
            name = f"{left.name} x {right.name}, {rows}x{inner}x{columns}, error over |a||b|"
            figures.append(at_most(name, error, "", 2.0**-8))
    return figures


def main() -> int:
    """Run the checks; the exit status is 1 when one of them is not within its budget."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(json.dumps({"figures": [], "machine": "no device", "date": today()}) if options.json else "no device")
        return 0
    device = torch.device(options.device)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        figures += check_syncs(device, folder, 60 if options.quick else 200)
        figures += check_overhead(device, folder, 10 if options.quick else 30)
        figures += check_restore_points(device, folder)
        figures += check_casts(device)
        products = check_products(device)
        if not products:
            print("no FP8 matrix hardware that torch uses: products left out", file=sys.stderr)
        figures += products
    machine = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    )
    if options.json:
        listed = [asdict(figure) for figure in figures]
        print(json.dumps({"figures": listed, "machine": f"{machine}, torch {torch.__version__}", "date": today()}))
    else:
        print(f"{machine}, torch {torch.__version__}, {today()}")
        for figure in figures:
            word = {True: "within", False: "OVER", None: ""}[figure.within]
            budget = "" if figure.budget is None else f"budget {figure.budget:g}"
            print(f"  {figure.name:<56} {figure.value:>10.4g} {figure.unit:<9} {budget:<12} {word}")
    return 1 if any(figure.within is False for figure in figures) else 0


def today() -> str:
    return time.strftime("%Y-%m-%d")


if __name__ == "__main__":
    sys.exit(main())
