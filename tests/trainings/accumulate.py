"""Gradient accumulation of 4 with a loss scaler, correct clipping and a schedule."""

import common
import torch
from common import arguments, batch, finish, model, norm, truth

args = arguments(accumulate=4)
net = model()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
for _ in range(args.steps):
    losses = []
    for _micro in range(args.accumulate):
        x, y = batch()
        loss = torch.nn.functional.mse_loss(net(x), y) / args.accumulate
        losses.append(loss.item())
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    before = norm(net.parameters())
    total = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
    truth(
        loss=sum(losses) / len(losses),
        grad_norm=before,
        clip_coef=min(1.0, 0.05 / (before + 1e-6)),
        lr=optimizer.param_groups[0]["lr"],
        scale=scaler.get_scale(),
        micro_batches=args.accumulate,
        skipped=False,
    )
    scaler.step(optimizer)
    scaler.update()
    common.TRUTH[-1]["growth_tracker"] = scaler._get_growth_tracker()
    optimizer.zero_grad()
    schedule.step()
finish(args, list(net.parameters()))
