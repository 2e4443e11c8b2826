"""Two ranks over gloo with Fp8GradScaler: DDP, both kinds of FSDP, and torch's own sharded scaler for comparison.

Started once per rank: scaler_ranks.py RANK STORE OUT. Writes what each case saw, per step, to OUT.RANK as JSON.
"""

import datetime
import json
import os
import sys
import traceback

import torch
import torch.distributed as dist
from common import batch, model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fp8console.numerics.convert import convert
from fp8console.numerics.fp8_linear import Fp8Recipe
from fp8console.numerics.scaler import Fp8GradScaler
from fp8console.numerics.sharded_scaler import Fp8ShardedGradScaler

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.4: its DTensors can't be unscaled, its sharded scaler raises with a fused optimizer
    fully_shard = None

rank, store, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", f"file://{store}", datetime.timedelta(seconds=60), rank=rank, world_size=2)


def net(counting=False):
    torch.manual_seed(5)
    made = model()
    if counting:
        convert(made, recipe=Fp8Recipe(forward_format=None))
    return made


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def train(module, scaler, steps=10, bad=(), fused=False, unscales=False, same=False):
    """Scales and local parameters after each step; in ``bad`` steps rank 1 alone has an inf in its gradients."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=fused)
    torch.manual_seed(100 if same else 100 + rank)  # data and dropout of its own

    def parameters():
        return float(torch.cat([local(p.detach()).reshape(-1) for p in module.parameters()]).double().sum()).hex()

    seen = {"scales": [], "parameters": [], "start": parameters()}
    for step in range(steps):
        x, y = batch()
        loss = torch.nn.functional.mse_loss(module(x), y) * (1.0 if same else 1000.0**rank)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if step in bad and rank == 1:
            local(next(p.grad for p in module.parameters() if p.grad is not None)).view(-1)[0] = float("inf")
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        seen["scales"].append(scaler.get_scale())
        seen["parameters"].append(parameters())
    if hasattr(scaler, "figures"):
        seen["figures"] = {name: str(value) for name, value in scaler.figures().items()}
    return seen


def ddp(counting=False, **settings):
    module = DistributedDataParallel(net(counting))
    scaler = Fp8GradScaler("cpu", **settings)
    scaler.watch(module)
    return train(module, scaler)


def fsdp1(made):
    return FullyShardedDataParallel(made, device_id=torch.device("cpu"), use_orig_params=True)


def fsdp2(made):
    for layer in (made[0], made[3]):
        fully_shard(layer)
    return fully_shard(made)


def sharded(wrap, scaler, watches=True, **options):
    module = wrap(net())
    if watches:
        scaler.watch(module)
    return train(module, scaler, bad=(3, 4, 7), **options)


def tensor_parallel():
    """The first layer's output is a DTensor, and so is its gradient."""
    torch.manual_seed(5)
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
    scaler = Fp8GradScaler("cpu")
    scaler.watch(parallelize_module(module, init_device_mesh("cpu", (2,)), plan))
    return train(module, scaler, same=True)


def ours(**settings):
    return Fp8ShardedGradScaler("cpu", **settings)


AS_TORCH = {"preset": "pytorch", "init_scale": 64.0}
CASES = {
    "ddp": lambda: ddp(),
    "ddp_counting": lambda: ddp(counting=True),
    "ddp_alone": lambda: ddp(process_group=None),
    "fsdp1": lambda: sharded(fsdp1, ours()),
    "fsdp1_unscales": lambda: sharded(fsdp1, ours(), unscales=True),
    "fsdp1_fused": lambda: sharded(fsdp1, ours(**AS_TORCH), fused=True),
    "fsdp1_fused_unscales": lambda: sharded(fsdp1, ours(**AS_TORCH), fused=True, unscales=True),
}
if fully_shard is not None:
    CASES |= {
        "fsdp1_fused_stock": lambda: sharded(
            fsdp1, ShardedGradScaler("cpu", init_scale=64.0), watches=False, fused=True
        ),
        "tensor_parallel": tensor_parallel,
        "fsdp2": lambda: sharded(fsdp2, ours()),
        "fsdp2_fused": lambda: sharded(fsdp2, ours(**AS_TORCH), fused=True),
    }

results = {}
for name, case in CASES.items():
    if len(sys.argv) > 4 and name not in sys.argv[4:]:
        continue
    try:
        results[name] = case()
    except Exception:
        results[name] = {"error": traceback.format_exc()}
        break  # the ranks may no longer be in step
with open(f"{out}.{rank}", "w") as file:
    json.dump(results, file)
dist.barrier()
os._exit(0)  # gloo's threads now and then abort an orderly exit ("terminate called without an active exception")
