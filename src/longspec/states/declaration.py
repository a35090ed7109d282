"""Declare what stored states are made of, the rows, the target and which tensors are kept, and encode a forward's so.

Stored tensors are [B, S, *shape]; those of a forward are as in tensors.py. Errors of storage: bfloat16 at most 2^-8 of an
element; float8 (e4m3) 2^-4 of it, or 2^-18 of the largest in its token and head if that is more; float32 none.

Shapes: B rows, S tokens of a row, K key/value heads, D head width; N tokens, C tokens of a chunk, H hidden width, T target's
vocabulary, V the tokens that the distributions are over, k likeliest of them.
"""

import hashlib
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.data.pack.arrow_shards import PackedRows, Row, stacked
from longspec.draft_vocabulary import DraftVocabulary
from longspec.families import position_limit
from longspec.methods import check_family_named, method_of, settings_of
from longspec.models import losses
from longspec.models.target_config import read_target_config, target_hash
from longspec.states.tensors import BEST_TOKEN, FINAL, KEYS, TOP, TOP_LOG_PROBS, TOP_TOKENS, VALUES, token_shape

FLOAT8 = "float8"  # a value of recipe.states.dtype
WORDS = {"bfloat16": "BF16", FLOAT8: "F8_E4M3", "float32": "F32"}  # safetensors' names
E4M3 = torch.float8_e4m3fn
DTYPES = {"F8_E4M3": E4M3, "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I32": torch.int32}
LEAST_SCALE = torch.finfo(torch.float32).tiny
SCALE = ".scale"
# float16: log-probabilities lie mostly between -64 and 0; there its error is at most 0.016, bfloat16's 0.13.
TOP_DTYPES = dict(zip(TOP, ("I32", "F16", "F32", "I32", "F32"), strict=True))
Tensors = dict[str, list[Any]]  # of the files: name -> [dtype in safetensors' name, *shape], for a tensor [rows, S, *shape]


