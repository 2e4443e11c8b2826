"""Five layers, of which the arguments spoil one: in its forward, in its backward, or with a NaN at some step."""

import argparse
from collections import OrderedDict

import torch

NAMES = ("first", "second", "third", "fourth", "last")

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--wrong-forward", choices=NAMES)
parser.add_argument("--wrong-backward", choices=NAMES)
parser.add_argument("--nan-in", choices=NAMES)
parser.add_argument("--nan-at", type=int, default=5)
parser.add_argument("--own-seed", type=int)
parser.add_argument("--unseeded-data", action="store_true")
parser.add_argument("--catch-exit", action="store_true")
args = parser.parse_args()
if args.own_seed is not None:
    torch.manual_seed(args.own_seed)


class Spoilt(torch.nn.Linear):
    """A subclass with a forward of its own, as scripts have them."""

    step = 0

    def forward(self, x):
        y = super().forward(x)
        if self.name == args.wrong_forward:
            y = y * 1.5
        if self.name == args.wrong_backward:
            y = y * 2 - y.detach()
        if self.name == args.nan_in and Spoilt.step == args.nan_at:
            y = y * float("nan")
        return y


layers = OrderedDict()
for index, name in enumerate(NAMES):
    layers[name] = Spoilt(16, 16 if name != "last" else 1)
    layers[name].name = name
    if name != "last":
        layers["tanh" + str(index)] = torch.nn.Tanh()
model = torch.nn.Sequential(layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
generator = torch.Generator()
if args.unseeded_data:
    generator.seed()
else:
    generator.manual_seed(5)
for step in range(1, args.steps + 1):
    Spoilt.step = step
    x = torch.randn(64, 16, generator=generator)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    try:
        optimizer.step()
    except SystemExit:
        if not args.catch_exit:
            raise
print("done", flush=True)
