"""Memory and operations of a GLIDE draft in closed form.

Symbols: H hidden width, N heads of width D, K key/value heads, I feed-forward width, V vocabulary.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from longspec.methods.contract import DraftMemory, DraftOperations
from longspec.methods.glide.settings import Draft
from longspec.models.attention.visibility import block_pairs, causal_pairs
from longspec.models.losses import TOP_BYTES, loss_bytes
from longspec.models.target import head_width


def cross_pairs(length: int, draft: Draft) -> float:
    """Pairs of the cross attention in a document under the variant's lag; random lags count as their mean."""
    if draft.lag_mode == "blocks":
        return block_pairs(length, draft.block)
    lags = [draft.lag] if draft.lag_mode == "fixed" else range(1, draft.lag + 1)
    return sum(causal_pairs(length, lag=lag) for lag in lags) / len(lags)


def operations(
    config: Any,
    settings: Draft,
    tokens: int,
    documents: Iterable[int],
    labels: int,
    *,
    with_llm_loss: bool,
    top_k: int | None = None,
) -> DraftOperations:
    """Forward and backward of the layer, and the vocabulary's products on the trained tokens.

    The backward of a trained product is two of its size (input and weight), of its own attention four where the forward has
    two; in the cross attention two, since keys and values are the frozen target's. The head has the draft's logits, their
    gradient, and the target's logits where there is a teacher: for soft labels, and for the target's own loss.
    """
    with_teacher = top_k is None and (settings.loss != "hard" or with_llm_loss)
    width = head_width(config)
    heads, key_values = config.num_attention_heads * width, config.num_key_value_heads * width
    own = cross = 0.0
    for length, times in Counter(documents).items():
        own += times * causal_pairs(length, settings.window)
        cross += times * cross_pairs(length, settings)
    attention = 2 * config.hidden_size * (2 * heads + key_values)  # own: q, k, v, o; cross: q, o
    products = attention + 3 * config.hidden_size * config.intermediate_size
    return DraftOperations(
        draft=3 * 2.0 * tokens * products + heads * (12.0 * own + 8.0 * cross),
        head=(3 if with_teacher else 2) * 2.0 * labels * config.hidden_size * config.vocab_size,
    )


def memory(
    config: Any, settings: Draft, tokens: int, dtype: torch.dtype, device: torch.device, *, top_k: int | None = None
) -> DraftMemory:
    """Bytes of the layer's forward and backward and of the losses, for tokens that are all trained.

    Kept, in elements of the dtype a token: norms and the inputs of products 8H, own keys and values 2KD, queries and
    attention outputs 4ND, four of width I; the hidden states' gradient H, which the loss makes in the forward; in float32
    the inputs of two norms 2H and two softmax sums a head. With a norm of its own at the end, 2H + one float32 H more.
    Losses hold the trained tokens' hidden states of both models once more, 2H, or H and top_k tokens with their
    log-probabilities; and a chunk of logits. The backward starts with two of width I and H more.
    """
    element = torch.empty((), dtype=dtype, device="meta").element_size()
    hidden, width, ffn = config.hidden_size, head_width(config), config.intermediate_size
    heads, key_values = config.num_attention_heads * width, config.num_key_value_heads * width
    norms = 3 if settings.final_norm else 2
    kept = element * ((5 + 2 * norms) * hidden + 2 * key_values + 4 * heads + 4 * ffn)
    kept += 4 * (norms * hidden + 2 * config.num_attention_heads)
    labels = 3 * hidden * element if top_k is None else 2 * hidden * element + TOP_BYTES * top_k
    return DraftMemory(
        kept=kept * tokens,
        losses=loss_bytes(config.vocab_size, tokens, device, sparse=top_k is not None) + labels * tokens,
        backward=(2 * ffn + hidden) * element * tokens,
    )
