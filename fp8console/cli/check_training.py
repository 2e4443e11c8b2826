"""``fp8console check train.py``: the script in FP8 and as it is, with the same seeds, compared."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from typing import Any

from fp8console.cli import wording
from fp8console.cli.arguments import UsageError
from fp8console.cli.check_runs import EndedRun, run_training
from fp8console.cli.check_words import CheckWords
from fp8console.cli.junit import Case, write
from fp8console.cli.options import LaunchOptions
from fp8console.protocol.numbers import dumps
from fp8console.protocol.settings import Settings

#: A first loss that differs by more is no matter of rounding: E4M3's relative spacing, 2^-3, spread over many elements.
FIRST_LOSS = 0.05
#: Layers in the table.
ROWS = 12


def check_training(given: CheckWords) -> int:
    """Both runs, the comparison, the report; 0 when everything is within the limits, else 1."""
    from fp8console.runs.compare import compare_runs

    reference, candidate = _settings(given)
    # Sets of strings have an order of their own in each process, unless this is fixed before it starts.
    os.environ.setdefault("PYTHONHASHSEED", "0")
    if given.candidate_args is None:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    began = time.monotonic()
    runs: list[EndedRun] = []
    for what, settings, more in (
        ("reference", reference, given.reference_args),
        ("candidate", candidate, given.candidate_args or []),
    ):
        options = LaunchOptions(given.kind, given.python, detach=True, settings=settings)
        runs.append(run_training(what, [*given.training, *more], options, given.steps))
        if runs[-1].error is not None:
            break
    cases = [_ran(what, ended) for what, ended in zip(("reference", "candidate"), runs)]
    comparison = None
    if all(case.good for case in cases):
        comparison = compare_runs(runs[0].run_dir, runs[1].run_dir, given.layer_tolerance, given.steps)
        cases += _sameness(runs[0].run, runs[1].run, comparison.loss)
        cases += _curves(comparison, given)
    return _report(given, runs, cases, comparison, time.monotonic() - began)


def _settings(given: CheckWords) -> tuple[Settings, Settings]:
    """Settings of the reference and of the candidate. Raises UsageError."""
    from fp8console.cli.settings import gather

    flags = []
    for word in given.settings:
        key, sign, value = word.partition("=")
        if not sign:
            raise UsageError(f"fp8console check: --set: {word!r} is not KEY=VALUE")
        flags.append(("--set", key, value))
    both = dataclasses.replace(
        gather(flags),
        seed=given.seed,
        stop_after=given.steps,
        total_steps=given.steps,
        layer_steps=max(1, given.steps // 200),
        layer_budget=1.0,
        snapshot_budget=0.0,
        checkpoint_minutes=0.0,
        layer_format=given.formats[0] if given.formats else None,
    )
    reference = dataclasses.replace(both, full_precision=given.reference == "fp32")
    if given.candidate_args is not None:
        return reference, both
    candidate = dataclasses.replace(
        both,
        emulate=given.formats[0] if given.formats else "e4m3fn",
        emulate_scaling=given.scaling,
        emulate_except=",".join(given.keep) or None,
        full_precision=given.reference == "fp32",
    )
    return reference, candidate


# -- the cases --------------------------------------------------------------------------------------------------------
def _ran(what: str, ended: EndedRun) -> Case:
    seconds = float(ended.run.info.get("ended") or 0) - float(ended.run.info.get("created") or 0)
    text = ended.error or f"{wording.plural(ended.steps, 'step')}, exit status {ended.status}"
    notes = [f"run directory: {ended.run_dir}"]
    emulation = next((event for event in ended.run.events.events if event["kind"] == "emulation"), None)
    verdict = "passed" if ended.error is None else "crashed"
    if emulation is not None:
        notes.append(str(emulation["text"]))
        if not emulation.get("layers"):
            verdict, text = "failed", "no Linear or convolution layer was called: nothing was in FP8"
    notes += [str(e["text"]) for e in ended.run.events.events if e["kind"] == "notice" and e.get("part") == "emulation"]
    return Case("training", f"{what} runs", verdict, text, max(0.0, seconds), notes)


def _sameness(reference: Any, candidate: Any, gap: Any) -> list[Case]:
    """Whether both runs began with the same weights and were fed the same data, as far as that can be told."""
    sides = [_fingerprints(run) for run in (reference, candidate)]
    cases = []
    same: dict[str, bool | None] = {}
    for what, words in (("weights", "weights at the start"), ("inputs", "inputs of the first steps")):
        keys = sorted(set(sides[0]) & set(sides[1]) & {key for side in sides for key in side if key[0] == what})
        alike = [key for key in keys if sides[0][key]["about"] == sides[1][key]["about"]]
        differing = [key for key in alike if sides[0][key]["digest"] != sides[1][key]["digest"]]
        same[what] = None if not alike else not differing
        if not alike:
            why = "in another precision or shape" if keys else "no module's forward was seen to take them"
            cases.append(Case("sameness", words, "skipped", f"not compared: {why}"))
        elif differing and (what == "weights" or differing[0][1] == 1):
            text = f"not the same from step {differing[0][1]}: the script draws from a generator that no seed reaches"
            cases.append(Case("sameness", words, "failed", text))
        elif differing:
            text = f"the same up to step {differing[0][1] - 1}; after that they depend on the weights, or on chance"
            cases.append(Case("sameness", words, "passed", text, notes=[text]))
        else:
            text = "the same" if what == "weights" else f"the same in {wording.plural(len(alike), 'step')}"
            cases.append(Case("sameness", words, "passed", text))
    if gap.first is None:
        cases.append(Case("sameness", "first loss", "skipped", "not known in both runs, or not finite"))
    elif gap.first > FIRST_LOSS:
        known = same["weights"] and same["inputs"]
        why = "a layer computes something else" if known else "a layer computes something else, or seeds or data differ"
        text = f"already {_percent(gap.first)} apart, more than rounding could explain: {why}"
        cases.append(Case("sameness", "first loss", "failed", text))
    else:
        cases.append(Case("sameness", "first loss", "passed", f"{_percent(gap.first)} apart"))
    return cases


def _fingerprints(run: Any) -> dict[tuple[str, int], dict[str, Any]]:
    found = {}
    for event in run.events.events:
        if event["kind"] == "fingerprint" and event.get("rank", 0) == 0:
            found[(str(event["what"]), int(event["step"]))] = event
    return found


def final_gap(gap: Any) -> str:
    """The gap at the end in words, and what it is a share of where that is not the reference's loss."""
    apart = abs(gap.final_candidate - gap.final_reference)
    if apart <= 1.001 * gap.final * abs(gap.final_reference):
        return _percent(gap.final)
    return f"{_percent(gap.final)} of {wording.figure(apart / gap.final)}, a twentieth of the first loss"


