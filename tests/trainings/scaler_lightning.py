"""Lightning's MixedPrecision plugin with Fp8GradScaler, a checkpoint, and a second trainer that goes on from it."""

import json
import logging
import sys
import warnings

import torch
from common import model

logging.disable(logging.WARNING)
warnings.simplefilter("ignore")
import lightning  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

from fp8console.numerics.scaler import Fp8GradScaler  # noqa: E402

STEPS, BAD = 12, 5


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = model()
        self.scales, self.weights = [], []

    def training_step(self, batch, index):
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())
        self.weights.append(self.net[0].weight.sum().item().hex())
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        return loss * float("inf") if self.global_step == BAD and not self.trainer.resumed else loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(path=None):
    module, scaler = Module(), Fp8GradScaler("cpu", init_scale=4.0, fmt="e4m3", hysteresis=2, patience=1)
    scaler.watch(module)
    trainer = lightning.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=0.05,
        plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)],
    )
    trainer.resumed = path is not None
    trainer.fit(module, loader, ckpt_path=path)
    return trainer, module, scaler


x = torch.randn((STEPS + 2) * 8, 8, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
loader = torch.utils.data.DataLoader(data, batch_size=8)
trainer, module, scaler = fit()
trainer.save_checkpoint("saved.ckpt")
state = scaler.state_dict()
scales, weights = module.scales, module.weights
_, module, scaler = fit("saved.ckpt")
with open(sys.argv[1], "w") as file:
    json.dump({"scales": scales, "weights": weights, "state": repr(state), "loaded": repr(scaler.state_dict())}, file)
