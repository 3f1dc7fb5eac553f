"""The same with the Trainer of transformers.

python examples/split_trainer.py
torchrun --nproc-per-node 2 examples/split_trainer.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from text import STEPS, loss_of, model, started, windows
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from cumulant.distributed import context_parallel


class Wrapped(nn.Module):
    """Without the `config` of our models, which is a dict and not one of transformers."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens)


class SplitTrainer(Trainer):
    """Every process holds a part of each text, where Trainer would give each some of the texts."""

    def get_train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_dataset, self.args.per_device_train_batch_size, collate_fn=self.data_collator)

    def training_step(self, *args: Any, **options: Any) -> Tensor:
        with context_parallel(mesh):
            return super().training_step(*args, **options)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **options: Any) -> Tensor:
        loss = loss_of(model, inputs["tokens"].to(self.args.device), mesh)
        return loss * mesh.size()  # Trainer's DDP takes the mean of gradients where their sum is wanted


class Told(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "loss" in logs and state.is_world_process_zero:  # the mean over processes of W times their shares
            print(f"step {state.global_step - 1} loss {float(logs['loss']):.5f}")


def main() -> None:
    global mesh
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=8, learning_rate=1e-3, weight_decay=0.01, seed=0,
            lr_scheduler_type="constant", max_grad_norm=0, logging_steps=1, save_strategy="no", report_to=[],
            use_cpu=not torch.cuda.is_available(), remove_unused_columns=False, disable_tqdm=True,
            dataloader_pin_memory=False,
        )  # fmt: skip
        mesh = started()
        trainer = SplitTrainer(
            Wrapped(model()), arguments, train_dataset=windows(), callbacks=[Told()],
            data_collator=lambda texts: {"tokens": torch.stack(texts)},
        )  # fmt: skip
        trainer.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
