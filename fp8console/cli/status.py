"""``fp8console status``: one run at a glance."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fp8console.cli import wording
from fp8console.cli.arguments import Parser, add_run
from fp8console.diagnosis.cards import STALE
from fp8console.protocol.numbers import dumps, number

if TYPE_CHECKING:
    from fp8console.runs.stability import StabilityFigures
    from fp8console.runs.status import RunStatus

JSON_HELP = """\
JSON: one object. What is not known is null. JSON has no token for numbers that are not finite, so they
come as the strings "NaN", "Infinity" and "-Infinity", which Python's float() takes as they are. Times are
seconds since the epoch, sizes are bytes. state is one of starting, running, paused, stopping, finished,
failed, lost (neither the training nor its supervisor lives, and no exit status was written).

exit status: 0 whatever the run's state; 2 when there is no such run.
"""


def main(words: Sequence[str]) -> int:
    """Prints a run's status in words, or as a JSON object."""
    parser = Parser("status", "One run at a glance, from its files alone.", JSON_HELP)
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    given = parser.parse(words)

    from fp8console.runs.find import resolve
    from fp8console.runs.run import Run
    from fp8console.runs.status import status

    result = status(Run(resolve(given.run)))
    if given.json:
        print(dumps(result.to_json(), indent=1))
    else:
        sys.stdout.write("\n".join(describe(result, time.time())) + "\n")
    return 0


def describe(result: RunStatus, now: float) -> list[str]:
    """The status in lines for people."""
    lines = [f"{result.id}  {_state(result, now)}"]
    if result.command is not None:
        lines.append(f"  command        {wording.printable(' '.join(result.command))}")
    lines.append(f"  run directory  {result.run_dir}")
    if result.step is None:
        lines.append("  step           none yet")
    else:
        lines.append(f"  step           {_step(result)}")
        lines.append(f"  loss           {_loss(result)}")
        lines.append(f"  scaler         {_scaler(result)}")
        lines.append(f"  speed          {_speed(result)}")
        lines.append(f"  health         {_health(result)}")
        between, figures = _stability(result.stability)
        if result.clip_norm is not None:
            limit = f"auto, z {wording.figure(result.clip_z)}" if result.clip_norm == "auto" else result.clip_norm
            figures += f"; operator's clip_norm {limit if isinstance(limit, str) else wording.figure(limit)}"
        lines += [f"  stability      {between}", f"                 {figures}"]
    lines += _hardware(result, now)
    for note in result.notes:
        lines.append(f"  note           {wording.printable(note)}")
    if result.asked is not None:
        lines.append(f"  asked          {wording.printable(result.asked.get('text'))}, not answered yet")
    if result.restore_points:
        lines.append("  restore points")
        lines += [f"    {line}" for line in wording.table(_points(result, now), right=frozenset({0, 1, 2, 3}))]
    elif result.step is not None:
        lines.append("  restore points none")
    return lines


def _state(result: RunStatus, now: float) -> str:
    who = f" (pid {result.pid})" if result.pid is not None else ""
    if result.state == "paused":
        held = f" for {wording.duration(now - result.paused_since)}" if result.paused_since is not None else ""
        return f"paused at step {wording.count(result.paused_at)}{held}{who}"
    if result.state in ("finished", "failed"):
        how = f"exit {result.exit_status}" if result.exit_status is not None else "exit status unknown"
        how += f" ({result.signal})" if result.signal else ""
        return f"{result.state}, {how}" + (f": {wording.printable(result.error)}" if result.error else "")
    if result.state == "lost":
        return "lost: neither the training nor its supervisor is there, and no exit status was written"
    return result.state + who


def _step(result: RunStatus) -> str:
    text = wording.count(result.step)
    if result.total_steps is not None:
        text += f" of {result.total_steps:,}"
    if result.epoch is not None:
        text += f", epoch {result.epoch:,}"
        if result.epoch_batches and result.epoch_batch is not None:
            text += f" ({result.epoch_batch:,} of {result.epoch_batches:,} batches)"
    return text


def _loss(result: RunStatus) -> str:
    def one(name: str, value: float | None) -> str:
        since = result.nan_since.get(name)
        return wording.figure(value) + (f" (not finite since step {since:,})" if since is not None else "")

    text = f"{one('loss', result.loss)}, gradient norm {one('grad_norm', result.grad_norm)}"
    text += f", learning rate {wording.figure(result.lr)}"
    return text + (f" (x{result.lr_scale:g} by the operator)" if result.lr_scale not in (None, 1.0) else "")


def _scaler(result: RunStatus) -> str:
    if result.scale is None:
        return result.scaler_note or "no loss scale known"
    text = f"loss scale {wording.loss_scale(result.scale)}"
    about: dict[str, Any] = result.scaler or {}
    text += f", preset {wording.printable(about['preset'])}" if about.get("preset") else ""
    text += f", margin {wording.figure(number(about['margin']), 3)} bits" if about.get("margin") is not None else ""
    text += "".join(
        f", {name} {wording.figure(about[name], 6)}"
        for name in ("growth_factor", "backoff_factor", "growth_interval", "hysteresis")
        if about.get(name) is not None
    )
    for name, value in (("floor", result.floor), ("cap", result.cap)):
        text += f", {name} {wording.loss_scale(value)}" if value is not None else ""
    return text


