"""LBFGS: the closure runs forward and backward many times within one step."""

import torch
from common import arguments, finish, norm, truth

args = arguments(steps=6)
net = torch.nn.Linear(8, 1)
x = torch.randn(64, 8)
y = x.sum(1, keepdim=True).sin()
optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4)
for _ in range(args.steps):
    seen = []

    def closure(seen=seen):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(net(x), y)
        loss.backward()
        seen.append(loss.item())
        return loss

    optimizer.step(closure)
    truth(loss=seen[0], grad_norm=norm(net.parameters()), micro_batches=1, lr=0.5, scale=None)
finish(args, list(net.parameters()))
