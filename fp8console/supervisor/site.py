"""The folder that brings the probe into a training: our package's training side, and a sitecustomize.

A copy in the run directory, made once: an upgrade of fp8console in the middle of a week-long run then can't mix
versions between the training's processes, and nothing else that is installed beside the console reaches the script.
"""

from __future__ import annotations

import shutil
from pathlib import Path

#: What a training process may import of fp8console.
TRAINING_SIDE = ("protocol", "probe", "numerics")


def build(site: Path) -> None:
    """Fill ``site``. Raises OSError when it can't be written."""
    package = Path(__file__).resolve().parent.parent
    target = site / "fp8console"
    target.mkdir(parents=True, mode=0o700)
    shutil.copy2(package / "__init__.py", target / "__init__.py")
    for name in TRAINING_SIDE:
        # Compiled files come along: their stamps stay right because copying keeps the sources' times.
        shutil.copytree(package / name, target / name, copy_function=shutil.copy2)
    shutil.copy2(package / "probe" / "sitecustomize.py", site / "sitecustomize.py")
