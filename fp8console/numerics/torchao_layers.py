"""torchao's FP8 training layers: real FP8 products where the device has them, emulated where it hasn't."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from fp8console.numerics.convert import chosen_names
from fp8console.numerics.devices import architecture, hardware_formats

#: torch's FP8 product takes matrices whose sides are multiples of this.
_SIDE = 16


class NoTorchao(ImportError):
    """torchao is missing or does not fit this torch; its text is one line that says what to install."""


def convert_with_torchao(
    model: nn.Module,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    config: Any = None,
    emulate: bool | None = None,
) -> list[str]:
    """Make torchao's Float8Linear of the model's linear layers, in place; the names of those changed.

    ``config`` is a torchao Float8LinearConfig, else dynamic tensorwise scaling with ``emulate``: None means where the
    layers' device has no FP8 products. Names are chosen as in ``convert``. Modules are new objects (hooks stay behind),
    parameters the same ones. Counts of saturated and flushed values are not to be had from torchao's layers.

    Raises NoTorchao, NothingMatches, and ValueError for a model that is a linear layer itself, for ``config`` together
    with ``emulate``, and for layers of which the device's product can't take the shape.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear
    except ImportError as error:
        raise NoTorchao(f"torchao's FP8 layers can't be loaded ({error}): pip install 'fp8console[torchao]'") from error

    if config is not None and emulate is not None:
        raise ValueError("give config or emulate, not both: config has an emulate of its own")
    if isinstance(model, nn.Linear):
        raise ValueError("torchao can't convert a model that is a linear layer itself: put it into nn.Sequential")
    layers = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if type(module) is nn.Linear or isinstance(module, Float8Linear)
    }
    names = [
        name for name in chosen_names(list(layers), include, exclude) if not isinstance(layers[name], Float8Linear)
    ]
    if config is None:
        if emulate is None:
            emulate = not all(hardware_formats(architecture(layers[name].weight.device)) for name in names)
        config = Float8LinearConfig(emulate=emulate)
    if not config.emulate:
        odd = [name for name in names if any(side % _SIDE for side in layers[name].weight.shape)]
        if odd:
            raise ValueError(f"sides that are no multiple of {_SIDE}: exclude {', '.join(odd)}, or emulate")

    converted: dict[nn.Module, nn.Module] = {}
    for name in names:
        layer = layers[name]
        if layer not in converted:
            # One at a time: of a module that is used in several places torchao replaces some places only.
            alone = convert_to_float8_training(nn.Sequential(layer), config=config)
            converted[layer] = alone[0].train(layer.training)
        parent, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(parent), own_name, converted[layer])
    return names
