"""Saves a checkpoint by DeepSpeed itself, of ZeRO stage 2: python -m tests.draft.deepspeed_program WEIGHTS.pth FOLDER."""

import sys

import deepspeed
import torch
from torch import nn

from longspec.distributed import end_at_once, find_ranks
from longspec.methods.glide.layer import GlideLayer
from longspec.train.engine import boot
from tests.draft.conftest import CONFIG


class Trained(nn.Module):
    """A draft as trainers hold it, below its prefix; its loss takes every parameter."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.draft_model = GlideLayer(CONFIG)
        self.draft_model.load_state_dict(weights)

    def forward(self) -> torch.Tensor:
        return torch.stack([(parameter**2).sum() for parameter in self.parameters()]).sum()


def save(weights: dict[str, torch.Tensor], folder: str) -> None:
    """Save after a step of a learning rate of zero."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
    }
    model = Trained(weights)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.backward(engine())
    engine.step()
    engine.save_checkpoint(folder, tag="tag")
    engine.destroy()


def main() -> None:
    boot(find_ranks(), 5)
    save(torch.load(sys.argv[1], weights_only=True), sys.argv[2])
    end_at_once(0)


if __name__ == "__main__":
    main()
