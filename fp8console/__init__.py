"""fp8console: launch, watch and steer PyTorch training in low precision.

A training script needs nothing from here. One that wants its data rewound with its weights, or that has its own idea
of a step, may use ``attach``, which does nothing outside the console.
"""

from __future__ import annotations

__version__ = "0.1.0"
__all__ = ["__version__", "attach"]

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8console.probe.api import attach


def __getattr__(name: str) -> Any:
    # Lazily: importing the package must stay free of torch for everything but a training.
    if name == "attach":
        from fp8console.probe.api import attach

        return attach
    raise AttributeError(f"module 'fp8console' has no attribute {name!r}")
