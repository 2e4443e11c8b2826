"""accelerate with its scaler replaced by Fp8GradScaler before prepare(), accumulation of 2, saved and loaded again."""

import json
import sys

import torch
from accelerate import Accelerator
from common import model

from fp8console.numerics.scaler import Fp8GradScaler

BAD = 6


def prepared():
    torch.manual_seed(3)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerator.scaler = Fp8GradScaler("cpu", init_scale=4.0, fmt="e4m3", hysteresis=2, patience=1)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net, optimizer = accelerator.prepare(net, optimizer)
    accelerator.scaler.watch(net)
    return accelerator, net, optimizer


accelerator, net, optimizer = prepared()
x = torch.randn(24 * 8, 8, generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=8)
scales, weights, skipped = [], [], []
for index, (inputs, wanted) in enumerate(accelerator.prepare(loader)):
    with accelerator.accumulate(net):
        loss = torch.nn.functional.mse_loss(net(inputs), wanted)
        accelerator.backward(loss * float("inf") if index == 2 * BAD else loss)
        optimizer.step()
        if accelerator.sync_gradients:
            skipped.append(accelerator.optimizer_step_was_skipped)
            scales.append(accelerator.scaler.get_scale())
            weights.append(net[0].weight.sum().item().hex())
        optimizer.zero_grad()
accelerator.save_state("saved")
state = accelerator.scaler.state_dict()
other, _, _ = prepared()
other.load_state("saved")
with open(sys.argv[1], "w") as file:
    found = {"scales": scales, "weights": weights, "skipped": skipped}
    json.dump({**found, "state": repr(state), "loaded": repr(other.scaler.state_dict())}, file)
