"""Stored states of rows, computed by the target as a recipe and a runtime say: shared by the ranks, gathered on rank 0.

Shapes: B rows, S tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspec.atomic_files import checked_folder
from longspec.config import OFFLINE
from longspec.distributed import Ranks
from longspec.draft_vocabulary import DraftVocabulary
from longspec.methods import method_of, vocabulary_for
from longspec.models.target import resolve_dtype
from longspec.states.declaration import SCALE, Declaration, RowBatch, RowSource, checked_config, declare
from longspec.states.encoding import best_token, encode, with_top_tokens
from longspec.states.load import load_states
from longspec.states.tensors import BEST_TOKEN, FINAL, TOP_TOKENS


@dataclass(frozen=True)
class StatesJob:
    """The states of some rows, and how they are computed."""

    declaration: Declaration
    recipe: Any
    runtime: Any
    target_path: str
    config: Any  # of the target
    vocabulary: DraftVocabulary | None
    dtype: torch.dtype
    device: torch.device


def open_job(
    recipe: Any, runtime: Any, target: Path, source: RowSource, vocabulary_path: Path | None, device: torch.device
) -> StatesJob:
    """Open the job that builds the states of a recipe's rows. Raises ValueError for what does not fit, with the key."""
    if recipe.states.source != OFFLINE:
        raise ValueError(f"recipe.states.source: is {recipe.states.source}: this stage reads no stored states; set {OFFLINE}")
    path, vocabulary = checked_folder(target), None
    config, dtype = checked_config(path, recipe), resolve_dtype(recipe.precision)
    if recipe.states.top_k is not None:
        vocabulary = vocabulary_for(recipe, vocabulary_path)
        if vocabulary is not None:
            vocabulary.check_tokens(vocabulary_path, config.vocab_size, path, source.tokenizer)
    declaration = declare(recipe, config, target, source, dtype, vocabulary)
    return StatesJob(declaration, recipe, runtime, path, config, vocabulary, dtype, device)


@dataclass(frozen=True)
class Computed:
    """The stored tensors [B, S, ...] of some rows; and of each tensor of the target which rows [B] are finite."""

    tensors: dict[str, Tensor]
    finite: dict[str, Tensor]

    def row(self, place: int) -> dict[str, Tensor]:
        """Return one row's tensors [S, ...] on the host."""
        return {name: tensor[place].cpu() for name, tensor in self.tensors.items()}

    def not_finite(self, place: int) -> list[str]:
        """Return the names of the target's tensors that are not finite in a row."""
        return [name for name, finite_B in self.finite.items() if not finite_B[place]]


class Computation:
    """The target beside what is stored of it. Every rank makes the same sequence of calls."""

    def __init__(self, job: StatesJob, ranks: Ranks) -> None:
        self.states = load_states(job.target_path, job.config, job.runtime, job.device, job.dtype)
        self.states.follow(job.device)
        method, settings = method_of(job.recipe, job.vocabulary)
        self.tensors, self.learnt, self.ranks, self.device = job.declaration.tensors, method.learnt(settings), ranks, job.device
        stored = {tensor.name: tensor for tensor in self.tensors}
        self.top_k = stored[TOP_TOKENS].token_shape[0] if TOP_TOKENS in stored else None
        kinds = ("keys", "values", "hidden", FINAL)
        self.names = [name for name in stored if name.split(".")[0] in kinds and not name.endswith(SCALE)]
        self.names += [FINAL] if self.top_k is not None else []
        self.with_best = BEST_TOKEN in stored and self.top_k is None

    @torch.no_grad()
    def of(self, batch: RowBatch) -> Computed:
        """Compute the stored tensors of rows, on the device."""
        ids = batch.input_ids_BS.to(self.device)
        documents = None if batch.document_ids_BS is None else batch.document_ids_BS.to(self.device)
        found = self.states(ids, batch.position_ids_BS.to(self.device), documents, self.names)
        finite = {name: found[name].flatten(1).isfinite().all(1) for name in self.names}
        head = self.states.head_weight
        with self.states.gather([head] if self.top_k is not None or self.with_best else []):
            if self.top_k is not None:
                assert self.learnt is not None
                found = with_top_tokens(found, ids, head, self.learnt, self.top_k)
            elif self.with_best:
                found = found | {BEST_TOKEN: best_token(found[FINAL], head)}
        encoded = encode(found, self.tensors)
        return Computed({tensor.name: encoded[tensor.name] for tensor in self.tensors}, finite)

    def gathered(self, own: Computed) -> list[Computed]:
        """Return the rows of all ranks, in their order, on rank 0; on the others nothing."""
        if self.ranks.world_size == 1:
            return [own]
        parts = [Computed({}, {}) for _ in range(self.ranks.world_size)]
        for kind in ("tensors", "finite"):
            for name, tensor in getattr(own, kind).items():
                data = tensor.contiguous().view(torch.uint8)  # no library gathers float8
                there = [torch.empty_like(data) for _ in parts] if self.ranks.is_main else None
                dist.gather(data, there, dst=0)
                for part, received in zip(parts, there or [], strict=False):
                    getattr(part, kind)[name] = received.view(tensor.dtype)
        return parts if self.ranks.is_main else []


def shared(numbers: Sequence[int], ranks: Ranks) -> list[list[int]]:
    """Return the rows of each rank, as many on each: the last row is computed again where they do not suffice."""
    each = -(-len(numbers) // ranks.world_size)
    filled = [*numbers, *[numbers[-1]] * (each * ranks.world_size - len(numbers))]
    return [filled[start : start + each] for start in range(0, len(filled), each)]
