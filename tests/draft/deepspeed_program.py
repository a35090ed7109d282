"""Saves checkpoints by DeepSpeed itself: python -m tests.draft.deepspeed_program PLAN.

PLAN is a JSON file: folder, weights (a .pth of the draft's tensors) and cases of name, stage, config (of DeepSpeed) and
foreign (whether client_state holds an object of another library's type).
"""

import json
import sys
from pathlib import Path, PurePosixPath
from typing import Any

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


def save(case: dict[str, Any], plan: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    """One checkpoint, after a step of a learning rate of zero."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0, "torch_adam": True}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_min_lr": 0.0, "warmup_max_lr": 0.0}},
        "zero_optimization": {"stage": case["stage"]},
    }
    model = draft(weights)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config | case["config"])
    engine.backward(engine())
    engine.step()
    state = {"made_in": PurePosixPath("elsewhere")} if case["foreign"] else {}
    engine.save_checkpoint(str(Path(plan["folder"]) / case["name"]), tag="tag", client_state=state)
    engine.destroy()


def main() -> None:
    boot(find_ranks(), 5)
    plan = json.loads(Path(sys.argv[1]).read_text())
    weights = torch.load(plan["weights"], weights_only=True)
    for case in plan["cases"]:
        save(case, plan, weights)
    end_at_once(0)


if __name__ == "__main__":
    main()
