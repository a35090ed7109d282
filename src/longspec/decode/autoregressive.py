"""Decoding without a draft, token by token: the yardstick for text and speed.

Shapes: S tokens, V vocabulary.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from longspec.decode.cache import slide, tokens_ahead
from longspec.decode.prefill import Prefilled
from longspec.decode.sampling import Sampler, check_drawn
from longspec.decode.texts import Stops
from longspec.families import layer_windows
from longspec.models.target import group_of, tensor_of_first_rank
from longspec.stopwatch import Stopwatch

# Two logits closer than this many roundings of the dtype, at the logits' size, may swap when the same numbers are summed in
# another order (one token at a time or several): a near-tie. Half precision rounds its products in float32, so that only the
# few roundings of stored values count; float32 also adds up the errors of its long sums.
NEAR_TIE_ROUNDINGS = {torch.float64: 64, torch.float32: 64, torch.bfloat16: 4, torch.float16: 4}


@dataclass
class Plain:
    """Hold the tokens after the prompt, the logits [V] that chose each, and the seconds without the prompt's own forward."""

    ids: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    seconds: float = 0.0


def near_tie_margin(logits_V: Tensor) -> float:
    """Return the margin below which two logits of this dtype count as a tie."""
    return NEAR_TIE_ROUNDINGS[logits_V.dtype] * torch.finfo(logits_V.dtype).eps * float(logits_V.abs().max())


@torch.inference_mode()
def decode_plain(
    target: Any,
    start: Prefilled,
    max_new_tokens: int,
    eos: int | Collection[int] | None,
    sampler: Sampler | None = None,
    on_token: Callable[[int], None] | None = None,
    *,
    keep_logits: bool = True,
) -> Plain:
    """Decode one prompt until eos or `max_new_tokens`; greedily without a sampler. on_token gets each token as it comes.

    keep_logits: whether to keep a vocabulary of logits for each token, which show near-ties.

    The cache is the one of decoding with a draft: one that is copied for each token would make any draft look good. So would
    layers that read more than their window. Raises RuntimeError for logits from which no token can be drawn.
    """
    assert len(start.prompts) == 1, "one prompt at a time"
    sampler, stops, decoded, group = sampler or Sampler(), Stops(eos), Plain(), group_of(target)
    with start.lent(tokens_ahead(max_new_tokens)) as lent:
        slide(lent.cache, layer_windows(target.config))
        clock, logits_V = Stopwatch(lent.logits_BV.device), lent.logits_BV[0]
        while True:
            token = int(tensor_of_first_rank(sampler.choose(logits_V[None]), group))
            check_drawn([token])
            decoded.ids.append(token)
            if keep_logits:
                decoded.logits.append(logits_V)
            if on_token is not None:
                on_token(token)
            if decoded.ids[-1] in stops.eos or len(decoded.ids) >= max_new_tokens:
                break
            last_BS = torch.tensor([decoded.ids[-1:]], device=logits_V.device)
            logits_V = target(last_BS, past_key_values=lent.cache, use_cache=True).logits[0, -1].to(last_BS.device)
        clock.mark("plain")
    decoded.seconds = clock.take()["plain"]
    return decoded
