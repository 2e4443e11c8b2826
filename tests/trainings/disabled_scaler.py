"""GradScaler for a device that is not there: it disables itself."""

import warnings

import torch
from common import arguments, batch, finish, model, norm, truth

warnings.simplefilter("ignore")
args = arguments()
net = model()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cuda", enabled=False)
for _ in range(args.steps):
    x, y = batch()
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(net(x), y)
    scaler.scale(loss).backward()
    truth(loss=loss.item(), grad_norm=norm(net.parameters()), micro_batches=1, lr=1e-2, scale=None)
    scaler.step(optimizer)
    scaler.update()
finish(args, list(net.parameters()))