def _curves(comparison: Any, given: CheckWords) -> list[Case]:
    gap = comparison.loss
    cases = [_finite(comparison)]
    if gap.final is None:
        cases.append(Case("loss", "final gap", "failed", "no step has a finite loss in both runs"))
        return [*cases, _layers(comparison, given)]
    over = f"mean of {wording.plural(gap.window, 'step')}"
    final = f"{final_gap(gap)} ({wording.figure(gap.final_candidate)} against "
    final += f"{wording.figure(gap.final_reference)}, {over}), allowed {_percent(given.tolerance)}"
    cases.append(Case("loss", "final gap", "passed" if gap.final <= given.tolerance else "failed", final))
    worst = f"{_percent(gap.worst)} at step {gap.worst_step:,} ({over}), allowed {_percent(given.worst_tolerance)}"
    cases.append(Case("loss", "worst gap", "passed" if gap.worst <= given.worst_tolerance else "failed", worst))
    over = f"{gap.steps:,} of {given.steps:,} steps"
    enough = 2 * gap.steps >= gap.common
    if any(comparison.skipped):
        over += (
            f"; skipped by a scaler: {comparison.skipped[0]} in the reference, {comparison.skipped[1]} in the candidate"
        )
    cases.append(Case("loss", "compared", "passed" if enough else "failed", over))
    cases.append(_layers(comparison, given))
    return cases


def _layers(comparison: Any, given: CheckWords) -> Case:
    from fp8console.runs.compare import GRADIENT_FACTOR

    if comparison.problem is not None:
        return Case("layers", "errors", "skipped", f"not compared: {comparison.problem}")
    if comparison.fault is not None:
        return Case("layers", "errors", "failed", _place(comparison.fault))
    limit = _percent(given.layer_tolerance)
    early = _percent(GRADIENT_FACTOR * given.layer_tolerance)
    text = f"activations and weights within {limit}, the first gradients within {early}"
    return Case("layers", "errors", "passed", text)


