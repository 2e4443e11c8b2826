"""Notes its whole state before the first forward and at the end, however that comes: they are to be equal."""

import argparse
import hashlib
import json
import random

import numpy
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--scaler", action="store_true")
parser.add_argument("--raise-at", type=int)
parser.add_argument("--overflow", action="store_true")
args = parser.parse_args()
torch.manual_seed(3)
net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
scale = {"init_scale": 2.0**127, "backoff_factor": 0.99} if args.overflow else {"init_scale": 1024.0}
scaler = torch.amp.GradScaler("cpu", enabled=args.scaler, **scale)


def told(value):
    if isinstance(value, torch.Tensor):
        return hashlib.sha256(value.detach().contiguous().numpy().tobytes()).hexdigest()
    if isinstance(value, numpy.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): told(item) for key, item in value.items()}
    return [told(item) for item in value] if isinstance(value, (list, tuple)) else repr(value)


def state():
    return {
        "model": told(net.state_dict()),
        "optimizer": told(optimizer.state_dict()),
        "scheduler": told(schedule.state_dict()),
        "scaler": told(scaler.state_dict()),
        "random": [told(torch.get_rng_state()), told(random.getstate()), told(numpy.random.get_state())],
    }


before, done = None, 0
try:
    for step in range(1, args.steps + 1):
        if step == args.raise_at:
            raise ValueError("no more data")
        done = step
        x = torch.randn(16, 8) + random.random() + numpy.random.rand()
        before = before or state()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), torch.randint(0, 4, (16,)))
        scaler.scale(loss * 1e9 if args.overflow else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
finally:
    with open(args.out, "w") as file:
        json.dump({"before": before, "after": state(), "done": done}, file)
