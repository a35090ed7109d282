"""Decoding without a draft, token by token: the yardstick for text and speed.

Shapes: S tokens, V vocabulary.
"""

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from longspec.decode.cache import growing
from longspec.decode.prefill import Prefilled
from longspec.decode.sampling import Sampler
from longspec.decode.stops import Stops

# Two logits closer than this many roundings of the dtype, at the logits' size, may swap when the same numbers are summed
# in another order (one token at a time or several): a near-tie. Half precision rounds its products in float32, so only
# the few roundings of stored values count; float32 adds up the errors of its long sums too.
NEAR_TIE_ROUNDINGS = {torch.float64: 64, torch.float32: 64, torch.bfloat16: 4, torch.float16: 4}


@dataclass
class Plain:
    """Tokens after the prompt, the logits [V] each was chosen by, and the time. The prompt's own forward is not in it."""

    ids: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    seconds: float = 0.0


def near_tie_margin(logits_V: Tensor) -> float:
    """The margin below which two logits of this dtype count as a tie."""
    return NEAR_TIE_ROUNDINGS[logits_V.dtype] * torch.finfo(logits_V.dtype).eps * float(logits_V.abs().max())


@torch.inference_mode()
def decode_plain(
    target: Any, start: Prefilled, max_new_tokens: int, eos: int | Collection[int] | None, sampler: Sampler | None = None
) -> Plain:
    """One sequence, until eos or `max_new_tokens`; greedy without a sampler.

    On the cache that decoding with a draft has: one that is copied for each token would make any draft look good.
    """
    cache, logits_V = growing(start.cache), start.logits_BV[0]
    sampler, stops = sampler or Sampler(), Stops(eos)
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)  # else the prompt's forward, which still runs, would be in the time
    decoded, began = Plain(), time.perf_counter()
    while True:
        decoded.ids.append(int(sampler.choose(logits_V[None])))
        decoded.logits.append(logits_V)
        if decoded.ids[-1] in stops.eos or len(decoded.ids) >= max_new_tokens:
            break
        last_BS = torch.tensor([decoded.ids[-1:]], device=target.device)
        logits_V = target(last_BS, past_key_values=cache, use_cache=True).logits[0, -1]
    decoded.seconds = time.perf_counter() - began
    return decoded
