"""Gradients and losses that are not ordinary numbers: NaN, inf, and finite ones whose squares leave float32."""

import torch
from common import arguments, finish, norm, truth

args = arguments(steps=7)
weight = torch.nn.Parameter(torch.zeros(4))
optimizer = torch.optim.SGD([weight], lr=0.0)
for factor in (1.0, float("nan"), float("inf"), 1e25, 1e-30, -float("inf"), 2.0):
    optimizer.zero_grad()
    loss = (weight * torch.tensor([3.0, 4.0, 0.0, 0.0])).sum() * factor + factor
    loss.backward()
    # For inf: 0 * inf is NaN in two of the gradient's elements, so the norm truly is NaN.
    truth(loss=loss.item(), grad_norm=norm([weight]), micro_batches=1, lr=0.0, scale=None)
    optimizer.step()
finish(args, [weight])
