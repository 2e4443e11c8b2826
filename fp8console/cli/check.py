"""``fp8console check``: is the device's FP8 right, and does a training in FP8 go where it goes without? For CI."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fp8console.cli.arguments import UsageError
from fp8console.cli.check_words import CheckWords, parse
from fp8console.protocol.numbers import dumps


def main(words: Sequence[str]) -> int:
    """Checks the device or, with a training, the training; 0 when all is within its limits, else 1."""
    given = parse(words)
    if given.junit is not None and not given.junit.parent.is_dir():
        raise UsageError(f"fp8console check: --junit {given.junit}: no such folder: {given.junit.parent}")
    if given.training:
        from fp8console.cli.check_training import check_training

        return check_training(given)
    return _check_device(given)


def _check_device(given: CheckWords) -> int:
    from fp8console.cli.check_device import HEAD, DeviceCheck, heading, row
    from fp8console.cli.junit import Case, write
    from fp8console.cli.launch import LaunchError, choose_python

    try:
        python = choose_python(given.python)
    except LaunchError as error:
        raise UsageError(str(error)) from None
    checking = DeviceCheck(python, given.device, given.formats, given.timeout)
    began = time.monotonic()

    def told(case: Case | None) -> None:
        if given.json:
            return
        if case is None:
            print(f"{heading(checking.machine)}\n\n{HEAD}", flush=True)
        else:
            print("\n".join(row(checking.checks[-1])), flush=True)

    checking.run(told)
    bad = [case for case in checking.cases if not case.good]
    took = time.monotonic() - began
    if given.junit is not None:
        about = {name: str(value) for name, value in checking.machine.items() if value is not None}
        write(given.junit, "fp8console check", checking.cases, {**about, "interpreter": python})
    if given.json:
        print(dumps({"passed": not bad, "machine": checking.machine, "checks": checking.checks, "seconds": took}))
    elif bad:
        names = ", ".join(f"{case.group} {case.name}" for case in bad)
        print(f"\n{len(bad)} of {len(checking.cases)} checks failed: {names}")
    else:
        print(f"\nall {len(checking.cases)} checks passed in {took:.1f} s")
    return 1 if bad else 0
