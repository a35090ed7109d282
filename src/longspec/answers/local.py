"""The target itself as the engine: batches of conversations through transformers, each row with its own random numbers.

Shapes: B rows, S new tokens, T tokens of prompt and answer, V vocabulary.
"""

from collections.abc import Collection, Iterator
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from longspec.answers.conversation import Asker, Conversation, Key
from longspec.answers.settings import BATCH_TOKENS, Regenerate
from longspec.decode.cache import select, target_cache, tokens_ahead
from longspec.decode.prefill import LAST
from longspec.decode.sampling import Sampler
from longspec.distributed import Ranks
from longspec.models.target import group_of, place_target, resolve_dtype, tensor_of_first_rank, within_memory

STAYING = 7 / 8  # of a batch's rows: while more go on, copying their cache costs more than the ended rows


def batches(conversations: list[Conversation], lengths: dict[Key, int], settings: Regenerate) -> list[list[Conversation]]:
    """Return batches of conversations with as many turns and a first prompt of about the same length, the longest first.

    Batches depend on the records and settings alone: a job that goes on answers whole batches again, with the same rows.
    """
    order = sorted(conversations, key=lambda each: (each.turns, lengths[each.key], each.key), reverse=True)
    made = []
    for _, same in groupby(order, key=lambda each: each.turns):
        rest = list(same)
        while rest:
            rows = max(1, min(settings.batch, BATCH_TOKENS // (lengths[rest[0].key] + settings.new_tokens)))
            made.append(rest[:rows])
            rest = rest[rows:]
    return made


def answered(conversations: list[Conversation], done: set[Key], asker: Asker, ranks: Ranks) -> Iterator[list[Conversation]]:
    """Yield the conversations that are not done yet, a batch at a time; every rank yields the same.

    ranks: they hold the target together and have joined already. The target is loaded for the first batch.
    """
    lengths = asker.first_lengths([each for each in conversations if not each.end])
    yield [each for each in conversations if each.end and each.key not in done]
    target: Any = None
    for batch in batches([each for each in conversations if not each.end], lengths, asker.settings):
        if all(each.key in done for each in batch):
            continue
        with within_memory("answer"):
            target = target or place_target(str(asker.target), resolve_dtype(asker.settings.precision), ranks)
            answer(batch, target, asker)
        yield [each for each in batch if each.key not in done]


def answer(batch: list[Conversation], target: Any, asker: Asker) -> None:
    """Answer a batch of conversations to their ends, turn by turn."""
    settings = asker.settings
    while going := [each for each in batch if not each.end]:
        prompts = zip(going, asker.prompts(going), strict=True)
        asked = [(each, prompt) for each, prompt in prompts if prompt is not None]
        if not asked:
            continue
        own = [torch.Generator(target.device).manual_seed(each.seed(settings.seed)) for each, _ in asked]
        samplers = [Sampler(settings.temperature, 0, settings.top_p, generator) for generator in own]
        found = decode(target, [prompt for _, prompt in asked], settings.new_tokens, asker.ends, samplers)
        for (each, _), tokens in zip(asked, found, strict=True):
            each.take(asker.answer(tokens))


@torch.inference_mode()
def decode(
    target: Any, prompts: list[list[int]], new_tokens: int, ends: Collection[int], samplers: list[Sampler]
) -> list[list[int]]:
    """Return the tokens after each prompt, through the first one in `ends`, at most `new_tokens`.

    Rows are padded on the left; ended rows leave the batch together. samplers: one per row, all of one temperature and top_p,
    so that a row's draws do not depend on other rows. Raises ValueError for logits with inf or NaN.
    """
    rows, found = list(range(len(prompts))), [[] for _ in prompts]  # type: list[int], list[list[int]]
    ids = [torch.tensor(prompt, device=target.device) for prompt in prompts]
    ids_BS, mask_BT = (pad_sequence(x, batch_first=True, padding_side="left") for x in (ids, list(map(torch.ones_like, ids))))
    positions_BS = (mask_BT.cumsum(-1) - 1).clamp_min(0)
    cache = target_cache(target, tokens_ahead(new_tokens))
    for count in range(1, new_tokens + 1):
        place = {"attention_mask": mask_BT, "position_ids": positions_BS}
        logits_BV = target(ids_BS, **place, past_key_values=cache, use_cache=True, logits_to_keep=LAST).logits[:, -1]
        tokens = tensor_of_first_rank(_chosen(logits_BV, [samplers[row] for row in rows]), group_of(target)).tolist()
        for row, token in zip(rows, tokens, strict=True):
            if not found[row] or found[row][-1] not in ends:
                found[row].append(token)
        going = [at for at, row in enumerate(rows) if found[row][-1] not in ends]
        if not going or count == new_tokens:
            break
        ids_BS, positions_BS = torch.tensor(tokens, device=target.device)[:, None], positions_BS[:, -1:] + 1
        if len(going) <= STAYING * len(rows):
            going_B = torch.tensor(going, device=target.device)
            select(cache, going_B, cache.get_seq_length(), tokens_ahead(new_tokens - count))
            ids_BS, mask_BT, positions_BS = ids_BS[going_B], mask_BT[going_B], positions_BS[going_B]
            rows = [rows[at] for at in going]
        mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(rows), 1)], dim=1)
    return found


def _chosen(logits_BV: Tensor, samplers: list[Sampler]) -> Tensor:
    """Return the next token of each row, int64 [B]. Raises ValueError for logits with inf or NaN."""
    if not logits_BV.amax(-1).isfinite().all():
        raise ValueError(
            "the target's logits hold inf or NaN, so that there is no next token; set data.<name>.regenerate.precision to "
            "fp32, or look at the target's weights"
        )
    if samplers[0].greedy:
        return logits_BV.argmax(-1)
    p_BV = samplers[0].log_probabilities(logits_BV).exp()
    return torch.cat([sampler.draw_own(p_BV[row : row + 1]) for row, sampler in enumerate(samplers)])