def _finite(comparison: Any) -> Case:
    gap, place = comparison.loss, comparison.nonfinite
    where = "" if place is None else f"; first in layer {place.name}, {_kind(place.kind)}, at step {place.step:,}"
    if gap.candidate_nonfinite is not None and gap.candidate_nonfinite != gap.reference_nonfinite:
        text = f"the candidate's loss is not finite at step {gap.candidate_nonfinite:,}{where}"
        return Case("loss", "finite", "nonfinite", text)
    if place is not None:
        return Case("loss", "finite", "nonfinite", f"the candidate has NaN or inf where the reference has none{where}")
    if gap.reference_nonfinite is not None:
        text = f"the reference's own loss is not finite at step {gap.reference_nonfinite:,}; such steps are left out"
        return Case("loss", "finite", "passed", text, notes=[text])
    return Case("loss", "finite", "passed", "in both runs")


# -- the report -------------------------------------------------------------------------------------------------------
def _report(given: CheckWords, runs: list[EndedRun], cases: list[Case], comparison: Any, took: float) -> int:
    bad = [case for case in cases if not case.good]
    drift = None if comparison is None else _drift(comparison, given)
    if given.junit is not None:
        about = {"training": " ".join(given.training), "steps": str(given.steps), "tolerance": f"{given.tolerance:g}"}
        about.update(seed=str(given.seed), **({} if drift is None else {"first layer to drift": drift}))
        write(given.junit, "fp8console check", cases, about)
    if given.json:
        about_runs = [
            {"what": what, "run_dir": str(ended.run_dir), "exit_status": ended.status, "steps": ended.steps}
            for what, ended in zip(("reference", "candidate"), runs)
        ]
        said = [{**dataclasses.asdict(case), "good": case.good} for case in cases]
        compared = None if comparison is None else comparison.to_json()
        limits = {
            "tolerance": given.tolerance,
            "worst_tolerance": given.worst_tolerance,
            "layer_tolerance": given.layer_tolerance,
        }
        print(dumps({"passed": not bad, "runs": about_runs, "cases": said, "comparison": compared, **limits}))
        return 1 if bad else 0
    print("\n".join(_table(given, runs, cases, comparison, drift)))
    if bad:
        names = ", ".join(f"{case.group}: {case.name}" for case in bad)
        print(f"\nnot within the limits: {names}")
    else:
        print(f"\nwithin the limits, after {wording.duration(took)}")
    return 1 if bad else 0


def _table(given: CheckWords, runs: list[EndedRun], cases: list[Case], comparison: Any, drift: str | None) -> list[str]:
    rows = [["check", "result", ""]]
    rows += [[f"{case.group}: {case.name}", case.verdict, wording.printable(case.detail)] for case in cases]
    lines = wording.table(rows)
    for what, ended in zip(("reference", "candidate"), runs):
        lines.append(f"{what}: {ended.run_dir}")
    for case in cases[:2]:
        lines += [f"  {wording.printable(note)}" for note in case.notes[1:]]
    if comparison is None:
        return lines
    lines += ["", drift or ""]
    if comparison.layers:
        head = [
            "largest errors of layers' L2 norms",
            "tensor",
            "L2",
            "at step",
            "amax",
            f"past {_percent(given.layer_tolerance)}",
        ]
        table = [head]
        for error in comparison.layers[:ROWS]:
            first = "-" if error.first_step is None else f"from {error.first_step:,}"
            amax = wording.UNKNOWN if error.amax is None else _percent(error.amax)
            table.append(
                [wording.printable(error.name), _kind(error.kind), _percent(error.worst), f"{error.worst_step:,}"]
            )
            table[-1] += [amax, first]
        lines += wording.table(table, frozenset({2, 3, 4, 5}))
    return lines


def _drift(comparison: Any, given: CheckWords) -> str:
    limit = _percent(given.layer_tolerance)
    if comparison.problem is not None:
        return f"layers: not compared: {comparison.problem}"
    if comparison.drift is None:
        return f"layers: none drifts by more than {limit} in {wording.plural(comparison.layer_steps, 'sample')}"
    return f"first layer to drift by more than {limit}: {_place(comparison.drift)}"


def _place(place: Any) -> str:
    return (
        f"{wording.printable(place.name)}, its {_kind(place.kind)}, at step {place.step:,}: L2 "
        f"{wording.figure(place.candidate)} against {wording.figure(place.reference)}, {_percent(place.error)} apart"
    )


def _kind(kind: str) -> str:
    return kind.replace("_", " ")


def _percent(value: float | None) -> str:
    if value is None or math.isnan(value):
        return wording.UNKNOWN
    return "inf" if math.isinf(value) else f"{value * 100:.3g}%"
