"""What a baseline showed: printed as tables and a heat map, written as a profile."""

from __future__ import annotations

import math
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from fp8console.cli import wording
from fp8console.cli.arguments import CommandFailed
from fp8console.cli.heat_map import can_colour, can_unicode, heat_map
from fp8console.cli.launch import say
from fp8console.cli.tune_words import TuneWords
from fp8console.protocol.numbers import dumps
from fp8console.protocol.profile import ProfileError
from fp8console.runs import profiles
from fp8console.runs.baseline import Baseline, read_baseline
from fp8console.runs.quantisation import FORMATS
from fp8console.runs.run import Run
from fp8console.runs.sensitivity import RULE, LayerVerdict
from fp8console.runs.tuned import made_of, profile_of, profile_text
from fp8console.runs.tuning import NoTuning, Tuning, tune


def report(run_dir: Path, given: TuneWords, ended: dict[str, Any] | None) -> dict[str, Any]:
    """Analyse, write the profile, print; returns the profile. Raises CommandFailed."""
    run = Run(run_dir)
    run.refresh()
    begun = next((e for e in run.events.events if e["kind"] == "baseline" and e.get("what") == "begun"), {})
    if ended is not None:
        others = [e for e in run.events.events if e["kind"] == "baseline" and e.get("what") == "ended"]
        ended = next((event for event in others if not event.get("put_back")), ended)
    last = int(ended["step"]) if ended is not None and ended.get("step") else None
    ranks = int(run.info.get("world_size") or 1)
    baseline = read_baseline(run_dir, last, ranks, given.format or _known_format(begun))
    try:
        tuning = tune(baseline, given.margin, given.clip_factor, given.options.settings.total_steps)
    except NoTuning as error:
        raise CommandFailed(f"tune: {error}") from None
    made = made_of(run.info, begun, baseline)
    data = profile_of(tuning, baseline, made)
    try:
        path = given.output or profiles.free_path(profiles.profiles_root(), made)
        profiles.save(profile_text(data, tuning), path)
    except OSError as error:
        raise CommandFailed(f"tune: the profile can't be written: {path}: {error.strerror}") from None
    except ProfileError as error:
        raise CommandFailed(f"tune: {error}") from None
    if given.json:
        about = {"run": str(run_dir), "put_back": None if ended is None else ended.get("put_back")}
        print(dumps({"file": str(path), **about, "left_out": baseline.left_out, **data}, indent=1))
    else:
        print("\n".join(_lines(baseline, tuning, given, begun, ended)))
        name = path if given.output else path.stem
        start = {"module": ["-m"], "command": ["--"]}.get(given.options.kind, [])
        apply = shlex.join(["fp8console", "--profile", str(name), *start, *given.training])
        print(f"\nprofile written: {path}\napply it: {apply}")
    for warning in [*_warnings(baseline, begun, ended), *_saturated(baseline, path)]:
        say(warning)
    return data


def _known_format(begun: dict[str, Any]) -> str | None:
    """The format to which the training itself casts gradients, where it says so."""
    name = begun.get("gradient_format")
    return str(name) if name in FORMATS else None


def _warnings(baseline: Baseline, begun: dict[str, Any], ended: dict[str, Any] | None) -> list[str]:
    found = []
    if ended is None:
        found.append(
            f"the training ended by itself before {begun.get('steps')} steps: nothing was left to put back into"
        )
    elif not ended.get("put_back"):
        found.append(str(ended["text"]))
    lr = baseline.lr[~_nan(baseline.lr)]
    wanted = begun.get("lr")
    if len(lr) and wanted is not None and any(not math.isclose(value, wanted, rel_tol=1e-5) for value in lr):
        found.append(f"the learning rate could not be set: steps ran at {lr.max():g}")
    return found


def _saturated(baseline: Baseline, path: Path) -> list[str]:
    """A cast that saturates hides from the layers before it how large their gradients would have been."""
    figures = baseline.of("activation_gradient")
    if figures is None or not baseline.backward.saturates:
        return []
    beyond = (figures.amax * figures.scale > baseline.backward.max).any(axis=1)
    if not beyond.any():
        return []
    steps = wording.plural(int(beyond.sum()), "step")
    return [
        f"in {steps} gradients were beyond {baseline.backward.name} at the loss scale of the baseline, "
        f"and those behind them may be too low: tune again with --profile {path}"
    ]


def _nan(values: Any) -> Any:
    return values != values


