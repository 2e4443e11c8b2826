"""Lightning, automatic or manual (--manual 1) optimization, with clipping in the automatic one."""

import logging
import warnings

import torch
from common import arguments, finish, model

logging.disable(logging.WARNING)
warnings.simplefilter("ignore")
import lightning  # noqa: E402

args = arguments(steps=10, manual=0)


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = model()
        self.automatic_optimization = not args.manual

    def training_step(self, batch, index):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        if args.manual:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5)}


x = torch.randn(args.steps * 8, 8)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=8)
module = Module()
trainer = lightning.Trainer(
    max_epochs=1,
    accelerator="cpu",
    devices=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    gradient_clip_val=None if args.manual else 0.05,
)
trainer.fit(module, loader)
finish(args, list(module.parameters()))
