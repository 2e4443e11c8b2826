"""accelerate: prepared model, optimizer, loader and scheduler; accumulation of 2; clipping through the accelerator."""

import torch
from accelerate import Accelerator
from common import arguments, finish, model

args = arguments(steps=10)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
net = model()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=args.steps)
x = torch.randn(args.steps * 2 * 8, 8)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=8)
net, optimizer, loader, schedule = accelerator.prepare(net, optimizer, loader, schedule)
for inputs, wanted in loader:
    with accelerator.accumulate(net):
        loss = torch.nn.functional.mse_loss(net(inputs), wanted)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
finish(args, list(net.parameters()))
