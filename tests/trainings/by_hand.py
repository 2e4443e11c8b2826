"""No optimizer: parameters are updated by hand, and zero_grad begins each iteration."""

import torch
from common import arguments, batch, finish, model, norm, truth

args = arguments()
net = model()
for _ in range(args.steps):
    net.zero_grad()
    x, y = batch()
    loss = torch.nn.functional.mse_loss(net(x), y)
    loss.backward()
    truth(loss=loss.item(), grad_norm=norm(net.parameters()), micro_batches=1, lr=None, scale=None)
    for parameter in net.parameters():
        parameter.data.add_(parameter.grad, alpha=-0.05)
finish(args, list(net.parameters()))
