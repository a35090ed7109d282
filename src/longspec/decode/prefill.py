"""Prompts in the target's cache: rows of different length in one transformers cache.

Row b's tokens lie left-aligned in its first lengths[b] places; what lies behind them is nothing, and no query sees it.

Shapes: B rows, V vocabulary.
"""

from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache


@dataclass
class Prefilled:
    """Prompts, the target's cache over them and the logits [B, V] of the token after each. A decoding leaves it as it was."""

    prompts: list[list[int]]
    cache: DynamicCache
    logits_BV: Tensor

    def working_cache(self) -> DynamicCache:
        """The same keys and values in a cache that may grow: growing makes new tensors, so these stay."""
        cache = copy(self.cache)
        cache.layers = [copy(layer) for layer in self.cache.layers]
        return cache


@torch.inference_mode()
def prefill(target: Any, prompts: list[list[int]]) -> Prefilled:
    """The prompts' own forwards, one for all prompts of a length, by the target's own attention.

    Raises ValueError for an empty prompt.
    """
    if not prompts or not all(prompts):
        raise ValueError("prompts: each needs a token at least; give the bos token where there is no text")
    rows_of: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows_of.setdefault(len(prompt), []).append(row)
    parts = []
    for rows in rows_of.values():
        cache = DynamicCache()  # of whole layers: a sliding one could not take back what was rejected
        ids_BS = torch.tensor([prompts[row] for row in rows], device=target.device)
        logits_BV = target(ids_BS, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        parts.append((cache, logits_BV))
    if len(parts) == 1:
        return Prefilled(prompts, *parts[0])
    order = [row for rows in rows_of.values() for row in rows]
    return Prefilled(prompts, _side_by_side([cache for cache, _ in parts], order), _sorted([part for _, part in parts], order))


def _sorted(parts: list[Tensor], order: list[int]) -> Tensor:
    """The rows of all parts, of which the n-th is row order[n]."""
    return torch.cat(parts)[torch.tensor(order).argsort().to(parts[0].device)]


def _side_by_side(caches: list[DynamicCache], order: list[int]) -> DynamicCache:
    """One cache of all rows, filled up with zeros on the right. Layer by layer, so that one layer is held twice, not all."""
    longest, whole = max(cache.get_seq_length() for cache in caches), caches[0]
    for number, layer in enumerate(whole.layers):
        for name in ("keys", "values"):
            parts = [getattr(cache.layers[number], name) for cache in caches]
            filled = [torch.nn.functional.pad(part, (0, 0, 0, longest - part.shape[2])) for part in parts]
            setattr(layer, name, _sorted(filled, order))
        for cache in caches[1:]:
            cache.layers[number].reset()
    return whole
