"""Ways in which a training can end; argv[1] says which."""

import atexit
import os
import sys

import torch

how = sys.argv[1]
assert __name__ == "__main__" and sys.modules["__main__"].__file__ == __file__
atexit.register(lambda: print("atexit ran", flush=True))
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    weight.square().sum().backward()
    optimizer.step()
print("path", os.path.samefile(sys.path[0], os.path.dirname(os.path.abspath(__file__))), sys.argv[1:])
print("leaks", sorted(name for name in sys.modules if name.split(".")[0] in ("textual", "psutil", "plotext", "rich")))
print("site on path", [p for p in sys.path if "fp8console" in p and p.endswith("site")])
if how == "exit3":
    sys.exit(3)
if how == "raise":
    raise RuntimeError("the loss went to the moon")
if how == "kill":
    os.kill(os.getpid(), 9)
