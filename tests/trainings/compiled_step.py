"""The optimizer step compiled: our hooks must neither be traced into its graphs nor add breaks to them."""

import torch
from common import arguments, batch, finish, model

args = arguments(steps=24)
net = model()
optimizer = torch.optim.SGD(net.parameters(), lr=torch.tensor(1e-2))


@torch.compile(backend="eager")
def update():
    optimizer.step()


for _ in range(args.steps):
    x, y = batch()
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(net(x), y).backward()
    update()
finish(args, list(net.parameters()))
