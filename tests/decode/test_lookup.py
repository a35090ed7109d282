"""Prompt lookup against transformers' own generator."""

import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from longspec.decode.drafters import DraftInput
from longspec.decode.lookup import LONGEST, LookupDrafter
from longspec.decode.sampling import Sampler

CHAIN = 5


def proposed(drafter: LookupDrafter, texts: list[list[int]]) -> list[list[int]]:
    """Each row's chain."""
    roots_B = torch.tensor([text[-1] for text in texts])
    draft_input = DraftInput(texts, tuple(map(len, texts)), roots_B, roots_B, {})
    tokens_BS = drafter.propose(draft_input, (1,) * CHAIN, Sampler()).tokens_BS
    return [[token for token in row[1:] if token >= 0] for row in tokens_BS.tolist()]


def theirs(text: list[int]) -> list[int]:
    sizes = {"num_output_tokens": CHAIN, "max_matching_ngram_size": LONGEST, "max_length": len(text) + CHAIN + 1}
    generator = PromptLookupCandidateGenerator(**sizes)
    return generator.get_candidates(torch.tensor([text]))[0][0, len(text) :].tolist()


def test_chains_are_those_of_transformers() -> None:
    """Of texts that grow by one to six tokens a round, over few tokens and many; rows leave on the way."""
    torch.manual_seed(3)
    found = 0
    for tokens in (2, 4, 30):
        texts = [torch.randint(0, tokens, (length,)).tolist() for length in (1, 2, 3, 40)]
        drafter = LookupDrafter()
        drafter.begin(texts, {})
        for number in range(24):
            for text in texts:
                text += torch.randint(0, tokens, (1 + number % 6,)).tolist()
            chains = proposed(drafter, texts)
            assert chains == [theirs(text) for text in texts]
            found += sum(map(len, chains))
            if number == 12:
                drafter.select(torch.tensor([0, 3]))
                texts = [texts[0], texts[3]]
    assert found > 500
