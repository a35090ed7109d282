"""Muon for matrices: torch's own steps, on state that a checkpoint can hold and hand back."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from longspec.config import compose
from longspec.train.engine import MuonForMatrices

STEPS = 5


class Draft(nn.Module):
    """A matrix, a vector, and a head whose rows are tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.lm_head = (
            nn.Linear(6, 4, bias=False),
            nn.Parameter(torch.ones(4)),
            nn.Linear(4, 9, bias=False),
        )

    def forward(self, x_BH: torch.Tensor) -> torch.Tensor:
        """A loss."""
        return self.lm_head(self.inner(x_BH) * self.norm).square().mean()


def muon(module: nn.Module) -> MuonForMatrices:
    recipe = compose("train", ["run=demo", "deepspeed=zero0", "recipe.optimizer.name=muon", "recipe.optimizer.lr=0.02"]).recipe
    return MuonForMatrices.of(module, recipe)


def step(module: nn.Module, optimizers: list[torch.optim.Optimizer], seed: int) -> None:
    module.zero_grad()
    module(torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))).backward()
    for optimizer in optimizers:
        optimizer.step()


def test_each_parameter_is_stepped_by_torchs_own_optimizer() -> None:
    torch.manual_seed(0)
    ours = Draft()
    theirs = deepcopy(ours)
    own = muon(ours)
    others = [
        torch.optim.Muon([theirs.inner.weight], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [theirs.norm, theirs.lm_head.weight], lr=0.02, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1, fused=True
        ),
    ]
    for seed in range(STEPS):
        step(ours, [own], seed)
        step(theirs, others, seed)
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert all({*state} == {"step", "exp_avg", "exp_avg_sq"} and state["step"] == STEPS for state in own.state.values())


def test_sharded_matrices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^recipe\.optimizer\.name: muon .* runtime\.deepspeed\.zero_stage"):
        compose("train", ["run=demo", "deepspeed=zero1", "recipe.optimizer.name=muon"])
