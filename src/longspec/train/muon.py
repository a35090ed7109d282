"""Muon for a draft's matrices, AdamW for its vectors and its head: torch's own steps, on state of one shape for both.

A parameter's state is AdamW's (`step`, `exp_avg`, `exp_avg_sq`), as checkpoints know it; Muon's momentum is its `exp_avg`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from longspec.config import Recipe

BY_ADAMW = ("lm_head", "embed_tokens")  # matrices whose rows are tokens


class MuonForMatrices(torch.optim.Optimizer):
    """Two groups of parameters, each stepped by torch's optimizer of it.

    Muon's updates are scaled to the size of AdamW's (arXiv 2502.16982), so that one learning rate and decay serve both. The
    optimizers are made anew in each step around the groups' state: DeepSpeed puts float32 copies in the parameters' place.
    """

    def __init__(self, matrices: Sequence[Tensor], others: Sequence[Tensor], lr: float, **adam: Any) -> None:
        groups = [{"params": matrices, "matrices": True}, {"params": others, "matrices": False}]
        super().__init__([group for group in groups if group["params"]], {"lr": lr, **adam})

    @classmethod
    def of(cls, module: nn.Module, recipe: Recipe) -> "MuonForMatrices":
        """The optimizer of a module's trained parameters, with the recipe's numbers."""
        trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        matrices = [p for name, p in trained if p.ndim == 2 and not any(part in BY_ADAMW for part in name.split("."))]
        known = {id(parameter) for parameter in matrices}
        others = [parameter for _, parameter in trained if id(parameter) not in known]
        adam = recipe.optimizer
        return cls(matrices, others, adam.lr, betas=tuple(adam.betas), eps=adam.eps, weight_decay=adam.weight_decay)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Change each parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            (self._step_matrices if group["matrices"] else self._step_others)(group)

    def _step_matrices(self, group: dict[str, Any]) -> None:
        inner = torch.optim.Muon(
            group["params"], lr=group["lr"], weight_decay=group["weight_decay"], adjust_lr_fn="match_rms_adamw"
        )
        for parameter in group["params"]:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state |= {moment: torch.zeros_like(parameter) for moment in ("exp_avg", "exp_avg_sq")}
            inner.state[parameter] = {"momentum_buffer": state["exp_avg"]}
            if parameter.grad is not None:
                state["step"] += 1
        inner.step()

    def _step_others(self, group: dict[str, Any]) -> None:
        names = ("lr", "betas", "eps", "weight_decay")
        inner = torch.optim.AdamW(group["params"], fused=True, **{name: group[name] for name in names})
        for parameter in group["params"]:
            inner.state[parameter] = self.state[parameter]
        inner.step()
