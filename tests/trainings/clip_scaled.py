"""A script's fault: it clips gradients that still carry the loss scale."""

import torch
from common import arguments, batch, finish, model, norm, truth

args = arguments()
net = model()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
for _ in range(args.steps):
    x, y = batch()
    loss = torch.nn.functional.mse_loss(net(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    truth(loss=loss.item(), grad_norm=norm(net.parameters(), 512.0), scale=512.0, lr=1e-2, micro_batches=1)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
finish(args, list(net.parameters()))
