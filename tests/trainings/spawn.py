"""Two processes through mp.spawn, with gloo, and a DataLoader with workers in each."""

import os
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def train(rank, port, steps):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    data = torch.utils.data.TensorDataset(torch.randn(steps * 4, 8))
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    for (x,) in loader:
        optimizer.zero_grad()
        net(x).pow(2).mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(train, args=(port, int(sys.argv[1]) if len(sys.argv) > 1 else 10), nprocs=2)
    print("spawned", __name__, sys.argv[0])
