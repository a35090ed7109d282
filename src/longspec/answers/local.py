"""The target itself as the engine: conversations in batches, through transformers."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from longspec.answers.conversation import Conversation, Key
from longspec.answers.decoding import decode
from longspec.answers.questions import Asker
from longspec.answers.settings import BATCH_TOKENS, Regenerate
from longspec.decode.sampling import Sampler
from longspec.distributed import Ranks
from longspec.models.placement import place_target
from longspec.models.precision import resolve_dtype


def batches(conversations: list[Conversation], lengths: dict[Key, int], settings: Regenerate) -> list[list[Conversation]]:
    """Conversations of about the same number of turns and length of their first prompt, the longest first.

    A function of the records and settings alone: a job that goes on answers whole batches again, in the same company.
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


class LocalTarget:
    """A loaded target that answers batches."""

    def __init__(self, path: Path, settings: Regenerate, asker: Asker, ranks: Ranks) -> None:
        self.target: Any = place_target(str(path), resolve_dtype(settings.precision), ranks)
        self.settings, self.asker = settings, asker

    def answer(self, batch: list[Conversation]) -> None:
        """Answer conversations to their ends."""
        while going := [each for each in batch if not each.end]:
            prompts = self.asker.prompts(going)
            asked = [(each, prompt) for each, prompt in zip(going, prompts, strict=True) if prompt is not None]
            if not asked:
                continue
            rows = [prompt for _, prompt in asked]
            samplers = [self._sampler(each) for each, _ in asked]
            found = decode(self.target, rows, self.settings.new_tokens, self.asker.ends, samplers)
            for (each, _), tokens in zip(asked, found, strict=True):
                each.take(self.asker.answer(tokens))

    def _sampler(self, conversation: Conversation) -> Sampler:
        if self.settings.temperature == 0:
            return Sampler()
        generator = torch.Generator(self.target.device).manual_seed(conversation.seed(self.settings.seed))
        return Sampler(self.settings.temperature, 0, self.settings.top_p, generator)


def answered(
    conversations: list[Conversation],
    lengths: dict[Key, int],
    done: set[Key],
    path: Path,
    settings: Regenerate,
    asker: Asker,
    ranks: Ranks,
) -> Iterator[list[Conversation]]:
    """Those that are not done yet, a batch at a time; every rank yields the same.

    lengths: of first prompts; ranks: that have joined to hold the target together, which is loaded for the first batch.
    """
    target = None
    for batch in batches(conversations, lengths, settings):
        if all(each.key in done for each in batch):
            continue
        target = target or LocalTarget(path, settings, asker, ranks)
        target.answer(batch)
        yield [each for each in batch if each.key not in done]
