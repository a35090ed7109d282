"""The draft in decoding is the draft in training: positions, lags, windows, what is fed back, and tree depths agree."""

from dataclasses import replace
from functools import lru_cache
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from longspec.decode.drafters import DraftInput
from longspec.decode.levels import Budget
from longspec.decode.sampling import Sampler
from longspec.methods.dflash.drafter import DFlashDrafter
from longspec.methods.dflash.trainer import DFlashTrainer
from longspec.methods.eagle3.drafter import Eagle3Drafter
from longspec.methods.eagle3.trainer import Eagle3Trainer
from longspec.methods.glide.drafter import GlideDrafter
from longspec.methods.glide.settings import Draft
from longspec.methods.glide.trainer import Qwen2Glide
from longspec.models.attention.visibility import Visibility
from longspec.states.forward import TargetStates
from longspec.states.tensors import layer_of
from tests.decode.models import WINDOW, make_dflash, make_eagle3, make_layer, make_target
from tests.targets import last_states

pytestmark = pytest.mark.slow  # half a minute and more as a whole

ROWS = (31, 5, 18, 1)
UNKNOWN = 1e3  # in places that nobody may read
CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # norms are taken in float32, whatever the layer's dtype
SOME = tuple(range(1, 61, 3))  # of the target's tokens
EAGLE3 = {
    "eagle3": (Qwen2Config, {}),
    "eagle3-window": (LlamaConfig, {"window": 7, "ids": SOME}),
    "eagle3.1": (Qwen3Config, {"fc_norm": True, "norm_output": True, "ids": SOME}),
}
DFLASH = {"dflash": (Qwen3Config, {}), "dflash-window": (LlamaConfig, {"window": 7, "ids": SOME, "tied_k_norm": False})}


@lru_cache
def own_states(target: Any, text: tuple[int, ...]) -> tuple[Tensor, ...]:
    """transformers' hidden states of a text, [T, H] each, layer by layer."""
    with torch.no_grad():
        return tuple(states[0] for states in target(torch.tensor([text]), output_hidden_states=True).hidden_states)


class Recorded:
    """Keeps the logits of every node that was asked for its children."""

    def logits(self, draft_input, builder):
        self.seen = [] if builder.nodes == 1 else self.seen
        self.seen.append(super().logits(draft_input, builder))
        return self.seen[-1]


class RecordedGlide(Recorded, GlideDrafter):
    pass


class RecordedEagle3(Recorded, Eagle3Drafter):
    pass


class RecordedDFlash(DFlashDrafter):
    def logits(self, draft_input, slots):
        self.slots = super().logits(draft_input, slots)
        return self.slots

    def propose(self, draft_input, shape, sampler):
        tree = super().propose(draft_input, shape, sampler)
        sizes = () if isinstance(shape, Budget) else (1, *shape[:-1])
        self.seen = [self.slots[:, depth, None].expand(-1, size, -1) for depth, size in enumerate(sizes)]
        return tree


