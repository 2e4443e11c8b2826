"""A compiled model; the number of graphs is written out, to compare with and without the probe."""

import torch
from common import arguments, batch, finish, model, norm, truth

args = arguments(steps=6)
net = model()
graphs = []


def backend(graph, inputs):
    graphs.append(len(graph.graph.nodes))
    return graph.forward


compiled = torch.compile(net, backend=backend)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
for _ in range(args.steps):
    x, y = batch()
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(compiled(x), y)
    loss.backward()
    truth(loss=loss.item(), grad_norm=norm(net.parameters()), micro_batches=1, lr=1e-2, scale=None)
    optimizer.step()
print("graphs", graphs)
finish(args, list(net.parameters()))
