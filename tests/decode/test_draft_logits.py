"""The draft in decoding is the draft in training: positions, lags, windows and tree depths agree."""

from pathlib import Path

import pytest
import torch

from longspec.decode.drafters import DraftInput
from longspec.decode.sampling import Sampler
from longspec.decode.tree import DEFAULT_SHAPE
from longspec.methods.glide.drafter import GlideDrafter
from longspec.methods.glide.families import Qwen2Glide
from longspec.methods.glide.settings import Draft
from longspec.models.attention.visibility import Visibility
from tests.decode.models import make_layer, make_target
from tests.targets import last_states

WINDOW, ROWS = 12, (31, 5, 18, 1)


class Recorded(GlideDrafter):
    """Keeps the logits of every node that was asked for its children."""

    def logits(self, draft_input, builder):
        self.seen = [] if builder.nodes == 1 else self.seen
        self.seen.append(super().logits(draft_input, builder))
        return self.seen[-1]


@pytest.fixture
def glide(tmp_path: Path) -> Qwen2Glide:
    make_target(0).save_pretrained(tmp_path)
    settings = Draft(window=WINDOW, anchors="off", lag_mode="random")
    glide = Qwen2Glide.from_pretrained(str(tmp_path), dtype=torch.float64, draft=settings)
    glide.draft_model = make_layer(glide.target, 0.3)
    return glide


@torch.no_grad()
def trained_logits(glide: Qwen2Glide, ids: list[int], lag: int) -> torch.Tensor:
    """What the training forward with this lag says after the last of `ids`, [V]."""
    whole, positions = torch.tensor([ids]), torch.arange(len(ids))[None]
    keys, values, _ = last_states(glide, whole, positions)
    embedded = glide.model.embed_tokens(whole)
    rope, layer = glide.model.rotary_emb(embedded, positions), glide.draft_model
    own, lags = layer.own_keys_values(embedded, rope), Visibility(lag_B=torch.tensor([lag]))
    return glide.lm_head(layer(embedded, rope, own, (keys, values), Visibility(window=WINDOW), lags))[0, -1]


def draft_input_of(glide: Qwen2Glide, texts: list[list[int]]) -> DraftInput:
    """As the engine makes it: left-aligned, with numbers nobody may read behind the shorter rows."""
    lengths, config = [len(text) - 1 for text in texts], glide.config
    shape = (len(texts), config.num_key_value_heads, max(lengths), config.hidden_size // config.num_attention_heads)
    keys, values = torch.full(shape, 1e3, dtype=torch.float64), torch.full(shape, 1e3, dtype=torch.float64)
    for row, (text, length) in enumerate(zip(texts, lengths, strict=True)):
        if length:
            own_keys, own_values, _ = last_states(glide, torch.tensor([text[:-1]]), torch.arange(length)[None])
            keys[row, :, :length], values[row, :, :length] = own_keys[0], own_values[0]
    roots_B = torch.tensor([text[-1] for text in texts])
    return DraftInput(texts, tuple(lengths), torch.tensor(lengths), roots_B, {"keys.1": keys, "values.1": values})


@pytest.mark.parametrize("shape", [(1,) * 4, (3, 5, 4), DEFAULT_SHAPE])
@pytest.mark.parametrize("rows", [ROWS, ROWS[:1]])
def test_draft_logits_in_decoding_are_those_of_training(glide: Qwen2Glide, shape, rows) -> None:
    """Every node at depth d equals the training forward over its own path with lag d + 1, through windows and rejections.

    Three rounds: after the first, rows keep nothing, a part, or a whole path, and one row leaves after the second.
    """
    drafter = Recorded(glide.target, glide.draft_model, WINDOW)
    texts = [torch.randint(0, 61, (length,)).tolist() for length in rows]
    drafter.begin(texts, {})  # the prompts; the root comes after
    texts = [[*text, row + 7] for row, text in enumerate(texts)]
    for kept in ((0, 2, len(shape), 1), (len(shape), 0, 1, 1), (1, 1, 1, 1)):
        with torch.inference_mode():
            tree = drafter.propose(draft_input_of(glide, texts), shape, Sampler())
        logits_BSV = torch.cat(drafter.seen, dim=1)
        assert logits_BSV.shape[1] == 1 + sum(shape[:-1])
        paths = [[row_paths(tree, row, node) for node in range(tree.tokens_BS.shape[1])] for row in range(len(texts))]
        for row, text in enumerate(texts):
            for node in range(logits_BSV.shape[1]):
                path = paths[row][node]
                ids = text + tree.tokens_BS[row, path[1:]].tolist()
                torch.testing.assert_close(logits_BSV[row, node], trained_logits(glide, ids, len(path)))
        # The text goes on along one path of each row, as far as that row keeps it, and then by another token.
        path_BE = torch.tensor([paths[row][-1] for row in range(len(texts))])
        kept_B = torch.tensor(kept[: len(texts)])
        drafter.commit(path_BE, kept_B, {})
        texts = [
            text + tree.tokens_BS[row, path_BE[row, 1 : kept[row] + 1]].tolist() + [(row + 31) % 61]
            for row, text in enumerate(texts)
        ]
        assert drafter.own[0].shape[2] <= WINDOW
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


def test_beams_are_the_likeliest_paths(glide: Qwen2Glide) -> None:
    """Level by level against a search over all children."""
    drafter = Recorded(glide.target, glide.draft_model, WINDOW)
    text = [4, 8, 15, 16, 23, 42]
    drafter.begin([text[:-1]], {})
    with torch.inference_mode():
        tree = drafter.propose(draft_input_of(glide, [text]), (4, 6, 5), Sampler())
    beam = {(): 0.0}
    first = 1
    for size in (4, 6, 5):
        children = {}
        for path, score in beam.items():
            log_q_V = trained_logits(glide, text + list(path), len(path) + 1).log_softmax(-1)
            children |= {(*path, token): score + float(log_q) for token, log_q in enumerate(log_q_V)}
        beam = dict(sorted(children.items(), key=lambda item: -item[1])[:size])
        level = [tuple(tree.tokens_BS[0, row_paths(tree, 0, node)[1:]].tolist()) for node in range(first, first + size)]
        assert level == list(beam)
        first += size
