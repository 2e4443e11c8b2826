"""Backward passes, but neither an optimizer step nor zero_grad: no boundary can be seen."""

import torch

weight = torch.nn.Parameter(torch.ones(3))
for _ in range(60):
    weight.square().sum().backward()
    with torch.no_grad():
        weight -= 0.01 * weight.grad
    weight.grad = None
print("done")
