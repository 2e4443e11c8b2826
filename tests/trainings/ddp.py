"""DDP under torchrun: ranks that drift (one sleeps now and then), a scaler, dropout. Paced by --pause."""

import time

import torch
import torch.distributed as dist
from common import arguments, batch, model

args = arguments(steps=2000, pause=0.005)
dist.init_process_group("gloo")
rank = dist.get_rank()
net = torch.nn.parallel.DistributedDataParallel(model())
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
torch.manual_seed(rank)
for step in range(args.steps):
    time.sleep(args.pause * (3 if (step + rank) % 7 == 0 else 1))
    x, y = batch()
    optimizer.zero_grad()
    scaler.scale(torch.nn.functional.mse_loss(net(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
dist.destroy_process_group()
