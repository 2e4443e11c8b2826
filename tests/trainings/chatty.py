"""Prints as fast as it can, for a while, beside a training; then says how many lines it printed."""

import sys
import time

import torch

weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([weight], lr=0.1)
end = time.monotonic() + float(sys.argv[1])
lines = steps = 0
while time.monotonic() < end:
    for _ in range(500):
        print(f"line {lines} of a script that talks a lot: \x1b[31mred\x1b[0m and more", flush=False)
        lines += 1
    optimizer.zero_grad()
    weight.square().sum().backward()
    optimizer.step()
    steps += 1
print(f"printed {lines} lines, {steps} steps")
