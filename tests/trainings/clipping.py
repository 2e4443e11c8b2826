"""Gradients whose norm is known: near 1, and 20 times that at every ``--every``-th step from ``--begin`` to ``--end``.

With ``--wait FILE`` it counts those steps from when that file is there, and takes ordinary ones until then.
"""

import math
import os
import time

import torch
from common import arguments, finish, truth

args = arguments(steps=400, begin=100, end=250, every=5, limit=0.0, wait="")
LR = 0.01
direction = torch.tensor([0.6, 0.8, 0.0, 0.0])
weight = torch.nn.Parameter(torch.zeros(4))
optimizer = torch.optim.SGD([weight], lr=LR)
step = 0
while step < args.steps:
    if args.wait and not os.path.exists(args.wait):
        time.sleep(0.01)
    else:
        step += 1
    norm = 1 + 0.05 * math.sin(1.7 * step)
    if args.begin <= step < args.end and step % args.every == 0:
        norm *= 20
    optimizer.zero_grad()
    loss = (weight * direction).sum() * norm
    loss.backward()
    if args.limit:
        torch.nn.utils.clip_grad_norm_([weight], args.limit)
    before = weight.detach().double()
    optimizer.step()
    moved = float((weight.detach().double() - before).norm()) / LR  # the norm that the optimizer was given
    truth(loss=loss.item(), grad_norm=norm, micro_batches=1, lr=LR, scale=None, moved=moved)
finish(args, [weight])
