"""Declare what stored states are made of: the rows, the target, and which tensors are kept.

Shapes: B rows, S tokens of a row, H hidden width, K key/value heads, D head width.
"""

import hashlib
import json
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspec.atomic_files import read_json, sha256_text
from longspec.data.pack.arrow_shards import PackedRows
from longspec.data.pack.held_out_rows import HeldOutRow
from longspec.draft_vocabulary import DraftVocabulary
from longspec.families import position_limit
from longspec.methods import check_family_named, method_of, settings_of
from longspec.models.target_config import read_target_config
from longspec.states.tensors import BEST_TOKEN, FINAL, TOP, TOP_LOG_PROBS, TOP_TOKENS, StateTensor

FLOAT8 = "float8"  # of recipe.states.dtype
WORDS = {"bfloat16": "BF16", FLOAT8: "F8_E4M3", "float32": "F32"}  # as safetensors names them
DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "I32": torch.int32,
}
SCALE = ".scale"
# float16: log-probabilities lie mostly between -64 and 0, where it is at most 0.016 off, bfloat16 0.13.
TOP_DTYPES = dict(zip(TOP, ("I32", "F16", "F32", "I32", "F32"), strict=True))
Tensors = dict[str, list[Any]]  # of the files: [rows, S, *shape] by name, as [dtype as safetensors names it, *shape]


def _stacked(arrays: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack(arrays).astype(np.int64))


class RowSource:
    """Rows by their numbers from 0: those that a stage trains on, or `held_out` ones. hash: of all that the rows are."""

    def __init__(self, packed: PackedRows, held_out: Sequence[HeldOutRow] | None = None) -> None:
        self.packed, self.held_out = packed, held_out
        self.sequence_length, self.tokenizer = packed.sequence_length, packed.manifest["tokenizer"]
        ids = b"".join(row.input_ids_S.astype(np.int64).tobytes() for row in held_out or ())
        self.hash = packed.data_hash if held_out is None else hashlib.sha256(ids).hexdigest()

    def __len__(self) -> int:
        return len(self.packed if self.held_out is None else self.held_out)

    def batch(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return what the target is asked with, int64 [B, S]: ids, plain positions, documents (None: each row is one text)."""
        if self.held_out is not None:
            ids_BS = _stacked([self.held_out[number].input_ids_S for number in numbers])
            return ids_BS, torch.arange(self.sequence_length).expand_as(ids_BS), None
        rows = [self.packed[number] for number in numbers]
        ids_BS, positions_BS, documents_BS = (
            _stacked([getattr(row, name) for row in rows]) for name in ("input_ids_S", "position_ids_S", "document_ids_S")
        )
        return ids_BS, positions_BS, documents_BS if bool((documents_BS > 0).any()) else None


def stored_tensors(reads: Sequence[StateTensor], dtype: str, top_k: int | None) -> Tensors:
    """Return the tensors that are stored for those that a method reads (Method.reads); dtype, top_k: of recipe.states.

    float8 brings a float32 scale a token and head, [K] of keys [K, D] and [] of a hidden state [H], and the most likely token
    as it was before the rounding: it decides which tokens have a loss where a draft has a vocabulary of its own. With top_k
    the likeliest tokens take the place of `final`.
    """
    found: Tensors = {}
    for tensor in reads:
        if tensor.name == FINAL and top_k is not None:
            found |= {name: [of, *[top_k] * (name in (TOP_TOKENS, TOP_LOG_PROBS))] for name, of in TOP_DTYPES.items()}
            continue
        found[tensor.name] = [WORDS[dtype], *tensor.token_shape]
        if dtype == FLOAT8:
            found[tensor.name + SCALE] = ["F32", *tensor.token_shape[:-1]]
            if tensor.name == FINAL:
                found[BEST_TOKEN] = [TOP_DTYPES[BEST_TOKEN]]
    return dict(sorted(found.items()))


def bytes_a_token(tensors: Tensors) -> int:
    """Return the bytes of one token in the files, whose headers come to far below a thousandth."""
    return sum(DTYPES[dtype].itemsize * prod(shape) for dtype, *shape in tensors.values())


def hash_of(plain: Any) -> str:
    """Return a hash of a declaration, or of another JSON value."""
    return sha256_text(json.dumps(plain, sort_keys=True))


def target_hash(manifest: Path) -> str:
    """Return the hash of a target's files alone: its manifest also says how long the target was trained."""
    return hash_of(read_json(manifest)["files"])


def checked_config(target_path: str, recipe: Any) -> Any:
    """Read a target's configuration. Raises ValueError for one of another family than the recipe names, or too small for it."""
    config = read_target_config(target_path)
    check_family_named(recipe, config.model_type, target_path)
    settings_of(recipe.method.name).fits(recipe, config.num_hidden_layers, config.vocab_size)
    length, positions = recipe.data.sequence_length, position_limit(config)
    if length > positions:
        raise ValueError(
            f"recipe.data.sequence_length: {length} tokens are more than the target's {positions} positions; lower it"
        )
    return config


def declare(
    recipe: Any, config: Any, target_manifest: Path, rows: RowSource, dtype: Any, vocabulary: DraftVocabulary | None
) -> dict[str, Any]:
    """Return all that decides the numbers in a recipe's stored states, as JSON has it: equal declarations are equal states.

    config: of the target; dtype: torch's, in which the target runs. Hard labels want no final hidden states, so that the
    target's own loss is measured on held-out rows alone. Raises ValueError for a recipe.states.top_k above the target's tokens.
    """
    states, (method, settings) = recipe.states, method_of(recipe, vocabulary)
    top_k = states.top_k
    if top_k is not None and top_k > config.vocab_size:
        raise ValueError(f"recipe.states.top_k: {top_k}: the target has {config.vocab_size} tokens; give as many or fewer")
    of_top = None if top_k is None else method.learnt(settings)
    reads = method.reads(config, settings, with_llm_loss=rows.held_out is not None)
    return {
        "target": target_hash(target_manifest),
        "tokenizer": rows.tokenizer,
        "rows": rows.hash,
        "num_rows": len(rows),
        "sequence_length": rows.sequence_length,
        "computed_in": str(dtype),
        "tensors": stored_tensors(reads, states.dtype, top_k),
        # Of the distribution that the likeliest tokens are of; None: there are none, or they are taken from all tokens.
        "temperature": None if of_top is None else of_top.temperature,
        "vocabulary": None if of_top is None or of_top.ids is None or vocabulary is None else vocabulary.hash,
    }