class RowSource:
    """Hold rows by their numbers from 0: those that a stage trains on, or held-out ones. hash: of their content."""

    def __init__(self, packed: PackedRows, held_out: Sequence[Row] | None = None) -> None:
        self.rows: Any = packed if held_out is None else held_out
        self.sequence_length, self.tokenizer = packed.sequence_length, packed.manifest["tokenizer"]
        self.is_held_out = held_out is not None
        ids = b"".join(row.input_ids_S.astype(np.int64).tobytes() for row in held_out or ())
        self.hash = packed.data_hash if held_out is None else hashlib.sha256(ids).hexdigest()

    def batch(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the target's input, int64 [B, S]: ids, plain positions, documents (None: each row is one text)."""
        rows = [self.rows[number] for number in numbers]
        names = ("input_ids_S", "position_ids_S", "document_ids_S")
        ids_BS, positions_BS, documents_BS = (torch.from_numpy(stacked(rows, name)) for name in names)
        return ids_BS, positions_BS, documents_BS if bool((documents_BS > 0).any()) else None


def stored_tensors(config: Any, reads: Sequence[str], dtype: str, top_k: int | None) -> Tensors:
    """Return the stored tensors for those that a method reads (Method.reads). dtype, top_k: from the recipe.

    float8 adds a float32 scale for each token and head, [K] for keys [K, D] and [] for a hidden state [H]. It also adds the
    most likely token before rounding, which decides which tokens have a loss if a draft has its own vocabulary. With top_k the
    likeliest tokens replace `final`.
    """
    found: Tensors = {}
    for name in reads:
        if name == FINAL and top_k is not None:
            found |= {top: [of, *[top_k] * (top in (TOP_TOKENS, TOP_LOG_PROBS))] for top, of in TOP_DTYPES.items()}
            continue
        shape = token_shape(config, name)
        found[name] = [WORDS[dtype], *shape]
        if dtype == FLOAT8:
            found[name + SCALE] = ["F32", *shape[:-1]]
            if name == FINAL:
                found[BEST_TOKEN] = [TOP_DTYPES[BEST_TOKEN]]
    return dict(sorted(found.items()))


def bytes_a_token(tensors: Tensors) -> int:
    """Return the bytes of one token in the files; their headers add far less than a thousandth."""
    return sum(DTYPES[dtype].itemsize * prod(shape) for dtype, *shape in tensors.values())


def checked_config(target_path: str, recipe: Any) -> Any:
    """Read a target's configuration.

    Raises ValueError for another family than the recipe names, a target too small for it, and a shape that no layer has.
    """
    config = read_target_config(target_path)
    check_family_named(recipe, config.model_type, target_path)
    settings_of(recipe.method.name).fits(recipe, config.num_hidden_layers, config.vocab_size)
    method, settings = method_of(recipe)
    with torch.device("meta"):  # refuses an impossible shape before days of computing states
        method.layer(config, settings)
    length, positions = recipe.data.sequence_length, position_limit(config)
    if length > positions:
        raise ValueError(f"recipe.data.sequence_length: {length} tokens exceed the target's {positions} positions; lower it")
    return config


def declare(
    recipe: Any, config: Any, target_manifest: Path, rows: RowSource, dtype: Any, vocabulary: DraftVocabulary | None
) -> dict[str, Any]:
    """Return everything that decides a recipe's stored states, as JSON values: equal declarations mean equal states.

    config: of the target; dtype: torch's, in which the target runs. For hard labels no final hidden states are stored, so the
    target's own loss is measured on held-out rows alone. Raises ValueError if recipe.states.top_k exceeds the target's tokens.
    """
    states, (method, settings) = recipe.states, method_of(recipe, vocabulary)
    top_k = states.top_k
    if top_k is not None and top_k > config.vocab_size:
        raise ValueError(f"recipe.states.top_k: {top_k}: the target has {config.vocab_size} tokens; give as many or fewer")
    of_top = None if top_k is None else method.learnt(settings)
    reads = method.reads(config, settings, with_llm_loss=rows.is_held_out)
    return {
        "target": target_hash(target_manifest),
        "tokenizer": rows.tokenizer,
        "rows": rows.hash,
        "num_rows": len(rows.rows),
        "sequence_length": rows.sequence_length,
        "computed_in": str(dtype),
        "tensors": stored_tensors(config, reads, states.dtype, top_k),
        # Of the distribution of the likeliest tokens; None: there are none, or it covers all tokens.
        "temperature": None if of_top is None else of_top.temperature,
        "vocabulary": None if of_top is None or of_top.ids is None or vocabulary is None else vocabulary.hash,
    }


def _with_heads_last(name: str, tensor: Tensor) -> Tensor:
    """Return a forward's [B, K, S, D] as the files' [B, S, K, D], or the reverse; other tensors unchanged."""
    return tensor.transpose(1, 2) if name.startswith((KEYS, VALUES)) else tensor


def encode(found: dict[str, Tensor], tensors: Tensors) -> dict[str, Tensor]:
    """Return the stored form of a forward's tensors, contiguous, on its device; `found` must hold the likeliest tokens too."""
    encoded = {}
    for name, (dtype, *_) in tensors.items():
        if name.endswith(SCALE):
            continue
        value = _with_heads_last(name, found[name])
        if dtype == "F8_E4M3":
            value = value.float()
            scale = value.abs().amax(-1, keepdim=True).div_(torch.finfo(E4M3).max).clamp_(min=LEAST_SCALE)
            encoded[name + SCALE] = scale[..., 0].contiguous()
            value = value / scale
        encoded[name] = value.to(DTYPES[dtype]).contiguous()
    return encoded


def decode(encoded: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a forward's tensors from stored ones: the target's in `dtype`, those of the likeliest tokens as stored."""
    found = {}
    for name, value in encoded.items():
        if not name.endswith(SCALE):
            scale = encoded.get(name + SCALE)
            value = value if scale is None else value.float().mul_(scale.unsqueeze(-1))
            value = value if name in TOP else value.to(dtype)
            found[name] = _with_heads_last(name, value).contiguous()
    return found


@torch.no_grad()
def top_k_of(
    hidden_NH: Tensor, weight_TH: Tensor, k: int, ids_V: Tensor | None, temperature: float, next_tokens_N: Tensor
) -> tuple[Tensor, ...]:
    """Return the tensors of tensors.TOP, in its order, for the next tokens after each of N; one chunk of logits at a time.

    Tokens are the target's numbers, other values float32. Log-probabilities are at the temperature, over the draft vocabulary
    if there is one; the best token and the next token's log-probability are over all tokens at temperature 1. hidden_NH: the
    target's, after its final norm; weight_TH: its head. ids_V: the draft vocabulary, int64, ascending; None: all tokens.
    temperature: of the soft labels. next_tokens_N: int64, any token where the text has none.
    """
    chunk = losses.chunk_tokens(len(weight_TH), hidden_NH.device)
    parts = []
    for start in range(0, max(1, len(hidden_NH)), chunk):
        part = slice(start, start + chunk)
        logits_CT = F.linear(hidden_NH[part], weight_TH).float()
        next_C1 = logits_CT.gather(-1, next_tokens_N[part, None]) - logits_CT.logsumexp(-1, keepdim=True)
        best_C = logits_CT.argmax(-1)
        scaled_CV = (logits_CT if ids_V is None else logits_CT[:, ids_V]) / temperature
        normalizer_C1 = scaled_CV.logsumexp(-1, keepdim=True)
        top_Ck, tokens_Ck = scaled_CV.topk(k)
        tokens_Ck = tokens_Ck if ids_V is None else ids_V[tokens_Ck]
        parts.append((tokens_Ck, top_Ck - normalizer_C1, normalizer_C1[:, 0], best_C, next_C1[:, 0]))
    return tuple(torch.cat(chunks) for chunks in zip(*parts, strict=True))