class GlideCase:
    """GLIDE, and its training forward."""

    def __init__(self, folder: Path) -> None:
        make_target(0).save_pretrained(folder)
        settings = Draft(window=WINDOW, anchors="off", lag_mode="random")
        self.glide = Qwen2Glide.from_pretrained(str(folder), dtype=torch.float64, draft=settings)
        self.glide.draft_model = make_layer(self.glide.target, 0.3)
        self.drafter = RecordedGlide(self.glide.target, self.glide.draft_model, WINDOW)

    @torch.no_grad()
    def trained_logits(self, text: list[int], drafted: list[int]) -> Tensor:
        """The training forward's after the last token, with the lag of so many drafted ones, [V]."""
        ids, lag, glide = text + drafted, len(drafted) + 1, self.glide
        whole, positions = torch.tensor([ids]), torch.arange(len(ids))[None]
        keys, values, _ = last_states(glide, whole, positions)
        embedded = glide.model.embed_tokens(whole)
        rope, layer = glide.model.rotary_emb(embedded, positions), glide.draft_model
        own, lags = layer.own_keys_values(embedded, rope), Visibility(lag_B=torch.tensor([lag]))
        return glide.lm_head(layer(embedded, rope, own, (keys, values), Visibility(window=WINDOW), lags))[0, -1]

    def cached(self, texts: list[list[int]]) -> dict[str, Tensor]:
        lengths, config = [len(text) - 1 for text in texts], self.glide.config
        shape = (len(texts), config.num_key_value_heads, max(lengths), config.hidden_size // config.num_attention_heads)
        keys, values = torch.full(shape, UNKNOWN, dtype=torch.float64), torch.full(shape, UNKNOWN, dtype=torch.float64)
        for row, (text, length) in enumerate(zip(texts, lengths, strict=True)):
            if length:
                own_keys, own_values, _ = last_states(self.glide, torch.tensor([text[:-1]]), torch.arange(length)[None])
                keys[row, :, :length], values[row, :, :length] = own_keys[0], own_values[0]
        return {"keys.1": keys, "values.1": values}

    def hidden(self, texts: list[list[int]], tokens: list[list[int]]) -> dict[str, Tensor]:
        return {}


class Eagle3Case:
    """EAGLE-3, and its training forward."""

    def __init__(self, name: str) -> None:
        family, options = EAGLE3[name]
        made = make_eagle3(make_target(0, family, num_hidden_layers=3), **options)
        self.drafter = RecordedEagle3(made.target, made.layer, made.settings)

    def trained_logits(self, text: list[int], drafted: list[int]) -> Tensor:
        """The training forward's of the chain that starts in the root's slot, in the step after so many drafted ones, [V]."""
        layer, steps, rows = self.drafter.layer, len(drafted) + 1, list[Tensor]()
        settings = replace(self.drafter.settings, steps=steps)
        trainer, ids_BS = (
            Eagle3Trainer(TargetStates(self.drafter.target), layer, settings),
            torch.tensor([[*text, *drafted, 0]]),
        )
        with layer.lm_head.register_forward_pre_hook(lambda _, inputs: rows.extend(inputs[0])), torch.no_grad():
            trainer(ids_BS, ids_BS)
        return layer.lm_head(rows[steps - 1][len(text) - 2])

    def cached(self, texts: list[list[int]]) -> dict[str, Tensor]:
        return {}

    def hidden(self, texts: list[list[int]], places: list[list[int]]) -> dict[str, Tensor]:
        """transformers' own of these places of each text, left-aligned."""
        longest, found = max(map(len, places)), {}
        for name in self.drafter.reads:
            layer = layer_of(name)
            found[name] = torch.full((len(texts), longest, 32), UNKNOWN, dtype=torch.float64)
            for row, (text, chosen) in enumerate(zip(texts, places, strict=True)):
                found[name][row, : len(chosen)] = own_states(self.drafter.target, tuple(text))[layer][chosen]
        return found


class DFlashCase(Eagle3Case):
    """DFlash, and its training forward."""

    def __init__(self, name: str) -> None:
        family, options = DFLASH[name]
        made = make_dflash(make_target(0, family, num_hidden_layers=3), **options)
        self.drafter = RecordedDFlash(made.target, made.layer, made.settings)

    def trained_logits(self, text: list[int], drafted: list[int]) -> Tensor:
        """The training forward's of the slot behind so many drafted ones, of the round's block that stands at the root, [V]."""
        layer, rows, slots = self.drafter.layer, list[Tensor](), 1 + self.drafter.slots.shape[1]
        settings = replace(self.drafter.settings, anchors=1, block_size=slots)
        trainer = DFlashTrainer(TargetStates(self.drafter.target), layer, settings)
        ids_BS = torch.tensor([[*text, *[0] * settings.predicted]])
        is_root_BS = torch.arange(ids_BS.shape[1])[None] == len(text) - 1
        with layer.norm.register_forward_hook(lambda _, __, out: rows.append(out)), torch.no_grad():
            trainer(ids_BS, ids_BS, priority=is_root_BS.float())
        head = self.drafter.target.lm_head if layer.lm_head is None else layer.lm_head
        return head(rows[0][len(drafted)])


CASES = {"glide": GlideCase} | dict.fromkeys(EAGLE3, Eagle3Case) | dict.fromkeys(DFLASH, DFlashCase)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return GlideCase(tmp_path) if request.param == "glide" else CASES[request.param](request.param)


def draft_input_of(case: Any, texts: list[list[int]]) -> DraftInput:
    """As the engine makes it: left-aligned, with numbers nobody may read behind the shorter rows."""
    lengths, roots_B = [len(text) - 1 for text in texts], torch.tensor([text[-1] for text in texts])
    return DraftInput(texts, tuple(lengths), torch.tensor(lengths), roots_B, case.cached(texts))


def begin(case: Any, prompts: list[list[int]]) -> None:
    case.drafter.begin(prompts, case.hidden(prompts, [list(range(len(prompt))) for prompt in prompts]))


@torch.inference_mode()
@pytest.mark.parametrize(("shape", "rows"), [((1,) * 4, ROWS[:1]), ((1,) * 4, (2,)), ((3, 5, 4), ROWS)])
def test_draft_logits_in_decoding_are_those_of_training(case: Any, shape, rows) -> None:
    """Every node at depth d equals the training forward over its own path with lag d + 1 (GLIDE), or step d of the chain from
    the root's slot along its path (EAGLE-3), or slot d + 1 of the root's block (DFlash), through windows and rejections.

    Three rounds: after the first, rows keep nothing, a part, or a whole path, and one row leaves after the second.
    """
    drafter = case.drafter
    texts = [torch.randint(0, 61, (length,)).tolist() for length in rows]
    begin(case, texts)  # the prompts; the root comes after
    if not isinstance(case, GlideCase):
        window = drafter.settings.sliding_window
        assert drafter.accepted.counts_B.tolist() == [min(window or len(text), len(text)) for text in texts]
    texts = [[*text, row + 7] for row, text in enumerate(texts)]
    for number, kept in enumerate(((0, 2, len(shape), 1), (len(shape) + 2, 0, 1, 1), (1, 1, 1, 1))):
        tree = drafter.propose(draft_input_of(case, texts), shape, Sampler())
        logits_BSV = torch.cat(drafter.seen, dim=1)
        assert logits_BSV.shape[1] == 1 + sum(shape[:-1])
        paths = [[row_paths(tree, row, node) for node in range(tree.tokens_BS.shape[1])] for row in range(len(texts))]
        for row, text in enumerate(texts):
            for node in range(logits_BSV.shape[1]):
                wanted_V = case.trained_logits(text, tree.tokens_BS[row, paths[row][node][1:]].tolist())
                torch.testing.assert_close(logits_BSV[row, node], wanted_V, **CLOSE)
        # The text goes on along one path of each row, as far as that row keeps it, and then by another token; after the first
        # round by tokens that were not drafted, and by more than are drafted, as prompt lookup brings them.
        path_BE = torch.tensor([paths[row][-1] for row in range(len(texts))])
        kept_B, before = torch.tensor(kept[: len(texts)]), [len(text) for text in texts]
        tokens_BE = tree.tokens_BS.gather(1, path_BE).roll(-1, dims=1)
        if number:
            tokens_BE = (torch.cat([tokens_BE, tokens_BE[:, :2]], dim=1) + 7) % 61
        texts = [text + tokens_BE[row, : kept[row]].tolist() + [row + 31] for row, text in enumerate(texts)]
        places = [list(range(length - 1, len(text) - 1)) for length, text in zip(before, texts, strict=True)]
        padded = case.hidden([*texts, [0] * 9], [*places, list(range(tokens_BE.shape[1]))])
        drafter.commit(tokens_BE, kept_B, {name: hidden_BEH[:-1] for name, hidden_BEH in padded.items()})
        if kept[1] == 0 and len(texts) == len(ROWS):
            drafter.select(torch.tensor([0, 2, 3]))
            texts = [texts[0], texts[2], texts[3]]


def row_paths(tree, row: int, node: int) -> list[int]:
    """Nodes from the root down to `node`."""
    path = [node]
    while path[0] != 0:
        path.insert(0, int(tree.parents_BS[row, path[0]]))
    assert tree.seen_BSS[row, node].nonzero()[:, 0].tolist() == path
    assert tree.depths_S[node] == len(path) - 1
    return path


@torch.inference_mode()
def test_beams_are_the_likeliest_paths(case: Any) -> None:
    """Level by level against a search over all children."""
    text = [4, 8, 15, 16, 23, 42]
    begin(case, [text[:-1]])
    tree = case.drafter.propose(draft_input_of(case, [text]), (4, 6, 5), Sampler())
    beam = {(): 0.0}
    first = 1
    said = range(61) if case.drafter.proposed is None else SOME
    for size in (4, 6, 5):
        children = {}
        for path, score in beam.items():
            log_q_V = case.trained_logits(text, list(path)).log_softmax(-1)
            children |= {(*path, token): score + float(log_q) for token, log_q in zip(said, log_q_V, strict=True)}
        beam = dict(sorted(children.items(), key=lambda item: -item[1])[:size])
        level = [tuple(tree.tokens_BS[0, row_paths(tree, 0, node)[1:]].tolist()) for node in range(first, first + size)]
        assert level == list(beam)
        first += size


@torch.inference_mode()
def test_a_budget_takes_the_likeliest_of_all_paths(case: Any) -> None:
    """Against a search, best first, over all children of what it has found, by the training forward; sharpened, to go deep."""
    text, budget = [4, 8, 15, 16, 23, 42], Budget(12, 4, step=0.0, node=0.0)
    begin(case, [text[:-1]])
    tree = case.drafter.propose(draft_input_of(case, [text]), budget, Sampler(0.1))
    paths = [row_paths(tree, 0, node) for node in range(tree.tokens_BS.shape[1])]
    said, heap, wanted = range(61) if case.drafter.proposed is None else SOME, [(0.0, ())], []
    while len(wanted) <= budget.nodes:
        cost, path = heappop(heap)
        wanted.append(path)
        if len(path) < budget.depth:
            log_q_V = (case.trained_logits(text, list(path)) / 0.1).log_softmax(-1).tolist()
            for token, log_q in zip(said, log_q_V, strict=True):
                heappush(heap, (cost - log_q, (*path, token)))
    assert {tuple(tree.tokens_BS[0, path[1:]].tolist()) for path in paths} == set(wanted)
    assert max(map(len, wanted)) > 1
