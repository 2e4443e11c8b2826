"""An optimizer for each parameter, stepped by a gradient hook inside backward, which frees the gradient at once."""

import math

import torch
from common import arguments, batch, finish, model, norm, truth

args = arguments()
net = model()
optimizers = {p: torch.optim.SGD([p], lr=1e-2) for p in net.parameters()}
seen = []


def step_now(parameter):
    seen.append(norm([parameter]))
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for p in net.parameters():
    p.register_post_accumulate_grad_hook(step_now)
for _ in range(args.steps):
    seen.clear()
    x, y = batch()
    loss = torch.nn.functional.mse_loss(net(x), y)
    value = loss.item()
    loss.backward()
    truth(loss=value, grad_norm=math.hypot(*seen), micro_batches=1, lr=1e-2, scale=None)
finish(args, list(net.parameters()))
