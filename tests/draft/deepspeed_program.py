"""Saves a checkpoint by DeepSpeed itself, of ZeRO stage 2: python -m tests.draft.deepspeed_program WEIGHTS.pth FOLDER."""

import sys

import deepspeed
import torch
from torch import nn

from longspec.distributed import end_at_once, find_ranks
from longspec.train.engine import boot


class Tree(nn.Module):
    """Parameters by name, each of which takes part in forward."""

    def forward(self) -> torch.Tensor:
        own = [(parameter.float() ** 2).sum() for parameter in self.parameters(recurse=False)]
        return sum([*own, *(child() for child in self.children())], torch.zeros(()))


def draft(weights: dict[str, torch.Tensor]) -> nn.Module:
    """A module whose parameters have the given names and the draft's prefix."""
    whole = Tree()
    for name, tensor in weights.items():
        module: nn.Module = whole
        *path, last = f"draft_model.{name}".split(".")
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, Tree())
            module = getattr(module, part)
        module.register_parameter(last, nn.Parameter(tensor.clone()))
    return whole


def save(weights: dict[str, torch.Tensor], folder: str) -> None:
    """Save after a step of a learning rate of zero."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
    }
    model = draft(weights)
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
