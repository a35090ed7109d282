"""Where DeepSpeed keeps the trained state of each parameter, under one view for all ZeRO stages.

State is float32: the master weights and Adam's two moments. A fragment is a run of consecutive elements of one flattened
parameter that this rank holds. All that depends on DeepSpeed's insides (0.19) stands here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = ("fp32", *MOMENTS)


@dataclass(frozen=True)
class Fragment:
    """Hold a part of a parameter's state. kinds: flat float32 views of the live state, for each of KINDS; start: its place."""

    name: str
    start: int
    kinds: dict[str, Tensor]

    @property
    def numel(self) -> int:
        """Return the number of elements in each of the tensors."""
        return self.kinds["fp32"].numel()


def trained(engine: Any) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in engine.module.named_parameters() if parameter.requires_grad}


def shapes(engine: Any) -> dict[str, list[int]]:
    """Return the whole shape of each trained parameter, also under ZeRO-3, which replaces parameters by empty tensors."""
    return {name: list(getattr(p, "ds_shape", p.shape)) for name, p in trained(engine).items()}


def held(engine: Any, *, write: bool = False) -> Iterator[Fragment]:
    """Yield this rank's fragments, one at a time.

    Each is valid until the next is asked for: state offloaded to a disk is fetched for it, and written back if `write`.
    """
    optimizer = engine.optimizer
    stage = engine.zero_optimization_stage()
    if stage == 0:
        yield from _replicated(engine, optimizer)
    elif stage == 3:
        yield from _partitioned(engine, optimizer, write)
    else:
        yield from _flat(engine, optimizer)


def owned(engine: Any) -> Iterator[Fragment]:
    """Yield the fragments that this rank saves, each element on exactly one rank; without ZeRO every rank holds all of them."""
    for fragment in held(engine):
        if engine.zero_optimization_stage() > 0:
            yield fragment
            continue
        each = -(-fragment.numel // dist.get_world_size())
        start = each * dist.get_rank()
        if start < fragment.numel:
            numel = min(each, fragment.numel - start)
            yield Fragment(fragment.name, start, {kind: t.narrow(0, start, numel) for kind, t in fragment.kinds.items()})


def _view(optimizer: Any, flat: Tensor, offset: int, numel: int) -> dict[str, Tensor]:
    """Return weights and Adam's state of a part; before the first step, create the state as torch would at that step."""
    state = optimizer.state[flat]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=flat.device)
        state |= {moment: torch.zeros_like(flat, requires_grad=False) for moment in MOMENTS}
    whole = {"fp32": flat.detach()} | {moment: state[moment] for moment in MOMENTS}
    return {kind: tensor.flatten().narrow(0, offset, numel) for kind, tensor in whole.items()}


def _replicated(engine: Any, optimizer: Any) -> Iterator[Fragment]:
    """Yield fragments of stage 0: the parameters themselves in float32; in bfloat16 their float32 copies."""
    masters: list[Tensor] = list(trained(engine).values())
    if hasattr(optimizer, "fp32_groups"):
        place = {id(low): high for low, high in _low_and_master(optimizer)}
        masters = [place[id(parameter)] for parameter in masters]
    for name, master in zip(trained(engine), masters, strict=True):
        yield Fragment(name, 0, _view(optimizer, master, 0, master.numel()))


def _low_and_master(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    for low_group, master_group in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        yield from zip(low_group, master_group, strict=True)


def _flat(engine: Any, optimizer: Any) -> Iterator[Fragment]:
    """Yield fragments of stages 1 and 2: each rank holds an equal part of all parameters laid end to end."""
    # Stage 1 in bfloat16 has its own optimizer class, unless it is offloaded.
    own_class = hasattr(optimizer, "fp32_groups_flat_partition")
    flats = optimizer.fp32_groups_flat_partition if own_class else optimizer.single_partition_of_fp32_groups
    for name, parameter in trained(engine).items():
        mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is not None:  # None: other ranks hold it
            address, flat = mapping.hp_fragment_address, flats[mapping.param_group_index]
            yield Fragment(name, mapping.lp_fragment_address.start, _view(optimizer, flat, address.start, address.numel))


def _partitioned(engine: Any, optimizer: Any, write: bool) -> Iterator[Fragment]:
    """Yield fragments of stage 3: each rank holds an equal part of each parameter, padded at the end; a group fits memory."""
    names = {id(parameter): name for name, parameter in trained(engine).items()}
    for index, group in enumerate(optimizer.fp16_groups):
        swapped = optimizer._swappable_optimizer_subgroup(index)
        if swapped:
            optimizer._optimizer_states_and_gradient_swap_in(index)
        flat = optimizer.fp32_partitioned_groups_flat[index]
        for parameter in group:
            _, offset, padded = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start = dist.get_rank(optimizer._get_param_partition_group(parameter)) * padded
            numel = min(padded, parameter.ds_numel - start)
            if numel > 0:
                yield Fragment(names[id(parameter)], start, _view(optimizer, flat, offset, numel))
        if write:
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        if swapped and write:
            optimizer._optimizer_states_and_gradient_swap_out(index)
        elif swapped:
            optimizer._release_swap_buffers(index)


def optimizer_step(engine: Any) -> float:
    """Return the number of Adam's steps; below the training's steps if some were skipped."""
    return max((float(state["step"]) for state in engine.optimizer.state.values() if "step" in state), default=0.0)


def before_writing(engine: Any) -> None:
    """Prepare the parameters so that `held(write=True)` may change them. All ranks must call this."""
    if engine.zero_optimization_stage() == 3:
        engine.optimizer.checkpoint_event_prologue()


def after_writing(engine: Any, step: float) -> None:
    """Copy the master weights that `held(write=True)` changed to the forward's weights. All ranks must call this."""
    optimizer = engine.optimizer
    for state in optimizer.state.values():
        state["step"].fill_(step)
    if engine.zero_optimization_stage() == 3:
        optimizer.checkpoint_event_epilogue()
    elif engine.zero_optimization_stage() > 0:
        optimizer.update_lp_params()
    elif hasattr(optimizer, "fp32_groups"):
        for low, master in _low_and_master(optimizer):
            low.data.copy_(master.data)
