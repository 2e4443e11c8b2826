"""Fp8GradScaler in a loop with spikes and bad steps; before each step its whole state goes to --out, a line."""

import json
import time

import torch
from common import arguments, batch, model

from fp8console.numerics.convert import convert
from fp8console.numerics.fp8_linear import Fp8Recipe
from fp8console.numerics.scaler import Fp8GradScaler

args = arguments(steps=100000, pause=0.004)
net = model()
convert(net, recipe=Fp8Recipe(forward_format=None))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
scaler = Fp8GradScaler("cpu", init_scale=65536.0, underflow_tolerance=0.0)
scaler.watch(net)
with open(args.out, "w") as file:
    for step in range(args.steps):
        if scaler._scale is not None:
            file.write(json.dumps({name: repr(value) for name, value in scaler.figures().items()}) + "\n")
        else:
            file.write("{}\n")
        file.flush()
        time.sleep(args.pause)
        x, y = batch()
        loss = torch.nn.functional.mse_loss(net(x), y) * (2.0**20 if step % 11 == 10 else 1.0)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if step % 7 == 5:
            net[0].weight.grad[0, 0] = float("nan")
        scaler.step(optimizer)
        scaler.update()
