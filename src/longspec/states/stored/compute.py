"""Stored states of rows, computed by the target: a batch at a time, shared by the ranks, gathered on rank 0.

Shapes: B rows, S tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspec.distributed import Ranks
from longspec.methods.contract import Distribution
from longspec.states.stored.declaration import Declaration
from longspec.states.stored.encoding import best_token, encode, with_top_tokens
from longspec.states.stored.rows import RowBatch
from longspec.states.tensors import BEST_TOKEN, FINAL, TOP_TOKENS


@dataclass(frozen=True)
class Encoded:
    """The stored tensors of some rows, [B, S, ...] on the host; and of each tensor of the target which rows [B] are finite."""

    tensors: dict[str, Tensor]
    finite: dict[str, Tensor]
    copied: Any  # the event after which they are there; None: they are

    def wait(self) -> None:
        """Wait until they are on the host."""
        if self.copied is not None:
            self.copied.synchronize()

    def reason(self, place: int) -> str | None:
        """Why a row is left out; None: it is not."""
        wrong = [name for name, finite_B in self.finite.items() if not finite_B[place]]
        return f"not finite: {', '.join(wrong)}" if wrong else None

    def row(self, place: int) -> list[memoryview]:
        """The bytes of one row, one buffer a tensor in the files' order."""
        # By way of bytes: numpy knows neither bfloat16 nor float8.
        return [tensor[place].reshape(-1).view(torch.uint8).numpy().data for tensor in self.tensors.values()]


class Computation:
    """The target beside what is stored of it. Every rank makes the same sequence of calls."""

    def __init__(
        self, states: Any, declaration: Declaration, learnt: Distribution | None, ranks: Ranks, device: torch.device
    ) -> None:
        self.states, self.declaration, self.learnt, self.ranks, self.device = states, declaration, learnt, ranks, device
        stored = {tensor.name: tensor for tensor in declaration.tensors}
        self.top_k = stored[TOP_TOKENS].token_shape[0] if TOP_TOKENS in stored else None
        kinds = ("keys", "values", "hidden", FINAL)
        self.names = [name for name in stored if name.split(".")[0] in kinds and not name.endswith(".scale")]
        self.names += [FINAL] if self.top_k is not None else []
        self.with_best = BEST_TOKEN in stored and self.top_k is None

    @torch.no_grad()
    def of(self, batch: RowBatch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The stored tensors of rows, and which are finite, on the device."""
        ids, positions, documents = (
            None if tensor is None else tensor.to(self.device, non_blocking=True)
            for tensor in (batch.input_ids_BS, batch.position_ids_BS, batch.document_ids_BS)
        )
        found = self.states(ids, positions, documents, self.names)
        finite = {name: found[name].flatten(1).isfinite().all(1) for name in self.names}
        if self.top_k is not None:
            assert self.learnt is not None
            assert ids is not None
            with self.states.gather([self.states.head_weight]):
                found = with_top_tokens(found, ids, self.states.head_weight, self.learnt, self.top_k)
        if self.with_best:
            with self.states.gather([self.states.head_weight]):
                found = found | {BEST_TOKEN: best_token(found[FINAL], self.states.head_weight)}
        encoded = encode(found, self.declaration.tensors)
        return {tensor.name: encoded[tensor.name] for tensor in self.declaration.tensors}, finite

    def on_host(self, tensors: dict[str, Tensor], finite: dict[str, Tensor]) -> Encoded:
        """Copy to the host; on a GPU into pinned memory, while it goes on computing."""
        if self.device.type != "cuda":
            return Encoded(tensors, finite, None)
        tensors, finite = (
            {name: _pinned(part).copy_(part, non_blocking=True) for name, part in of.items()} for of in (tensors, finite)
        )
        copied = torch.cuda.Event()
        copied.record()
        return Encoded(tensors, finite, copied)

    def gathered(self, tensors: dict[str, Tensor], finite: dict[str, Tensor]) -> list[Encoded]:
        """The rows of all ranks, in their order, on rank 0; on the others none."""
        if self.ranks.world_size == 1:
            return [self.on_host(tensors, finite)]
        parts: tuple[list[dict[str, Tensor]], ...] = tuple([{} for _ in range(self.ranks.world_size)] for _ in range(2))
        for of_ranks, own in zip(parts, (tensors, finite), strict=True):
            for name, tensor in own.items():
                data = tensor.contiguous().view(torch.uint8)
                there = [torch.empty_like(data) for _ in of_ranks] if self.ranks.is_main else None
                dist.gather(data, there, dst=0)
                for each, part in zip(of_ranks, there or [], strict=False):
                    each[name] = part.view(tensor.dtype)
        return [self.on_host(*pair) for pair in zip(*parts, strict=True)] if self.ranks.is_main else []


def _pinned(like: Tensor) -> Tensor:
    return torch.empty_like(like, device="cpu", pin_memory=True)


def shared(numbers: Sequence[int], ranks: Ranks) -> list[list[int]]:
    """The rows of each rank, as many on each: the last row is computed again where they do not suffice."""
    each = -(-len(numbers) // ranks.world_size)
    filled = [*numbers, *[numbers[-1]] * (each * ranks.world_size - len(numbers))]
    return [filled[start : start + each] for start in range(0, len(filled), each)]
