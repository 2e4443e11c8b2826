"""A small GAN: two optimizers, one step each per iteration; the discriminator's comes first."""

import torch
from common import arguments, finish, norm, truth

args = arguments()
g = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
d = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
opt_g = torch.optim.Adam(g.parameters(), lr=1e-3)
opt_d = torch.optim.Adam(d.parameters(), lr=2e-3)
bce = torch.nn.functional.binary_cross_entropy_with_logits
for _ in range(args.steps):
    real, fake = torch.randn(16, 8) + 1, g(torch.randn(16, 4))
    opt_d.zero_grad()
    real_loss = bce(d(real), torch.ones(16, 1))
    real_loss.backward()
    fake_loss = bce(d(fake.detach()), torch.zeros(16, 1))
    fake_loss.backward()
    norm_d = norm(d.parameters())
    opt_d.step()
    opt_g.zero_grad()
    g_loss = bce(d(fake), torch.ones(16, 1))
    g_loss.backward()
    norm_g = norm(g.parameters())
    opt_g.step()
    losses = [real_loss.item(), fake_loss.item(), g_loss.item()]
    truth(loss=sum(losses) / 3, grad_norm=(norm_d**2 + norm_g**2) ** 0.5, micro_batches=3, lr=1e-3, scale=None)
finish(args, [*g.parameters(), *d.parameters()])
