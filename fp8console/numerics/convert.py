"""FP8 layers for whole models, chosen by the names of their modules."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from fp8console.numerics.fp8_linear import OCP, Fp8Conv2d, Fp8Layer, Fp8Linear, Fp8Recipe

BACKENDS = ("fp8console", "torchao")

#: Exact types: what a subclass's own forward does is not ours to replace.
_REPLACED_BY: dict[type[nn.Module], type[Fp8Layer]] = {nn.Linear: Fp8Linear, nn.Conv2d: Fp8Conv2d}


class NothingMatches(ValueError):
    """A pattern that no layer's name matches; its text is one line that lists the names there are."""


def convert(
    model: nn.Module,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    recipe: Fp8Recipe | None = None,
    backend: str = "fp8console",
) -> list[str]:
    """Make FP8 layers of the model's nn.Linear and nn.Conv2d modules, in place; the names of those changed.

    A layer is taken when its dotted name matches a pattern of ``include`` and none of ``exclude`` (``fnmatch``: ``*``
    spans dots; the model itself has the empty name). Modules and parameters stay the same objects, so optimizers,
    hooks and modules used in several places go on working. A layer that was converted before takes up ``recipe``
    (Fp8Recipe() unless given) unless it has it already. Subclasses of nn.Linear and nn.Conv2d are left alone.

    ``backend="torchao"``: see ``torchao_layers.convert_with_torchao``; it takes no ``recipe``.

    Raises NothingMatches, before anything is changed, and ValueError for another backend.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is one of {', '.join(BACKENDS)}, not {backend!r}")
    if backend == "torchao":
        from fp8console.numerics.torchao_layers import convert_with_torchao

        if recipe is not None:
            raise ValueError("backend='torchao' takes no recipe; use convert_with_torchao(..., config=...)")
        return convert_with_torchao(model, include, exclude)
    wanted = OCP if recipe is None else recipe
    layers = {
        name: module
        for name, module in model.named_modules()
        if type(module) in _REPLACED_BY or isinstance(module, Fp8Layer)
    }
    changed = []
    for name in chosen_names(list(layers), include, exclude):
        module = layers[name]
        if isinstance(module, Fp8Layer):
            if module.recipe == wanted:
                continue
            module.use_recipe(wanted, name)
        else:
            # Its class, not the module: whoever holds the module, or hooks on it, keeps what they have.
            module.__class__ = _REPLACED_BY[type(module)]
            assert isinstance(module, Fp8Layer)
            module.use_recipe(wanted, name)
        changed.append(name)
    return changed


def chosen_names(names: Sequence[str], include: Sequence[str], exclude: Sequence[str]) -> list[str]:
    """The names that a pattern of ``include`` matches and none of ``exclude``; every pattern has to match one.

    Raises NothingMatches, and TypeError for a lone string, whose letters would be taken for patterns.
    """
    for patterns in (include, exclude):
        if isinstance(patterns, str):
            raise TypeError(f"patterns come in a list: [{patterns!r}]")
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise NothingMatches(f"no layer's name matches {pattern!r}; there are: {_listed(names)}")
    return [
        name
        for name in names
        if any(fnmatchcase(name, pattern) for pattern in include)
        and not any(fnmatchcase(name, pattern) for pattern in exclude)
    ]


def _listed(names: Sequence[str], most: int = 40) -> str:
    """The names in one line, with an ellipsis and a count when there are many."""
    if not names:
        return "none that could be converted"
    shown = [name or "'' (the model itself)" for name in names[:most]]
    return ", ".join(shown) + (f", ... ({len(names)} in all)" if len(names) > most else "")
