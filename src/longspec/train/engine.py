"""Set up DeepSpeed: process group, engine, optimizer, learning rate, with the reason for each setting."""

import math
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from longspec.atomic_files import sha256_text
from longspec.config import LINEAR, MUON, Recipe, Runtime, check_optimizer
from longspec.distributed import Ranks
from longspec.process_group import join
from longspec.train.estimate.memory import REDUCE_BUCKET

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import deepspeed.ops
import torch.distributed as dist

# The published scheduler's final rate, as a share of the learning rate.
FLOOR = 1e-4
BY_ADAMW = ("lm_head", "embed_tokens")  # names of matrices whose rows are tokens
FLOAT32_SUMS = {  # optimizer -> how to get the sums in float32
    "adamw": "runtime.deepspeed.offload_optimizer=none (ZeRO-1, 2) or runtime.deepspeed.zero_stage=3 adds them up in float32",
    MUON: "a larger runtime.micro_batch or more processes make one micro batch of them, or recipe.precision=fp32 float32",
}


class MuonForMatrices(torch.optim.Optimizer):
    """Update a draft's matrices with Muon, its vectors and its head with AdamW; torch's own optimizer steps each group.

    A parameter's state is AdamW's (`step`, `exp_avg`, `exp_avg_sq`), as checkpoints store it; `exp_avg` holds Muon's momentum.
    Muon's updates are scaled to the size of AdamW's (arXiv 2502.16982), so that one learning rate and decay serve both. The
    optimizers are created in each step around the groups' state, since DeepSpeed replaces the parameters by float32 copies.
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
        """Update each parameter that has a gradient."""
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
    """Join the process group, DeepSpeed's too; return this rank's device. Nothing is compiled."""
    # DeepSpeed calls torch's collectives by deprecated names: seven warnings in every step would bury the log.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    if not torch.cuda.is_available():
        # DeepSpeed would compile a shared-memory operator, which only serves inference, and hang on a stale lock.
        deepspeed.ops.__compatible_ops__ = {}
    device = join(ranks, timeout_minutes)
    timeout = timedelta(minutes=timeout_minutes)
    deepspeed.init_distributed(dist_backend=dist.get_backend(), timeout=timeout, verbose=False)
    deepspeed.utils.groups._WORLD_GROUP = dist.new_group(timeout=timeout)  # its own would have torch's ten minutes for NCCL
    return device


def learning_rate_factor(step: int, total_steps: int, warmup_steps: int, schedule: str = "cosine") -> float:
    """Return the share of the learning rate at 0-based `step`: linear warm-up from above zero, then `schedule` to the floor.

    transformers has no such schedule: its schedules begin at 0, or are one step ahead after the warm-up.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    left = 1 - progress if schedule == LINEAR else 0.5 * (1 + math.cos(math.pi * progress))
    return FLOOR + (1 - FLOOR) * left


def sums_in_float32(runtime: Runtime) -> bool:
    """Tell whether DeepSpeed sums the micro batches' bfloat16 gradients in float32; sums in bfloat16 lose most bits.

    ZeRO-0 cannot. ZeRO-1 and 2 with an offloaded optimizer could, but would keep a NaN in these sums forever.
    """
    stage, offload = runtime.deepspeed.zero_stage, runtime.deepspeed.offload_optimizer
    return stage == 3 or (stage > 0 and offload == "none")


def deepspeed_config(
    recipe: Recipe, runtime: Runtime, micro_batch: int, accumulation: int, dtype: torch.dtype, elements: int, folder: Path
) -> dict[str, Any]:
    """Return DeepSpeed's configuration. elements: of all trained parameters; folder: where the job writes."""
    # DeepSpeed allocates the whole bucket in which gradients are reduced.
    zero: dict[str, Any] = {"stage": runtime.deepspeed.zero_stage, "reduce_bucket_size": min(REDUCE_BUCKET, elements)}
    if runtime.deepspeed.offload_optimizer != "none":
        zero["offload_optimizer"] = {"device": runtime.deepspeed.offload_optimizer, "pin_memory": torch.cuda.is_available()}
    if runtime.deepspeed.nvme_path:
        # DeepSpeed names its files by rank and parameter alone: another stage's job on this node would write the same ones.
        own = Path(runtime.deepspeed.nvme_path, f"longspec-{sha256_text(str(folder.resolve()))[:8]}")
        zero["offload_optimizer"]["nvme_path"] = str(own)
    if zero["stage"] == 3:
        # Else ZeRO-3 replaces torch's linear in the whole process, with other bf16 rounding than ZeRO-1.
        zero["memory_efficient_linear"] = False
    adam = recipe.optimizer
    # Torch's own fused AdamW: it compiles nothing, and resumes bit by bit.
    of_torch = {"lr": adam.lr, "betas": list(adam.betas), "eps": adam.eps, "weight_decay": adam.weight_decay}
    of_torch |= {"torch_adam": True, "fused": True}
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": recipe.optimizer.clip,
        # Without the immediate update, ZeRO-1's bfloat16 optimizer loses one micro batch's gradient in each step.
        "bf16": {"enabled": dtype == torch.bfloat16, "immediate_grad_update": True},
        "data_types": {"grad_accum_dtype": "fp32"} if dtype == torch.bfloat16 and sums_in_float32(runtime) else {},
        "zero_optimization": zero,
        **({} if recipe.optimizer.name == MUON else {"optimizer": {"type": "AdamW", "params": of_torch}}),
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }


def build_engine(
    module: torch.nn.Module,
    recipe: Recipe,
    runtime: Runtime,
    share: tuple[int, int],
    total_steps: int,
    dtype: torch.dtype,
    folder: Path,
) -> Any:
    """Return the DeepSpeed engine over the module's trainable parameters. share: from share_global_batch; folder: where the job
    writes.

    Raises ValueError if the ZeRO stage does not support the optimizer.
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
        config=deepspeed_config(recipe, runtime, *share, dtype, elements, folder),
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, factor),  # DeepSpeed's own warm-ups begin with steps at rate 0
    )
    if runtime.deepspeed.zero_stage == 0 and dtype == torch.bfloat16:
        # Here DeepSpeed has already taken one optimizer step with zero gradients.
        engine.optimizer.refresh_fp32_params()
        engine.optimizer.state.clear()
    if not hasattr(engine.optimizer, "overflow"):
        _skip_non_finite(engine.optimizer)
    return engine


def _skip_non_finite(optimizer: Any) -> None:
    """Make a plain optimizer (ZeRO-0 in float32) skip steps with gradients that are not finite, as DeepSpeed's own do.

    DeepSpeed counts a step as skipped if `overflow` is set.
    """
    step = optimizer.step

    def guarded(*arguments: Any, **named: Any) -> Any:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        optimizer.overflow = not all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
        return None if optimizer.overflow else step(*arguments, **named)

    optimizer.overflow = False
    optimizer.step = guarded
