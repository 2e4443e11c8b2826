"""Shared by the small trainings here: they note, in plain PyTorch and float64, what each step truly was.

A training appends to ``TRUTH`` what a record must hold; ``finish`` writes that, and the final parameters, to the file
named by ``--out``. Nothing here knows of the console.
"""

import argparse
import json
import math

import torch

TRUTH = []


def arguments(**defaults):
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--steps", type=int, default=defaults.pop("steps", 12))
    parser.add_argument("--seed", type=int, default=1)
    for name, value in defaults.items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), default=value)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    return args


def norm(parameters, divide_by=1.0):
    """Global L2 norm of the gradients, element by element in float64."""
    total = 0.0
    for parameter in parameters:
        if parameter.grad is not None:
            values = parameter.grad.detach().to(torch.float64) / divide_by
            total += float((values * values).sum())
    return math.sqrt(total) if math.isfinite(total) else total


def truth(**values):
    TRUTH.append({k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()})


def finish(args, parameters):
    if args.out:
        flat = [value for p in parameters for value in p.detach().to(torch.float64).reshape(-1).tolist()]
        with open(args.out, "w") as file:
            json.dump({"truth": TRUTH, "parameters": [value.hex() for value in flat]}, file)


def model(width=8):
    return torch.nn.Sequential(
        torch.nn.Linear(width, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)
    )


def batch(width=8, rows=32):
    x = torch.randn(rows, width)
    return x, x.sum(1, keepdim=True).sin()
