"""Shares of the global batch and the learning rate, in closed form; Muon for matrices, by torch's own steps."""

import itertools
import math
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn

from longspec.config import compose
from longspec.distributed import share_global_batch
from longspec.models.target import resolve_dtype
from longspec.train.engine import MuonForMatrices, deepspeed_config, learning_rate_factor
from tests.refusals import refused


def test_shares_of_the_global_batch() -> None:
    shares = {(2048, 2, 8): (2, 128), (64, 1, 8): (1, 8), (4, 4, 2): (2, 1), (12, 5, 2): (3, 2), (4, 100, 1): (4, 1)}
    assert {asked: share_global_batch(*asked) for asked in shares} == shares
    for global_batch, world_size in ((4, 3), (2, 4)):
        with refused(f"recipe.global_batch: {global_batch}", f"{world_size} processes"):
            share_global_batch(global_batch, 1, world_size)


def test_warm_up_starts_above_zero_and_both_schedules_end_at_the_floor() -> None:
    factors = [learning_rate_factor(step, 100, 10) for step in range(101)]
    assert factors[:10] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert factors[10] == pytest.approx(1.0)
    assert factors[55] == pytest.approx(1e-4 + (1 - 1e-4) * 0.5 * (1 + math.cos(math.pi / 2)))
    assert factors[100] == pytest.approx(1e-4)
    assert all(left > right for left, right in itertools.pairwise(factors[10:]))
    factors = [learning_rate_factor(step, 100, 10, "linear") for step in range(10, 101)]
    assert (factors[0], factors[-1]) == (1.0, pytest.approx(1e-4))
    assert [left - right for left, right in itertools.pairwise(factors)] == pytest.approx([(1 - 1e-4) / 90] * 90)


@pytest.mark.parametrize(
    ("capabilities", "dtype"),
    [({"avx512_bf16": True}, torch.bfloat16), ({"avx512_bf16": False, "amx_bf16": True}, torch.bfloat16), ({}, torch.float32)],
)
def test_the_fastest_precision_is_the_processors(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert resolve_dtype("fastest") is dtype
    assert (resolve_dtype("auto"), resolve_dtype("bf16")) == (torch.float32, torch.bfloat16)


def test_bfloat16_that_a_gpu_emulates_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch counts as support what it emulates, unless it is asked."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert (resolve_dtype("auto"), resolve_dtype("fastest")) == (torch.float32, torch.float32)
    with refused("recipe.precision: bf16", "fp32"):
        resolve_dtype("bf16")


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
    return MuonForMatrices(module, recipe)


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


def test_each_stage_has_its_folder_on_an_nvme_disk(tmp_path: Path) -> None:
    """DeepSpeed names its files there by rank and parameter: two stages on a node would read each other's."""
    config = compose("train", ["run=demo", "deepspeed=zero3-nvme", f"runtime.deepspeed.nvme_path={tmp_path}/fast"])
    folders = []
    for stage in ("base", "long", "base"):
        made = deepspeed_config(config.recipe, config.runtime, 1, 1, torch.float32, 9, tmp_path / stage)
        folders.append(made["zero_optimization"]["offload_optimizer"]["nvme_path"])
    assert folders[0] == folders[2] != folders[1]
    assert {Path(folder).parent for folder in folders} == {tmp_path / "fast"}


def test_sharded_matrices_are_refused() -> None:
    with refused("recipe.optimizer.name: muon", "runtime.deepspeed.zero_stage"):
        compose("train", ["run=demo", "deepspeed=zero1", "recipe.optimizer.name=muon"])
