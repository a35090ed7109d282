"""DeepSpeed: start of the process group, the engine, the optimizer, the learning rate, with the reason for each setting."""

import math
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from longspec.config import LINEAR, MUON, Recipe, Runtime, check_optimizer
from longspec.distributed import Ranks
from longspec.process_group import join
from longspec.train.estimate.memory import REDUCE_BUCKET

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import deepspeed.ops
import torch.distributed as dist

# The published scheduler's floor, as a share of the learning rate.
FLOOR = 1e-4
BY_ADAMW = ("lm_head", "embed_tokens")  # matrices whose rows are tokens
FLOAT32_SUMS = {  # by optimizer
    "adamw": "runtime.deepspeed.offload_optimizer=none (ZeRO-1, 2) or runtime.deepspeed.zero_stage=3 adds them up in float32",
    MUON: "a larger runtime.micro_batch or more processes make one micro batch of them, or recipe.precision=fp32 float32",
}


class MuonForMatrices(torch.optim.Optimizer):
    """Muon for a draft's matrices, AdamW for its vectors and its head: each group is stepped by torch's own optimizer of it.

    A parameter's state is AdamW's (`step`, `exp_avg`, `exp_avg_sq`), as checkpoints know it; Muon's momentum is its `exp_avg`.
    Muon's updates are scaled to the size of AdamW's (arXiv 2502.16982), so that one learning rate and decay serve both. The
    optimizers are made anew in each step around the groups' state: DeepSpeed puts float32 copies in the parameters' place.
    """

    def __init__(self, module: nn.Module, recipe: Recipe) -> None:
        trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        matrices = [p for name, p in trained if p.ndim == 2 and not any(part in BY_ADAMW for part in name.split("."))]
        known = {id(parameter) for parameter in matrices}
        others = [parameter for _, parameter in trained if id(parameter) not in known]
        groups = [{"params": matrices, "matrices": True}, {"params": others, "matrices": False}]
        adam = recipe.optimizer
        defaults = {"lr": adam.lr, "betas": tuple(adam.betas), "eps": adam.eps, "weight_decay": adam.weight_decay}
        super().__init__([group for group in groups if group["params"]], defaults)

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


def boot(ranks: Ranks, timeout_minutes: int) -> torch.device:
    """Join the process group, DeepSpeed too; return this rank's device. Nothing is compiled."""
    # DeepSpeed calls torch's collectives by their old names: seven warnings in every step would bury the log.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    if not torch.cuda.is_available():
        # DeepSpeed would compile a shared-memory operator that serves inference only, and hang on a stale lock.
        deepspeed.ops.__compatible_ops__ = {}
    device = join(ranks, timeout_minutes)
    timeout = timedelta(minutes=timeout_minutes)
    deepspeed.init_distributed(dist_backend=dist.get_backend(), timeout=timeout, verbose=False)
    return device


def learning_rate_factor(step: int, total_steps: int, warmup_steps: int, schedule: str = "cosine") -> float:
    """Return the share of the learning rate at 0-based `step`: a linear warm-up from above zero, then `schedule` to the floor.

    None of transformers' schedules is this one: they begin at 0, or are a step ahead of it after the warm-up.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    left = 1 - progress if schedule == LINEAR else 0.5 * (1 + math.cos(math.pi * progress))
    return FLOOR + (1 - FLOOR) * left


def sums_in_float32(runtime: Runtime) -> bool:
    """Tell whether DeepSpeed adds the micro batches' bfloat16 gradients up in float32; in bfloat16 most bits are lost.

    ZeRO-0 cannot, and ZeRO-1 and 2 with an offloaded optimizer, when asked to, keep a NaN in these sums for ever.
    """
    stage, offload = runtime.deepspeed.zero_stage, runtime.deepspeed.offload_optimizer
    return stage == 3 or (stage > 0 and offload == "none")


def deepspeed_config(
    recipe: Recipe, runtime: Runtime, micro_batch: int, accumulation: int, dtype: torch.dtype, elements: int
) -> dict[str, Any]:
    """Return DeepSpeed's own configuration. elements: of the trained parameters together."""
    # A bucket in which gradients are reduced is allocated whole.
    zero: dict[str, Any] = {"stage": runtime.deepspeed.zero_stage, "reduce_bucket_size": min(REDUCE_BUCKET, elements)}
    if runtime.deepspeed.offload_optimizer != "none":
        zero["offload_optimizer"] = {"device": runtime.deepspeed.offload_optimizer, "pin_memory": torch.cuda.is_available()}
    if runtime.deepspeed.nvme_path:
        zero["offload_optimizer"]["nvme_path"] = runtime.deepspeed.nvme_path
    if zero["stage"] == 3:
        # Else ZeRO-3 replaces torch's linear for the whole process and rounds bf16 otherwise than ZeRO-1.
        zero["memory_efficient_linear"] = False
    adam = recipe.optimizer
    # Torch's own fused AdamW, of which nothing is compiled, and which resumes bit by bit.
    of_torch = {"lr": adam.lr, "betas": list(adam.betas), "eps": adam.eps, "weight_decay": adam.weight_decay}
    of_torch |= {"torch_adam": True, "fused": True}
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": recipe.optimizer.clip,
        # Without the immediate update ZeRO-1's optimizer for bfloat16 loses one micro batch's gradient of each step.
        "bf16": {"enabled": dtype == torch.bfloat16, "immediate_grad_update": True},
        "data_types": {"grad_accum_dtype": "fp32"} if dtype == torch.bfloat16 and sums_in_float32(runtime) else {},
        "zero_optimization": zero,
        **({} if recipe.optimizer.name == MUON else {"optimizer": {"type": "AdamW", "params": of_torch}}),
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }


def build_engine(
    module: torch.nn.Module, recipe: Recipe, runtime: Runtime, share: tuple[int, int], total_steps: int, dtype: torch.dtype
) -> Any:
    """Return the DeepSpeed engine over the module's trainable parameters; `share` as of share_global_batch.

    Raises ValueError for an optimizer that the ZeRO stage cannot have.
    """
    check_optimizer(recipe, runtime)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    elements = sum(parameter.numel() for parameter in trained)
    warmup_steps, schedule = round(recipe.optimizer.warmup_ratio * total_steps), recipe.optimizer.schedule

    def factor(step: int) -> float:
        return learning_rate_factor(step, total_steps, warmup_steps, schedule)

    engine, _, _, _ = deepspeed.initialize(
        model=module,
        optimizer=MuonForMatrices(module, recipe) if recipe.optimizer.name == MUON else None,
        model_parameters=trained,
        config=deepspeed_config(recipe, runtime, *share, dtype, elements),
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, factor),  # DeepSpeed's own warm-ups begin with steps at rate 0
    )
    if runtime.deepspeed.zero_stage == 0 and dtype == torch.bfloat16:
        # Here DeepSpeed has already taken an optimizer step with zero gradients.
        engine.optimizer.refresh_fp32_params()
        engine.optimizer.state.clear()
    if not hasattr(engine.optimizer, "overflow"):
        _skip_non_finite(engine.optimizer)
    return engine


def _skip_non_finite(optimizer: Any) -> None:
    """Have a plain optimizer (ZeRO-0 in float32) leave out gradients that are not finite, as DeepSpeed's own do.

    DeepSpeed counts the step as skipped when it finds `overflow` set.
    """
    step = optimizer.step

    def guarded(*arguments: Any, **named: Any) -> Any:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        optimizer.overflow = not all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
        return None if optimizer.overflow else step(*arguments, **named)

    optimizer.overflow = False
    optimizer.step = guarded
