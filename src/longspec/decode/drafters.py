"""What proposes tokens: a GLIDE draft, or the prompt itself.

Shapes: B batch (1), S new tokens, T cached tokens, H hidden width, K key/value heads, D head width.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from longspec.train.models.glide import GlideLayer
from longspec.train.models.visibility import Visibility


class Drafter(Protocol):
    """Proposes up to a number of tokens that may follow."""

    def propose(self, ids: list[int], target_keys_BKTD: Tensor, target_values_BKTD: Tensor, count: int) -> list[int]:
        """Tokens that may follow `ids`; the target's last-layer cache covers all of `ids` but the last."""
        ...


class GlideDrafter:
    """A greedy chain of a GLIDE draft. Its own cache holds at most the window and one chain, whatever the context."""

    def __init__(self, target: Any, layer: GlideLayer, window: int) -> None:
        self.target, self.layer, self.window = target, layer, window
        self.cached_ids: list[int] = []  # tokens whose own keys and values were computed, from the sequence's start
        self.own: tuple[Tensor, Tensor] | None = None  # of the newest of them

    def propose(self, ids: list[int], target_keys_BKTD: Tensor, target_values_BKTD: Tensor, count: int) -> list[int]:
        """A greedy chain of `count` tokens; step d sees the target's cache with a lag of d, as in training."""
        self._forget_rejected(ids)
        new, chain = ids[len(self.cached_ids) :], []
        for _ in range(count):
            hidden_BSH = self._step(new, (target_keys_BKTD, target_values_BKTD), keep=self.window + 1 + count)
            new = [int(self.target.lm_head(hidden_BSH[:, -1]).argmax())]
            chain += new
        return chain

    def _forget_rejected(self, ids: list[int]) -> None:
        """Drop the cached tokens that are no part of `ids`; the last of `ids` is always taken in anew."""
        keep = min(len(self.cached_ids), len(ids) - 1)
        if self.cached_ids[:keep] != ids[:keep]:  # another text
            self.cached_ids, self.own, keep = [], None, 0
        dropped = len(self.cached_ids) - keep
        if self.own is not None and dropped:
            self.own = (self.own[0][:, :, :-dropped], self.own[1][:, :, :-dropped])
        self.cached_ids = self.cached_ids[:keep]

    def _step(self, new: list[int], target: tuple[Tensor, Tensor], keep: int) -> Tensor:
        """Take in new tokens and return the hidden state of the last, [1, 1, H]."""
        first = len(self.cached_ids) + max(0, len(new) - keep)
        self.cached_ids = self.cached_ids + new
        embedded_BSH = self.target.model.embed_tokens(torch.tensor([new[-keep:]], device=target[0].device))
        positions_BS = torch.arange(first, len(self.cached_ids), device=target[0].device)[None]
        rope = self.target.model.rotary_emb(embedded_BSH, positions_BS)
        own = self.layer.own_keys_values(embedded_BSH, rope)
        if self.own is not None:
            own = (torch.cat([self.own[0], own[0]], dim=2), torch.cat([self.own[1], own[1]], dim=2))
        self.own = (own[0][:, :, -keep:], own[1][:, :, -keep:])
        seen = (own[0][:, :, -self.window - 1 :], own[1][:, :, -self.window - 1 :])
        last_rope = (rope[0][:, -1:], rope[1][:, -1:])
        return self.layer(embedded_BSH[:, -1:], last_rope, seen, target, Visibility(), Visibility())


class LookupDrafter:
    """Prompt lookup: what followed the newest n-gram earlier in the text (transformers' own generator)."""

    def __init__(self, max_ngram: int = 3) -> None:
        self.max_ngram = max_ngram

    def propose(self, ids: list[int], target_keys_BKTD: Tensor, target_values_BKTD: Tensor, count: int) -> list[int]:
        """At most `count` tokens; none when the text holds no earlier match."""
        generator = PromptLookupCandidateGenerator(
            num_output_tokens=count, max_matching_ngram_size=self.max_ngram, max_length=len(ids) + count + 1
        )
        candidates_BS, _ = generator.get_candidates(torch.tensor([ids]))
        return candidates_BS[0, len(ids) :].tolist()
