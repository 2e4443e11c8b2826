"""Hugging Face Trainer with a tiny random GPT-2, gradient accumulation of 2 and clipping."""

import logging
import os

import torch
from common import arguments, finish

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
logging.disable(logging.WARNING)
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments  # noqa: E402

args = arguments(steps=10)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))
rows = torch.randint(0, 64, (args.steps * 8, 16), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": row} for row in rows]
options = TrainingArguments(
    output_dir=os.path.join(os.path.dirname(args.out or "/tmp/x"), "hf"),
    max_steps=args.steps,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    max_grad_norm=0.1,
    use_cpu=True,
    report_to=[],
    save_strategy="no",
    logging_strategy="no",
    disable_tqdm=True,
    seed=1,
)
Trainer(model=model, args=options, train_dataset=data).train()
finish(args, list(model.parameters()))
