"""A training with one thing wrong, named by ``--fault``; sound without."""

import argparse
import warnings

import torch

warnings.simplefilter("ignore")
parser = argparse.ArgumentParser()
parser.add_argument("--fault", default="none")
parser.add_argument("--steps", type=int, default=12)
fault = parser.parse_args()
torch.manual_seed(1)
half = fault.fault == "half"
rows, width = (10, 20) if fault.fault == "clip" else (64, 32)
net = torch.nn.Sequential(torch.nn.Linear(width, 48), torch.nn.GELU(), torch.nn.Linear(48, 16))
if half:
    net = net.half()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, eps=1e-8)
# On a machine without a GPU the first kind disables itself.
scaler = torch.amp.GradScaler() if fault.fault == "gone" else torch.amp.GradScaler("cpu")
for _ in range(fault.steps):
    x = torch.randn(rows, width).to(next(net.parameters()).dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=not half):
        loss = net(x).float().square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if fault.fault == "clip":
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    else:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
