"""bf16 parameters beside a sparse embedding gradient with a row used twice, and fp32 ones."""

import torch
from common import arguments, finish, truth

args = arguments(steps=5)
table = torch.nn.Embedding(10, 4, sparse=True)
low = torch.nn.Linear(4, 300, bias=False, dtype=torch.bfloat16)
optimizer = torch.optim.SGD([*table.parameters(), *low.parameters()], lr=1e-3)
for _ in range(args.steps):
    optimizer.zero_grad()
    rows = table(torch.tensor([1, 1, 2, 7]))
    loss = low(rows.to(torch.bfloat16)).float().pow(2).sum()
    loss.backward()
    dense = table.weight.grad.to_dense().double()
    total = float((dense * dense).sum() + low.weight.grad.double().pow(2).sum())
    truth(loss=loss.item(), grad_norm=total**0.5, micro_batches=1, lr=1e-3, scale=None)
    optimizer.step()
finish(args, [*table.parameters(), *low.parameters()])
