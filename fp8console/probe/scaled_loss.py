"""Which of the losses that a script backpropagates carry the loss scale, and what they were before it."""

from __future__ import annotations

import weakref
from typing import Any

import torch

#: Key in an autograd node's metadata: its output was made by GradScaler.scale.
_MARK = "fp8console_scaled"
#: Pairs of a scaled loss and its original that are remembered.
_MOST = 8


class ScaledLosses:
    """Losses scaled since the last step. ``any`` says that there was one, tracked or not."""

    def __init__(self) -> None:
        self.any = False
        self._pairs: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = []

    def note(self, outputs: Any, scaled: Any) -> None:
        """``scaler.scale(outputs)`` has returned ``scaled``."""
        self.any = True
        for each in [scaled] if isinstance(scaled, torch.Tensor) else _tensors(scaled):
            if each.grad_fn is not None:
                metadata: Any = each.grad_fn.metadata
                metadata[_MARK] = True
        if isinstance(scaled, torch.Tensor) and isinstance(outputs, torch.Tensor):
            # The scaled loss holds the graph: a strong reference would keep the activations alive.
            self._pairs = [pair for pair in self._pairs if pair[0]() is not None][1 - _MOST :]
            self._pairs.append((weakref.ref(scaled), outputs.detach()))

    def backpropagated(self, tensors: Any, gradients: Any) -> tuple[torch.Tensor, bool] | None:
        """The loss that ``backward(tensors, gradients)`` works on, and whether it still carries the loss scale.

        None when there is not one number.
        """
        tensor = tensors if isinstance(tensors, torch.Tensor) else None
        if tensor is None and isinstance(tensors, (list, tuple)) and len(tensors) == 1:
            tensor = tensors[0]
            gradients = gradients[0] if isinstance(gradients, (list, tuple)) and gradients else gradients
        if tensor is None or tensor.numel() != 1 or tensor.is_sparse or hasattr(tensor, "_local_tensor"):
            return None
        original = self.original(tensor)
        # Scaled, then changed (divided, added up): only the scale can be taken out.
        carries_scale = original is None and self.carries_scale(tensor)
        tensor = tensor if original is None else original
        if isinstance(gradients, torch.Tensor) and gradients.numel() == 1:
            # backward(gradient) works on gradient * loss: -1 turns it round, 1/n divides it.
            tensor = tensor.detach().reshape(()) * gradients.detach().reshape(())
        return tensor, carries_scale

    def original(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What ``tensor`` was before it was scaled; None when it is no scaled loss itself."""
        return next((unscaled for reference, unscaled in self._pairs if reference() is tensor), None)

    def carries_scale(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` was made from a scaled loss: divided, added up."""
        return self.any and _made_from_scaled(tensor)

    def clear(self) -> None:
        self.any = False
        self._pairs.clear()


def _made_from_scaled(tensor: torch.Tensor, most: int = 64) -> bool:
    """Whether a scaled loss lies within the last few operations that made ``tensor``."""
    nodes = [tensor.grad_fn]
    for node in nodes:
        if node is None:
            continue
        metadata: Any = node.metadata
        if _MARK in metadata:
            return True
        if len(nodes) < most:
            nodes += [following for following, _ in node.next_functions]
    return False


def _tensors(outputs: Any) -> list[torch.Tensor]:
    return [item for item in outputs if isinstance(item, torch.Tensor)] if isinstance(outputs, (list, tuple)) else []
