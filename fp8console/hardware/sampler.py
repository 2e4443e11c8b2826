"""The process that reads GPUs and the host, once a second, and prints one JSON line a sample on its stdout.

It is a process of its own because drivers and libraries print, hang and crash; it alone loads them. Its supervisor
kills it when it falls silent (launcher.py). Before each part (a source while it is looked for, a source's GPU, or
"host") it prints ``{"reading": part}``, so that the one that hung is known and can be left out of the next try. It ends
when its stdin closes, and takes its own children along.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fp8console.hardware import detect
from fp8console.hardware.chain import SOURCES, Chain
from fp8console.hardware.sources.host import Host

#: Seconds until a part that made an earlier sampler hang is tried again, and cards are looked for where none is known.
RETRY_SECONDS = 120.0


def main(arguments: list[str] | None = None) -> None:
    """Sample until stdin closes or stdout's reader is gone."""
    parser = argparse.ArgumentParser(prog="fp8console.hardware.sampler", description=__doc__)
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between samples")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--pid", type=int, help="the training's process")
    parser.add_argument("--sysfs", type=Path, help="read this folder in place of /sys")
    parser.add_argument("--skip", action="append", default=[], metavar="PART", help="a part that hung before")
    parser.add_argument("--source", choices=SOURCES, help="only this source of GPU values")
    options = parser.parse_args(arguments)

    pipe = _own_stdout()
    threading.Thread(target=_exit_with_stdin, daemon=True).start()
    root = options.sysfs or Path(os.environ.get("SYSFS_PATH") or "/sys")
    try:
        _sample_for_ever(pipe, options, root)
    except BrokenPipeError:
        pass


def _sample_for_ever(pipe: int, options: argparse.Namespace, root: Path) -> None:
    again_at = time.monotonic() + RETRY_SECONDS
    skipped = set(options.skip)

    def reading(part: str) -> None:
        _print(pipe, {"reading": part})

    def look() -> Chain:
        openers = detect.openers(root, options.source)
        return Chain(openers, reading, skipped, options.source, detect.nothing(root))

    chain = look()
    host = Host(options.run_dir, options.pid)
    due = time.monotonic()
    while True:
        sample = sweep(chain, host, skipped, reading)
        _print(pipe, sample)
        if time.monotonic() >= again_at:
            again_at = time.monotonic() + RETRY_SECONDS
            # Nothing known of any card: a driver may be loaded, or have come back, while we are here.
            again = bool(skipped & set(SOURCES)) or all(gpu["source"] == "none" for gpu in sample["gpus"])
            skipped.clear()
            if again:
                chain.close()
                chain = look()
        due += options.interval
        pause = due - time.monotonic()
        if pause > 0:
            time.sleep(pause)
        else:
            due = time.monotonic()  # late: the missed samples are not made up for


def sweep(chain: Chain, host: Host, skipped: set[str], reading: Callable[[str], None]) -> dict[str, Any]:
    """One sample of everything; ``reading`` is called with each part's name before it is touched."""
    host_sample: dict[str, Any] = {}
    if "host" not in skipped:
        reading("host")
        host_sample = host.read()
    began = time.monotonic()
    gpus = chain.sweep(host.pids)
    took = time.monotonic() - began
    reason = chain.reason(gpus)
    if "host" in skipped:
        host_reason = "the host's figures did not come and are left out for now"
        reason = f"{reason}; {host_reason}" if reason else host_reason
    for gpu in gpus:
        if gpu["age"] is not None and took > 0.1:  # a slow sweep: the first card's values are that old
            gpu["age"] = round(gpu["age"] + took, 1)
    used = {gpu["source"] for gpu in gpus}
    return {
        "time": time.time(),
        "source": next((name for name in SOURCES if name in used), "none"),
        "reason": reason,
        "gpus": gpus,
        "host": host_sample,
    }


def _own_stdout() -> int:
    """The pipe to the supervisor under a number of its own; what anything prints on 1 and 2 goes nowhere."""
    pipe = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    return pipe


def _exit_with_stdin() -> None:
    # A thread, for the main one may be stuck in a read that never returns.
    while os.read(0, 4096):
        pass
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _print(pipe: int, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(pipe, data) :]


if __name__ == "__main__":
    main(sys.argv[1:])
