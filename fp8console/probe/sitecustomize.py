"""Start of the probe in a training process; Python runs this by itself because its folder is on PYTHONPATH.

It puts nothing on the script's path: ``fp8console`` is found through a finder of its own, and the folder leaves
``sys.path`` again (it stays in the environment, for child processes). An existing sitecustomize is run as if this one
were not there. Any failure leaves the process as it was.
"""

import os
import sys


def _start() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    sys.path_importer_cache.pop(here, None)
    _run_hidden_sitecustomize()
    if "FP8CONSOLE_RUN_DIR" not in os.environ:
        return
    from importlib.machinery import PathFinder

    class PackageFinder:
        """Finds the probe's own copy of fp8console; everything else on its folder stays unseen."""

        @staticmethod
        def find_spec(name, path=None, target=None):  # type: ignore[no-untyped-def]
            return PathFinder.find_spec(name, [here]) if name == "fp8console" else None

    sys.meta_path.insert(0, PackageFinder)
    from fp8console.probe import install

    install.arm()


def _run_hidden_sitecustomize() -> None:
    """Load the sitecustomize that this one hides, under that name; as with plain python, none is fine."""
    ours = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        if ours is not None:
            sys.modules["sitecustomize"] = ours


try:
    _start()
except Exception as problem:  # a training without its probe is better than no training
    try:
        import json
        import time

        event = {"time": time.time(), "kind": "fault", "step": None, "part": "probe", "reason": repr(problem)}
        event["text"] = f"the probe did not start: {problem!r}; the training runs unmeasured"
        with open(os.path.join(os.environ["FP8CONSOLE_RUN_DIR"], "events.start.jsonl"), "a") as file:
            file.write(json.dumps(event) + "\n")
    except Exception:
        pass
