"""Fused AdamW with a scaler, and an overflow at step 5: the Python step() runs, the kernel skips."""

import common
import torch
from common import arguments, batch, finish, model, norm, truth

args = arguments(overflow_at=5)
net = model()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for step in range(1, args.steps + 1):
    x, y = batch()
    loss = torch.nn.functional.mse_loss(net(x), y)
    scale = scaler.get_scale()
    scaler.scale(loss).backward()
    if step == args.overflow_at:
        net[0].weight.grad[0, 0] = float("inf")
    before = [p.detach().clone() for p in net.parameters()]
    truth(loss=loss.item(), grad_norm=norm(net.parameters(), scale), scale=scale, lr=1e-2, micro_batches=1)
    scaler.step(optimizer)
    scaler.update()
    common.TRUTH[-1]["skipped"] = all(torch.equal(a, b) for a, b in zip(before, net.parameters()))
    optimizer.zero_grad()
finish(args, list(net.parameters()))
