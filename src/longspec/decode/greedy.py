"""Greedy decoding, plain and speculative, of one sequence on a transformers target and cache."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from longspec.decode.drafters import Drafter

# Two logits closer than this many roundings of the dtype, at the logits' size, may swap when the same numbers are summed
# in another order (one token at a time or several): a near-tie. Half precision rounds its products in float32, so only
# the few roundings of stored values count; float32 adds up the errors of its long sums too.
NEAR_TIE_ROUNDINGS = {torch.float64: 64, torch.float32: 64, torch.bfloat16: 4, torch.float16: 4}


@dataclass
class Decoded:
    """Tokens after the prompt and what they cost. The prompt's own forward is in neither count nor time."""

    ids: list[int]
    accepted: list[int] = field(default_factory=list)  # drafted tokens accepted in each round
    logits: list[Tensor] = field(default_factory=list)  # plain only: [V] of each token, to judge a difference
    seconds: float = 0.0
    seconds_draft: float = 0.0
    seconds_target: float = 0.0

    @property
    def new_tokens(self) -> int:
        """Tokens the rounds brought: the accepted ones and one of the target's own each."""
        return sum(self.accepted) + len(self.accepted)


@dataclass
class Prefilled:
    """A prompt, the target's cache over it and the logits [V] of the token after it. A decoding leaves it as it was."""

    prompt: list[int]
    cache: DynamicCache
    logits_V: Tensor

    def rewind(self) -> None:
        """Remove what a decoding added."""
        self.cache.crop(len(self.prompt) - self.cache.get_seq_length())  # a negative number of tokens


@torch.inference_mode()
def prefill(target: Any, prompt: list[int]) -> Prefilled:
    """The prompt's own forward."""
    cache = DynamicCache()  # of whole layers: a sliding one could not take back what was rejected
    ids_BS = torch.tensor([prompt], device=target.device)
    logits_V = target(ids_BS, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
    return Prefilled(prompt, cache, logits_V)


def near_tie_margin(logits_V: Tensor) -> float:
    """The margin below which two logits of this dtype count as a tie."""
    return NEAR_TIE_ROUNDINGS[logits_V.dtype] * torch.finfo(logits_V.dtype).eps * float(logits_V.abs().max())


@torch.inference_mode()
def decode_plain(target: Any, start: Prefilled, new_tokens: int, eos: int) -> Decoded:
    """Token by token."""
    cache, logits_V = start.cache, start.logits_V
    decoded, began = Decoded([]), time.perf_counter()
    while True:
        decoded.ids.append(int(logits_V.argmax()))
        decoded.logits.append(logits_V)
        if decoded.ids[-1] == eos or len(decoded.ids) > new_tokens:
            break
        last_BS = torch.tensor([decoded.ids[-1:]], device=target.device)
        logits_V = target(last_BS, past_key_values=cache, use_cache=True).logits[0, -1]
    decoded.seconds = time.perf_counter() - began
    start.rewind()
    return decoded


@torch.inference_mode()
def decode_speculative(
    target: Any, drafter: Drafter, start: Prefilled, new_tokens: int, eos: int, draft_tokens: int
) -> Decoded:
    """Draft a chain, verify it in one forward of the target, keep the longest prefix the target would have chosen itself.

    Ends after the round that reaches `new_tokens` tokens, or at eos; the tokens are those of `decode_plain`.
    """
    cache = start.cache
    decoded, began = Decoded([int(start.logits_V.argmax())]), time.perf_counter()
    while decoded.ids[-1] != eos and len(decoded.ids) <= new_tokens:
        ids, last = start.prompt + decoded.ids, cache.layers[-1]
        round_began = time.perf_counter()
        chain = drafter.propose(ids, last.keys, last.values, draft_tokens)
        drafted = time.perf_counter()
        input_BS = torch.tensor([[ids[-1], *chain]], device=target.device)
        choices = target(input_BS, past_key_values=cache, use_cache=True).logits[0].argmax(-1).tolist()
        decoded.seconds_draft += drafted - round_began
        decoded.seconds_target += time.perf_counter() - drafted
        accepted = accepted_prefix(chain, choices, eos)
        decoded.accepted.append(accepted)
        decoded.ids += choices[: accepted + 1]
        cache.crop(accepted - len(chain))  # a count of tokens to remove, as a negative number
    decoded.seconds = time.perf_counter() - began
    start.rewind()
    return decoded


def accepted_prefix(chain: list[int], choices: list[int], eos: int) -> int:
    """How many drafted tokens are the target's own choices; none after an eos, which ends the text as the target's token."""
    for place, token in enumerate(chain):
        if token != choices[place] or token == eos:
            return place
    return len(chain)