def _lines(
    baseline: Baseline, tuning: Tuning, given: TuneWords, begun: dict[str, Any], ended: dict[str, Any] | None
) -> list[str]:
    width = shutil.get_terminal_size((100, 24)).columns
    out = sys.stdout
    lines = ["", *_summary(baseline, tuning, begun, ended), ""]
    lines += _table(tuning.layers, given.layers)
    lines += ["", *_wrap(f"{RULE}.", width), ""]
    kind = "gradient" if baseline.of("gradient") is not None else "activation_gradient"
    figures = baseline.of(kind)
    if figures is not None:
        lines.append("gradient magnitudes by layer and step (root mean square, unscaled; the median at the end)")
        shown = [i for i in range(len(baseline.layers)) if not _nan(figures.rms[:, i]).all()]
        cut = shown if not given.layers else shown[: given.layers]
        names = [wording.printable(baseline.layers[i]["name"]) for i in cut]
        lines += heat_map(names, baseline.steps, figures.rms[:, cut], width, can_colour(out), can_unicode(out))
        if len(cut) < len(shown):
            lines.append(f"and {wording.plural(len(shown) - len(cut), 'layer')} more (--layers 0)")
    return lines


def _summary(baseline: Baseline, tuning: Tuning, begun: dict[str, Any], ended: dict[str, Any] | None) -> list[str]:
    total = len(baseline.steps) + sum(baseline.left_out.values())
    usable = f"{len(baseline.steps)} of {wording.plural(total, 'step')} usable"
    if baseline.left_out:
        usable += " (" + ", ".join(f"{count} {reason}" for reason, count in baseline.left_out.items()) + " left out)"
    back = "not put back" if ended is None or not ended.get("put_back") else "all put back, verified by digest"
    lr = begun.get("lr")
    scaler = tuning.scaler
    rows = [
        ["baseline", f"{usable}, learning rate {wording.figure(lr)}; {back}"],
        ["format", f"gradients {tuning.format.name} (to {tuning.format.max:g}), forward {baseline.forward.name}"],
        ["initial scale", f"{wording.loss_scale(scaler['init_scale'])}: {tuning.reasons['init_scale']}"],
        [
            "growth",
            f"preset {scaler['preset']} with margin {scaler['margin']}; stock: growth_interval "
            f"{scaler['growth_interval']:,}, x{scaler['growth_factor']:g} and x{scaler['backoff_factor']:g}",
        ],
        [
            "floor, cap",
            f"{wording.loss_scale(scaler['floor'])}, {wording.loss_scale(scaler['cap'])}: {tuning.reasons['cap']}",
        ],
        ["clip_norm", "unknown: no gradient norm was measured"],
    ]
    if tuning.clip_norm is not None:
        rows[-1][1] = f"{tuning.clip_norm:g}: {tuning.reasons['clip_norm']}"
    if tuning.clip_groups:
        rows.append(["by group", ", ".join(f"{name} {value:g}" for name, value in tuning.clip_groups.items())])
    return wording.table(rows)


def _table(layers: list[LayerVerdict], most: int) -> list[str]:
    if not layers:
        return ["no layer was measured"]
    cast = [verdict for verdict in layers if verdict.precision != "uncast"]
    shown = cast if not most else cast[:most]
    rows = [["layer", "type", "sensitivity", "headroom", "spread", "to 0", "error", "keep in", "why"]]
    for v in shown:
        bits = [_bits(v.sensitivity), _bits(v.headroom), _bits(v.spread)]
        shares = [_share(v.underflow), _share(v.error)]
        rows.append([wording.printable(v.name), wording.printable(v.type), *bits, *shares, v.precision.upper(), v.why])
    lines = ["layers by sensitivity (bits)", *wording.table(rows, frozenset({2, 3, 4, 5, 6}))]
    if len(shown) < len(cast):
        lines.append(
            f"and {wording.plural(len(cast) - len(shown), 'layer')} more, in the profile (--layers 0 prints all)"
        )
    if len(cast) < len(layers):
        lines.append(f"{wording.plural(len(layers) - len(cast), 'layer')} without a matrix product: nothing to cast")
    return lines


def _bits(value: float | None) -> str:
    return wording.UNKNOWN if value is None else f"{value:.1f}"


def _share(value: float | None) -> str:
    if value is None:
        return wording.UNKNOWN
    return "<0.1%" if 0 < value < 0.001 else f"{value:.1%}"


def _wrap(text: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(text, max(40, width - 1))
