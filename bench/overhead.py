"""What the probe costs a training, beside its budgets: ``python bench/overhead.py [--quick] [--json]``.

One process, the modes interleaved (rotated every ten steps), ratios of medians: the machines are noisy. Unhooked means
that torch's own functions are back in place. A second part launches a real run and looks at the supervisor.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch

from fp8console.probe import hooks, state
from fp8console.probe.core import Probe
from fp8console.probe.snapshots import SnapshotRing
from fp8console.protocol.settings import Settings
from fp8console.supervisor import policy

ROTATE = 10


def figure(name: str, value: float, unit: str, budget: str, within: bool | None) -> dict[str, Any]:
    return {"name": name, "value": round(value, 4), "unit": unit, "budget": budget, "within": within}


class Modes:
    """The same training step, with the probe's hooks in place or not."""

    def __init__(self, folder: Path, step: Callable[[], None]) -> None:
        self.step = step
        plain = {"snapshot_budget": 0.0, "layer_steps": 0}
        every_10 = {**plain, "layer_steps": ROTATE, "layer_budget": 1.0}
        self.probes = {
            "hooks": self._probe(folder / "hooks", Settings(**plain)),
            "read late": self._probe(folder / "late", Settings(**plain, read_late=True)),
            "snapshots": self._probe(folder / "snapshots", Settings(layer_steps=0, snapshot_memory_gib=4.0)),
            "layers": self._probe(folder / "layers", Settings(**every_10)),
        }
        self.times: dict[str, list[float]] = {name: [] for name in ("unhooked", *self.probes)}
        self.sampled: list[float] = []  # of "layers": the steps that were sampled

    def _probe(self, folder: Path, settings: Settings) -> Probe:
        folder.mkdir()
        return Probe(folder, None, settings)

    def _shift(self) -> None:
        """Put the sampled step of "layers" into the middle of its ten: what it costs the next steps counts too."""
        patches = hooks.Patches()
        hooks.install(self.probes["layers"].observer, patches)
        for _ in range(ROTATE // 2):
            self.step()
        patches.undo()

    def run(self, seconds: float) -> None:
        self._shift()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for name in self.times:
                patches = hooks.Patches()
                probe = self.probes.get(name)
                if probe is not None:
                    hooks.install(probe.observer, patches)
                for index in range(ROTATE):
                    layers = probe.layers if probe is not None else None
                    sampled = layers is not None and layers.sampling
                    started = time.perf_counter()
                    self.step()
                    took = time.perf_counter() - started
                    if sampled:
                        self.sampled.append(took)
                    elif index >= 2:  # the first after a change of mode warms caches up
                        self.times[name].append(took)
                patches.undo()
                if name == "snapshots" and probe is not None and probe.points is not None and probe.points.cost:
                    # What the supervisor would do with the figures that the rank reports.
                    step_seconds = statistics.median(self.times[name])
                    every = policy.cadence(0.01, probe.points.cost[0], step_seconds, 60.0)
                    if policy.worth_changing(probe.points.cadence, every):
                        probe.points.set_cadence(every, probe.step)
        for probe in self.probes.values():
            probe.close()

    def ratio(self, name: str) -> float:
        return statistics.median(self.times[name]) / statistics.median(self.times["unhooked"])

    def layers_ratio(self) -> float:
        """With one step in ten sampled, of means as below; against the step without the probe."""
        mean = (_trimmed(self.sampled) + (ROTATE - 1) * _trimmed(self.times["layers"])) / ROTATE
        return mean / _trimmed(self.times["unhooked"])

    def mean_ratio(self, name: str) -> float:
        """Of means without the slowest 2% on either side of each: for a cost that falls on few steps."""
        return _trimmed(self.times[name]) / _trimmed(self.times["unhooked"])


def _trimmed(values: list[float]) -> float:
    ordered = sorted(values)
    cut = len(ordered) // 50
    return statistics.fmean(ordered[: len(ordered) - cut] if cut else ordered)


def training(width: int, depth: int, rows: int) -> Callable[[], None]:
    """A step of an MLP with AdamW, a scaler and clipping."""
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(depth):
        layers += [torch.nn.Linear(width, width), torch.nn.GELU()]
    net = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    x = torch.randn(rows, width)

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(net(x).pow(2).mean()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step


def trivial() -> Callable[[], None]:
    """The smallest step that is one: two parameters, SGD, nothing else."""
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    x = torch.randn(4, 4)

    def step() -> None:
        optimizer.zero_grad()
        net(x).pow(2).mean().backward()
        optimizer.step()

    return step


def statistics_of(parameters: str, shapes: list[tuple[int, ...]], rounds: int) -> list[dict[str, Any]]:
    """One set of tensors measured, against the cheapest way known before, in which no mean and no saturation was."""
    from fp8console.numerics.formats import E5M2
    from fp8console.numerics.statistics import SAMPLE, Statistics, underflow_edge

    torch.manual_seed(0)
    tensors = [torch.randn(shape) * 1e-4 for shape in shapes]

    def ours() -> Any:
        made = Statistics()
        for index, tensor in enumerate(tensors):
            made.add(index, tensor, E5M2)
        return made.pack()

    def before() -> Any:
        columns = [*torch._foreach_norm(tensors)]
        for tensor in tensors:
            columns += torch.aminmax(tensor)
            sample = tensor.view(-1)[:: max(1, tensor.numel() // SAMPLE)].abs()
            columns.append(((sample <= underflow_edge(E5M2)) & (sample > 0)).sum() / (sample > 0).sum())
        return torch.stack(columns)

    times: dict[Any, list[float]] = {ours: [], before: []}
    for _ in range(rounds):
        for function, taken in times.items():
            started = time.perf_counter()
            function()
            taken.append(time.perf_counter() - started)
    mine, theirs = (statistics.median(taken) for taken in times.values())
    what = f"statistics of {parameters} parameters"
    return [
        figure(what, mine * 1000, "ms", "", None),
        figure(f"{what} / L2, aminmax and underflow alone", mine / theirs, "ratio", "<= 1.1", mine / theirs <= 1.1),
    ]


def rollback(megabytes: int) -> dict[str, Any]:
    """Restore and verify from memory, against a plain copy of the same tensors."""
    from fp8console.probe.snapshots import compare_live

    count = max(1, megabytes // 12)  # AdamW: a parameter and two moments of 4 MiB each
    net = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(1024, 1024)) for _ in range(count)])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    for parameter in net:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    import weakref

    roots = state.Roots([weakref.ref(net)], [weakref.ref(optimizer)], [], [], {})
    ring = SnapshotRing(2, 1 << 40, lambda what, point, reason: None)
    point = ring.take(roots, 1, {})
    point.ready.wait()
    live = state.capture(roots)[1]
    ours, plain = [], []
    for _ in range(9):
        started = time.perf_counter()
        state.restore(point.roots, point.tree, point.host)
        assert compare_live(point)[1]
        ours.append(time.perf_counter() - started)
        started = time.perf_counter()
        for target, source in zip(live, point.host):
            target.copy_(source)
        plain.append(time.perf_counter() - started)
    ratio = statistics.median(ours) / statistics.median(plain)
    return figure(f"rollback of {megabytes} MB from memory, verified / plain copy", ratio, "ratio", "<= 2", ratio <= 2)


def supervised(seconds: float, folder: Path) -> list[dict[str, Any]]:
    """A real run at about 100 steps a second: the supervisor's CPU and memory, commands from asked to applied."""
    script = folder / "train.py"
    script.write_text(
        "import time, torch\n"
        "w = torch.nn.Parameter(torch.ones(8)); o = torch.optim.SGD([w], lr=0.0)\n"
        "while True:\n    o.zero_grad(); w.pow(2).sum().backward(); o.step(); time.sleep(0.0095)\n"
    )
    env = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run_dir = folder / "supervised"
    command = [sys.executable, "-m", "fp8console"]
    subprocess.run(
        [*command, "--detach", "--run-dir", str(run_dir), str(script)], env=env, check=True, capture_output=True
    )
    from fp8console.protocol.client import send
    from fp8console.runs.run import Run

    run = Run(run_dir)
    try:
        while len(run.rank()) < 50:
            time.sleep(0.1)
            run.refresh()
        pid = run.info["supervisor"]["pid"]
        before, started, steps = _cpu_seconds(pid), time.monotonic(), len(run.rank())
        time.sleep(seconds)
        share = (_cpu_seconds(pid) - before) / (time.monotonic() - started)
        run.refresh()
        rate = (len(run.rank()) - steps) / (time.monotonic() - started)
        memory = _resident_mb(pid)
        waits = []
        for _ in range(20):
            started = time.perf_counter()
            send(run.info["socket"], {"name": "set", "lr_scale": 1.0})
            waits.append(time.perf_counter() - started)
        wait = statistics.median(waits) * 1000
        step_ms = 1000 / rate
    finally:
        subprocess.run([*command, "ctl", str(run_dir), "kill"], env=env, capture_output=True)
    return [
        figure(f"supervisor's CPU at {rate:.0f} steps a second", share * 100, "% of a core", "<= 3", share <= 0.03),
        figure("supervisor's memory", memory, "MB", "<= 30", memory <= 30),
        figure("command asked to applied, less one step", wait - step_ms, "ms", "<= 20", wait - step_ms <= 20),
    ]


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_mb(pid: int) -> float:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024 / 1e6


def measure(quick: bool) -> list[dict[str, Any]]:
    seconds = 6.0 if quick else 40.0
    figures = []
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        for kind in ("trivial", "20 ms"):
            (folder / kind).mkdir()
            step = trivial() if kind == "trivial" else training(512, 6, 256)
            modes = Modes(folder / kind, step)
            modes.run(seconds)
            base = statistics.median(modes.times["unhooked"])
            figures.append(figure(f"{kind} step, unhooked", base * 1000, "ms", "", None))
            for name in ("hooks", "read late"):
                ratio = modes.ratio(name)
                if kind == "trivial":
                    extra = (statistics.median(modes.times[name]) - base) * 1e6
                    # Read late is a device's way; on a CPU its extra tensors are work of the host, so no budget.
                    ours = name == "hooks"
                    figures.append(
                        figure(
                            f"trivial step, {name}",
                            extra,
                            "us more",
                            "<= 60" if ours else "",
                            extra <= 60 if ours else None,
                        )
                    )
                else:
                    budget, within = ("<= 1.01", ratio <= 1.01) if name == "hooks" else ("", None)
                    figures.append(figure(f"{kind} step, {name} / unhooked", ratio, "ratio", budget, within))
            if kind != "trivial":
                ratio = modes.layers_ratio()
                name = f"{kind} step, with layer statistics every 10 steps / unhooked (means)"
                figures.append(figure(name, ratio, "ratio", "<= 1.02", ratio <= 1.02))
                extra = (_trimmed(modes.sampled) - _trimmed(modes.times["layers"])) * 1000
                figures.append(figure(f"{kind} step, a sample of its layers", extra, "ms more", "", None))
                ratio = modes.mean_ratio("snapshots") - modes.mean_ratio("hooks") + 1
                name = f"{kind} step, snapshots at the default cadence / without (means)"
                figures.append(figure(name, ratio, "ratio", "<= 1.01", ratio <= 1.01))
        figures += statistics_of("10M", [(512, 512)] * 38 + [(512,)] * 40, 20 if quick else 100)
        if not quick:
            figures += statistics_of("100M", [(2048, 2048)] * 24, 20)
        figures.append(rollback(120 if quick else 600))
        figures += supervised(5.0 if quick else 20.0, folder)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="under a minute")
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures = measure(args.quick)
    machine = (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"
    )
    if args.json:
        print(json.dumps({"figures": figures, "machine": machine, "date": time.strftime("%Y-%m-%d")}))
        return 0
    print(machine)
    for item in figures:
        mark = {True: "within", False: "OVER", None: ""}[item["within"]]
        print(f"{item['name']:68} {item['value']:>10} {item['unit']:12} {item['budget']:8} {mark}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
