"""Stored states of rows, computed by the target as a recipe and a runtime say: shared by the ranks, gathered on rank 0.

Shapes: B rows, S tokens.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspec.atomic_files import checked_folder
from longspec.config import OFFLINE
from longspec.distributed import Ranks
from longspec.methods import method_of, vocabulary_for
from longspec.models.target import resolve_dtype
from longspec.states.declaration import SCALE, RowSource, checked_config, declare
from longspec.states.encoding import best_token, encode, with_top_tokens
from longspec.states.forward import TargetStates
from longspec.states.load import load_states
from longspec.states.tensors import BEST_TOKEN, FINAL, TOP_TOKENS


class Computation:
    """The states of some rows: what is stored of them, and the target. All ranks make the same calls."""

    def __init__(
        self,
        recipe: Any,
        runtime: Any,
        target: Path,
        source: RowSource,
        vocabulary: Path | None,
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        """Raises ValueError for what does not fit, with the key."""
        if recipe.states.source != OFFLINE:
            raise ValueError(
                f"recipe.states.source: is {recipe.states.source}: this stage reads no stored states; set {OFFLINE}"
            )
        self.runtime, self.source, self.ranks, self.device = runtime, source, ranks, device
        self.target_path, self.dtype, chosen = checked_folder(target), resolve_dtype(recipe.precision), None
        self.config = checked_config(self.target_path, recipe)
        if recipe.states.top_k is not None:
            chosen = vocabulary_for(recipe, vocabulary)
            if chosen is not None:
                chosen.check_tokens(vocabulary, self.config.vocab_size, self.target_path, source.tokenizer)
        self.declaration = declare(recipe, self.config, target, source, self.dtype, chosen)
        method, settings = method_of(recipe, chosen)
        self.learnt, self.top_k = method.learnt(settings), recipe.states.top_k
        self.stored = [tensor.name for tensor in self.declaration.tensors]
        kinds = ("keys", "values", "hidden", FINAL)
        self.names = [name for name in self.stored if name.split(".")[0] in kinds and not name.endswith(SCALE)]
        self.names += [FINAL] if TOP_TOKENS in self.stored else []

    @cached_property
    def states(self) -> TargetStates:
        """The target, loaded where it is first asked for: a shard that is whole needs none."""
        states = load_states(self.target_path, self.config, self.runtime, self.device, self.dtype)
        states.follow(self.device)
        return states

    @torch.no_grad()
    def of(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Compute the stored tensors [B, S, ...] of rows, on the device."""
        ids, positions, documents = self.source.batch(numbers)
        ids, documents = ids.to(self.device), None if documents is None else documents.to(self.device)
        found, head = self.states(ids, positions.to(self.device), documents, self.names), self.states.head_weight
        with self.states.gather([head] if BEST_TOKEN in self.stored else []):
            if TOP_TOKENS in self.stored and self.learnt is not None:
                found = with_top_tokens(found, ids, head, self.learnt, self.top_k)
            elif BEST_TOKEN in self.stored:
                found = found | {BEST_TOKEN: best_token(found[FINAL], head)}
        return encode(found, self.declaration.tensors)

    def gathered(self, own: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return the rows of all ranks, in their order, on rank 0; on the others nothing."""
        if self.ranks.world_size == 1:
            return [own]
        parts: list[dict[str, Tensor]] = [{} for _ in range(self.ranks.world_size)]
        for name, tensor in own.items():
            data = tensor.contiguous().view(torch.uint8)  # no library gathers float8
            there = [torch.empty_like(data) for _ in parts] if self.ranks.is_main else None
            dist.gather(data, there, dst=0)
            for part, received in zip(parts, there or [], strict=False):
                part[name] = received.view(tensor.dtype)
        return parts if self.ranks.is_main else []


def shared(numbers: Sequence[int], ranks: Ranks) -> list[list[int]]:
    """Return the rows of each rank, as many on each: the last row is computed again where they do not suffice."""
    each = -(-len(numbers) // ranks.world_size)
    filled = [*numbers, *[numbers[-1]] * (each * ranks.world_size - len(numbers))]
    return [filled[start : start + each] for start in range(0, len(filled), each)]