def _speed(result: RunStatus) -> str:
    text = f"{wording.duration(result.step_seconds)} a step, {wording.figure(result.steps_per_second, 3)} steps/s"
    if result.data_wait_share is not None:
        text += f", data wait {wording.share(result.data_wait_share)}"
    if result.seconds_left is not None:
        text += f", {wording.duration(result.seconds_left)} left"
    if result.device_memory is not None:
        text += f", {wording.size(result.device_memory)} on the device"
    return text


def _health(result: RunStatus) -> str:
    healthy = result.healthy_steps or 0
    text = f"healthy for {wording.plural(healthy, 'step')}" if healthy > 0 else "not healthy at the newest step"
    if result.skipped is not None:
        text += f", {wording.plural(result.skipped, 'skip')}"
    if result.clipped_share is not None:
        text += f", clipped {wording.share(result.clipped_share)} of the last steps"
    return text + (f"; last: {wording.printable(result.last_incident)}" if result.last_incident else "")


def _stability(figures: StabilityFigures) -> tuple[str, str]:
    """The stability figures in two lines of words; runs/stability.py says how each is defined."""
    unknown = wording.UNKNOWN
    if figures.failures is None:
        between = f"steps between failures {unknown}"
    elif figures.mean_steps_between_failures is None:
        between = f"no failure in {wording.plural(figures.mean_steps_at_least or 0, 'step')}"
    else:
        steps = figures.mean_steps_between_failures
        mean = f"{steps:,.0f}" if steps >= 100 else wording.figure(steps, 3)
        between = f"{wording.plural(figures.failures, 'failure')}, {mean} steps between them"
    if figures.judged:
        between += f", recovered from {figures.recovered:,} of {figures.judged:,}"
    elif figures.failures:
        between += f", recovery {unknown}"
    between += f", longest stable stretch {wording.count(figures.longest_stable_stretch)}"
    clipped, lately = figures.clip_frequency, figures.clip_frequency_recent
    each = f"skips per 1,000 steps {wording.figure(figures.skips_per_1000_steps, 3)}"
    each += f", loss jitter {wording.share(figures.loss_jitter)}, clipped {wording.share(clipped)} of all steps"
    return between, each + ("" if lately is None else f" and {wording.share(lately)} of the last 100")


def _hardware(result: RunStatus, now: float) -> list[str]:
    """Cards, host, what bounds the step, and troubles that are not over."""
    sample = result.hardware
    if sample is None:
        return []
    gpus = [gpu for gpu in sample.get("gpus") or () if isinstance(gpu, dict)]
    known = [gpu["busy"] for gpu in gpus if gpu.get("busy") is not None]
    if gpus:
        busy = f"busy {min(known):.0f} to {max(known):.0f}%" if known else f"busy {wording.UNKNOWN}"
        silent = len(gpus) - len(known)
        busy += f" ({silent} {wording.UNKNOWN})" if known and silent else ""
        taken, old = number(sample.get("time")), max((number(gpu.get("age")) or 0.0 for gpu in gpus), default=0.0)
        if old > STALE and result.ended is None:
            busy += f" (no answer since {wording.duration(old + max(0.0, now - (taken or now)))})"
        even = "" if result.balance is None else f", balance {result.balance:.2f}"
        cards = f"{wording.plural(len(gpus), 'GPU')} by {wording.printable(sample.get('source'))}, {busy}{even}"
        if taken is not None and result.ended is None:
            cards += f", {wording.duration(max(0.0, now - taken))} ago"
    else:
        cards = f"none seen: {wording.printable(sample.get('reason') or 'no reason given')}"
    host = sample.get("host") if isinstance(sample.get("host"), dict) else {}
    assert host is not None
    cpu = host.get("cpu_percent")
    figures = f"cpu {wording.UNKNOWN if cpu is None else f'{cpu:.0f}%'}"
    figures += f", memory {wording.size(host.get('memory_used'))} of {wording.size(host.get('memory_total'))}"
    figures += f", {wording.size(host.get('run_dir_free'))} free for the run directory"
    lines = [f"  GPUs           {cards}"]
    state = wording.printable(sample.get("state") or "ok")
    if state != "ok" and result.ended is None:
        lines.append(f"  sampler        {state}: {wording.printable(sample.get('reason') or 'no reason given')}")
    lines.append(f"  host           {figures}")
    if gpus or result.bounds:
        found = "; ".join(wording.printable(bound["text"]) for bound in result.bounds or ())
        lines.append(f"  step bound by  {found or 'not known'}")
    return lines + [f"  alert          {wording.printable(alert['text'])}" for alert in result.hardware_alerts]


def _also(point: dict[str, Any]) -> str:
    """What else is to be known before going back to a restore point."""
    unhealthy = ", unhealthy" if point.get("healthy") is False else ""
    return unhealthy + (", abandoned" if point.get("abandoned") else "")


def _points(result: RunStatus, now: float) -> list[list[str]]:
    rows = [["step", "age", "loss", "scale", "where", "state", "tag"]]
    for point in result.restore_points:
        verified = point.get("verified")
        state = "verified" if verified else ("not verified" if verified is None else "does not verify")
        made = point.get("time")
        rows.append(
            [
                wording.count(point["step"]),
                wording.duration(now - made) if made is not None else wording.UNKNOWN,
                wording.figure(point.get("loss")),
                wording.loss_scale(point["scale"]) if point.get("scale") is not None else "-",
                point["where"],
                state + _also(point),
                wording.printable(point.get("tag") or ""),
            ]
        )
    return rows
