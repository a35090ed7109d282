"""Parts of a round: logits as they are warped, tokens that prompt lookup copies, and which drafted ones stay, greedily."""

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from longspec.decode.drafters import DraftInput
from longspec.decode.lookup import LONGEST, LookupDrafter
from longspec.decode.sampling import Sampler, first_of_largest
from longspec.decode.tree import NOTHING, DraftTree
from longspec.decode.verify import verify_tree
from tests.decode.models import make_target

WARPS = [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.3, 5, 1.0), (1.0, 0, 0.6), (0.8, 7, 0.9), (2.0, 100, 0.05)]


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), WARPS)
def test_warps_are_those_of_generate(temperature: float, top_k: int, top_p: float) -> None:
    """Against the list of processors that generate itself puts together, and applies to float32."""
    target, logits_NV = make_target(0), torch.randn(50, 61) * 4
    config = GenerationConfig(do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p)
    config, _ = target._prepare_generation_config(config)
    processors = target._get_logits_processor(config, input_ids_seq_length=3, device="cpu")
    wanted = processors(torch.zeros(50, 3, dtype=torch.int64), logits_NV).softmax(-1)
    torch.testing.assert_close(Sampler(temperature, top_k, top_p).log_probabilities(logits_NV).exp(), wanted)


def test_the_greatest_is_torchs_argmax_with_ties_and_numbers_that_are_none() -> None:
    torch.manual_seed(0)
    for size in (1024 * 3, 128 * 5, 97):
        x_NV = torch.randint(0, 40, (9, size)).to(torch.bfloat16)  # the greatest stands many times
        x_NV[1, size // 2] = x_NV[2, -1] = float("inf")
        x_NV[3, 5] = x_NV[3, -1] = x_NV[4, -2] = float("nan")
        x_NV[5] = -float("inf")
        assert torch.equal(first_of_largest(x_NV), x_NV.argmax(-1))


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


def test_chains_of_prompt_lookup_are_those_of_transformers() -> None:
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


VOCABULARY = 4  # few, so that trees agree with the target often, and siblings with each other


def tree_of(rows: int, levels: list[int], generator: torch.Generator) -> DraftTree:
    """Random tokens below random nodes of the level before, some of them not there."""
    depths = [0, *(depth for depth, size in enumerate(levels, 1) for _ in range(size))]
    tokens_BS = torch.randint(0, VOCABULARY, (rows, len(depths)), generator=generator)
    parents_BS, seen_BSS = torch.full_like(tokens_BS, NOTHING), torch.zeros(rows, len(depths), len(depths), dtype=torch.bool)
    seen_BSS[:, 0, 0] = True
    for row in range(rows):
        for node in range(1, len(depths)):
            above = [place for place, depth in enumerate(depths) if depth == depths[node] - 1]
            parent = above[int(torch.randint(0, len(above), (), generator=generator))]
            parents_BS[row, node] = parent
            seen_BSS[row, node] = seen_BSS[row, parent]
            seen_BSS[row, node, node] = True
            if torch.rand((), generator=generator) < 0.1:
                tokens_BS[row, node] = NOTHING
    return DraftTree(tokens_BS, parents_BS, seen_BSS, torch.tensor(depths), len(levels))


def said(path: list[int], number: int) -> int:
    """What a target says behind these tokens: by the text alone, so the same behind siblings that are equal."""
    return (sum((place + number) * token for place, token in enumerate(path, 3)) + number + len(path)) % VOCABULARY


@pytest.mark.parametrize("levels", [[1, 1, 1], [3, 2, 4], [2, 5], [6], [1, 3, 1, 1]])
def test_what_stays_is_what_a_walk_from_the_root_finds(levels: list[int]) -> None:
    """As a walk down the tree by the host says."""
    generator, kept = torch.Generator().manual_seed(len(levels)), 0
    for number in range(60):
        tree = tree_of(3, levels, generator)
        paths = [
            [tokens_S[line_S].tolist() for line_S in seen_SS]
            for tokens_S, seen_SS in zip(tree.tokens_BS, tree.seen_BSS, strict=True)
        ]
        says_BS = torch.tensor([[said(path, number) for path in row] for row in paths])
        found = verify_tree(torch.nn.functional.one_hot(says_BS, VOCABULARY).float(), tree, Sampler(0.0))
        for row, (path, tokens) in enumerate((row[0], list[int]()) for row in paths):
            while path in paths[row]:
                tokens.append(said(path, number))
                assert paths[row][found.path_BE[row, len(tokens) - 1]] == path
                path = [*path, tokens[-1]]
            assert int(found.kept_B[row]) == len(tokens) - 1
            assert found.tokens_BE[row, : len(tokens)].tolist() == tokens
            kept += len(tokens) - 1
    assert kept > 30
