"""What a Python has of torch and its relatives, as JSON lines: run by its path, in the Python that is asked.

Imports nothing of ours, and torch only when it comes to that, so that a torch that can't be imported is an answer too.
Each line is one object of facts; ``{"begin": WHAT}`` says what comes next, so that whoever reads knows what hung.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable
from typing import Any

#: Distributions by the name we use for them; the first that is installed counts.
DISTRIBUTIONS = {
    "torch": ("torch",),
    "torchao": ("torchao",),
    "transformer_engine": ("transformer_engine", "transformer-engine", "transformer_engine_rocm"),
    "amdsmi": ("amdsmi",),
}
#: Bytes of the tensor that is copied, if the device has four times that free, and copies timed.
COPY_BYTES = 1 << 30
COPIES = 7


def main(words: list[str]) -> None:
    """Say all there is to say; ``--bandwidth`` times copies, ``--without PACKAGE`` keeps one from being imported."""
    # Libraries print on file descriptor 1: it goes where stderr goes, and our lines have a way of their own.
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**facts: Any) -> None:
        lines.write(json.dumps(facts) + "\n")
        lines.flush()

    say(python={"executable": sys.executable, "version": platform.python_version()}, packages=packages())
    if "--without" in words:
        blocked: Any = None
        sys.modules[words[words.index("--without") + 1]] = blocked
    if importlib.util.find_spec("torch") is None:
        say(end=True)
        return
    say(begin="import torch")
    try:
        import torch
    except Exception as error:
        say(import_error=f"{type(error).__name__}: {error}".splitlines()[0], end=True)
        return
    say(torch=build(torch))
    tell_devices(torch, say)
    if "--bandwidth" in words:
        tell_bandwidth(torch, say)
    say(end=True)


def packages() -> dict[str, str]:
    """Versions of what is installed; "unknown" for a package without metadata."""
    from importlib import metadata

    found = {}
    for name, distributions in DISTRIBUTIONS.items():
        for distribution in distributions:
            try:
                found[name] = metadata.version(distribution)
                break
            except Exception:
                continue
        else:
            try:
                if importlib.util.find_spec(name) is not None:
                    found[name] = "unknown"
            except Exception:
                pass
    return found


def build(torch: Any) -> dict[str, Any]:
    """torch's version, and what it was built for."""
    version = getattr(torch, "version", None)
    return {
        "version": str(torch.__version__),
        "hip": getattr(version, "hip", None),
        "cuda": getattr(version, "cuda", None),
        "file": getattr(torch, "__file__", None),
    }


def tell_devices(torch: Any, say: Callable[..., None]) -> None:
    """How many devices torch sees, by its own count and the runtime's, and what they are."""
    say(begin="counting torch's devices")
    count, error = _tried(torch.cuda.device_count)
    say(count=count, count_error=error)
    if not (torch.version.hip or torch.version.cuda):
        return
    say(archs=_tried(torch.cuda.get_arch_list)[0])
    # Before the first use of a device torch may count through a management library; this asks the runtime.
    say(begin="asking the GPU runtime")
    runtime, error = _tried(lambda: torch._C._cuda_getDeviceCount())
    say(runtime_count=runtime, runtime_error=error)
    if runtime:
        say(begin="reading the devices' properties")
        devices = [_tried(functools.partial(properties, torch, index)) for index in range(runtime)]
        say(devices=[device or {"name": "unknown", "error": error} for device, error in devices])
    say(nccl=_tried(lambda: ".".join(map(str, torch.cuda.nccl.version())))[0])


def properties(torch: Any, index: int) -> dict[str, Any]:
    """One device as torch tells it."""
    about = torch.cuda.get_device_properties(index)
    return {
        "name": str(about.name),
        "arch": str(getattr(about, "gcnArchName", "") or ""),
        "capability": [int(about.major), int(about.minor)],
        "memory": int(about.total_memory),
    }


def tell_bandwidth(torch: Any, say: Callable[..., None]) -> None:
    """Bytes read and written a second by a copy, for each device in turn."""
    rates = []
    for index in range(torch.cuda.device_count()):
        say(begin=f"timing a copy on device {index}")
        rate, error = _tried(functools.partial(copy_rate, torch, f"cuda:{index}"))
        rates.append({"index": index, "bytes_per_second": rate, "error": error})
    say(bandwidth=rates)


def copy_rate(torch: Any, device: str, most: int = COPY_BYTES) -> float:
    """The median of a few timed copies within a device's memory, in bytes read and written a second."""
    import time

    gpu = not device.startswith("cpu")
    size = min(most, torch.cuda.mem_get_info(device)[0] // 4) if gpu else most
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(COPIES):
        if gpu:
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(4):
            target.copy_(source)
        if gpu:
            torch.cuda.synchronize(device)
        seconds.append((time.perf_counter() - began) / 4)
    return 2 * size / sorted(seconds)[COPIES // 2]


def _tried(function: Callable[[], Any]) -> tuple[Any, str | None]:
    try:
        return function(), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}".splitlines()[0][:300]


if __name__ == "__main__":
    main(sys.argv[1:])
