"""Prompts in the target's cache: rows of different length in one transformers cache.

Row b's tokens lie left-aligned in its first lengths[b] places; no query sees what lies behind them.

Shapes: B rows, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from longspec.decode.cache import restore, target_cache
from longspec.decode.twin import ReadTarget
from longspec.families import check_target
from longspec.models.target import check_splits, draft_device, group_of

# logits_to_keep of a forward over prompts. An index, since for a slice of several rows torch copies the whole head for each
# row: with 49,152 tokens on two cores, 169 ms instead of 12 for one prompt, 9.5 s for 64. A list, which transformers makes an
# index: a tensor would be on the device where a spread target begins, and the hidden states are where it ends.
LAST = [-1]


def check_decodable(target: Any) -> None:
    """Raise ValueError if a target has no weights or would not give its own text."""
    check_target(target.config, target.config.name_or_path or "target")
    if (group := group_of(target)) is not None:
        check_splits(target.config, group.size(), target.config.name_or_path or "target")
    if "meta" in (target.device.type, target.lm_head.weight.device.type):
        raise ValueError(
            "target: its weights are on meta, where there are no numbers: load it on a CPU or a GPU; by device_map at least "
            "model.embed_tokens and lm_head, which drafts read too"
        )


def check_prompts(prompts: list[list[int]], vocabulary: int) -> None:
    """Raise ValueError for a prompt without a token and for ids outside the vocabulary."""
    if not prompts or not all(prompts):
        raise ValueError("prompts: each needs a token at least; give the bos token where there is no text")
    for row, prompt in enumerate(prompts):
        if min(prompt) < 0 or max(prompt) >= vocabulary:
            place, token = next((place, token) for place, token in enumerate(prompt) if not 0 <= token < vocabulary)
            raise ValueError(
                f"prompts: row {row}, token {place}: {token} lies outside 0..{vocabulary - 1}, the target's vocabulary; use "
                "the target's own tokenizer"
            )


@dataclass
class Prefilled:
    """Hold prompts, the target's cache over them, the logits [B, V] of the token after each, and what a drafter reads.

    reads: the names of all that it reads; hidden: the hidden states among them, [B, T, H] by name, left-aligned.

    Any number of decodings may start here, one after the other: each works in this cache, behind the prompts, and leaves it as
    it was; the last one gives hidden states up when it has begun, and rows as they end.
    """

    prompts: list[list[int]]
    cache: Cache
    logits_BV: Tensor
    hidden: dict[str, Tensor]
    reads: tuple[str, ...] = ()
    is_last: bool = False
    _lent: Lock = field(default_factory=Lock, init=False, repr=False, compare=False)

    @contextmanager
    def lent(self, ahead: int) -> Iterator["Prefilled"]:
        """Lend prompts and cache to one decoding, with room for `ahead` tokens; the block's end cuts the cache to the prompts.

        The lent cache has its own list of layers: one that replaces a layer there does not change this cache. Raises
        RuntimeError while it is lent.
        """
        if not self._lent.acquire(blocking=False):
            raise RuntimeError("prompts: a decoding that started here has not ended; wait for its end, or prefill once more")
        lengths = [len(prompt) for prompt in self.prompts]
        try:
            for layer in self.cache.layers:
                layer.make_room(max(lengths) + ahead)
            yield self if self.is_last else replace(self, cache=Cache(layers=list(self.cache.layers)))
        finally:
            if not self.is_last:
                restore(self.cache, lengths)
            self._lent.release()


@torch.inference_mode()
def prefill(target: Any, prompts: list[list[int]], ahead: int = 0, reads: tuple[str, ...] = ()) -> Prefilled:
    """Run the prompts' own forwards, one for all prompts of a length, with the target's own attention.

    ahead: how many tokens a decoding will add, if that is known; room made later copies the cache. reads: what a drafter reads:
    the hidden states to keep, and the keys and values to hold with all heads. Raises ValueError as check_decodable and
    check_prompts do.
    """
    check_decodable(target)
    check_prompts(prompts, target.config.vocab_size)
    rows_of: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows_of.setdefault(len(prompt), []).append(row)
    parts, read = [], ReadTarget(target, target.config._attn_implementation, reads)
    for rows in rows_of.values():
        cache = target_cache(target, ahead if len(rows_of) == 1 else 0, read.cached_layers)
        ids_BS = torch.tensor([prompts[row] for row in rows], device=draft_device(target))
        logits_B1V = read.model(ids_BS, past_key_values=cache, use_cache=True, logits_to_keep=LAST).logits
        parts.append((cache, logits_B1V[:, -1].to(ids_BS.device), dict(read.hidden)))
    if len(parts) == 1:
        return Prefilled(prompts, *parts[0], reads)
    order = torch.tensor([row for rows in rows_of.values() for row in rows]).argsort()
    whole, longest = target_cache(target, ahead, read.cached_layers), max(map(len, prompts))

    def together(parts: list[Tensor]) -> Tensor:
        """Return [..., T, H] of all rows in their order, filled up with zeros on the right."""
        return torch.cat([pad(x, (0, 0, 0, longest - x.shape[-2])) for x in parts])[order.to(parts[0].device)]

    for layer in whole.layers:  # one by one, so that only one is held twice
        same = [cache.layers.pop(0) for cache, _, _ in parts]
        layer.add(together([each.keys for each in same]), together([each.values for each in same]))
    hidden = {name: together([each[name] for _, _, each in parts]) for name in parts[0][2]}
    logits_BV = torch.cat([each_BV for _, each_BV, _ in parts])
    return Prefilled(prompts, whole, logits_BV[order.to(logits_BV.device)], hidden, reads)
