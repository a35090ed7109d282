"""What decoding holds: the draft its window, the target the text and nothing beside it; and the host asks once a round."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from longspec.decode.cache import compact, growing
from longspec.decode.drafters import Frontier
from longspec.decode.glide_drafter import GlideDrafter
from longspec.decode.prefill import prefill
from longspec.decode.sampling import Sampler
from longspec.decode.speculate import speculate
from longspec.decode.tree import DEFAULT_SHAPE
from longspec.decode.verify import descend
from longspec.train.models.visibility_tree import TreeVisibility
from tests.decode.models import make_layer, make_target

WINDOW = 12


class Watched(GlideDrafter):
    """Keeps what it held, and holds the target's cache against a forward over the text, whenever it proposes."""

    def begin(self, prompts):
        super().begin(prompts)
        self.held, self.lengths = [], []

    def propose(self, frontier, levels, sampler):
        self.held.append(sum(x.numel() for x in self.own))
        self.lengths.append(frontier.lengths)
        assert frontier.target[0].shape[2] == max(frontier.lengths)
        for row, (text, length) in enumerate(zip(frontier.texts, frontier.lengths, strict=True)):
            assert length == len(text) - 1
            last = prefill(self.target, [text[:-1]]).cache.layers[-1]
            for cached, wanted in zip(frontier.target, (last.keys, last.values), strict=True):
                torch.testing.assert_close(cached[row, :, :length], wanted[0])
        return super().propose(frontier, levels, sampler)


@pytest.mark.parametrize("shape", [3, (3, 5, 4)])
def test_caches_hold_the_window_and_the_text(shape) -> None:
    """Rows of different length, in every round of some hundred tokens."""
    target = make_target(1)
    drafter = Watched(target, make_layer(target), WINDOW)
    prompts = [[5] * length for length in (1, 30, 9)]
    decoded = speculate(target, drafter, prompts, max_new_tokens=120, shape=shape)
    assert sum(sum(row.accepted) for row in decoded.rows) > 0
    per_token = 2 * 2 * 8  # keys and values, two heads of eight
    most = WINDOW * per_token
    assert all(held <= most * len(lengths) for held, lengths in zip(drafter.held, drafter.lengths, strict=True))
    assert drafter.held[20] == most * len(drafter.lengths[20])
    assert max(map(max, drafter.lengths)) > 8 * WINDOW


class Looks(TorchFunctionMode):
    """Counts what makes the host wait for a number of the device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        waits = {"tolist", "item", "__bool__", "__int__", "__float__", "__index__", "nonzero", "cpu", "numpy", "equal"}
        self.count += getattr(func, "__name__", "") in waits
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("shape", [4, DEFAULT_SHAPE])
def test_the_host_looks_once_a_round(shape, temperature: float) -> None:
    """All of decoding, transformers' forward included; once more for the tokens after the prompts."""
    target = make_target(0)
    drafter, start = GlideDrafter(target, make_layer(target), WINDOW), prefill(target, [[1, 2, 3], [4, 5, 6], [7]])
    settings = {"max_new_tokens": 20, "shape": shape, "temperature": temperature, "top_k": 9, "top_p": 0.9}
    with Looks() as looks:
        decoded = speculate(target, drafter, start, **settings)
    assert looks.count == 1 + max(row.rounds for row in decoded.rows)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("shape", [(1,) * 4, DEFAULT_SHAPE])
def test_nothing_within_a_round_waits_for_a_number(shape, temperature: float) -> None:
    """On tensors that have shapes and no numbers a look at one would fail: drafting, the target's forward, the
    descent and the caches."""
    target = make_target(0).to("meta")
    target.set_attn_implementation("longspec")
    drafter = GlideDrafter(target, make_layer(target).to("meta"), WINDOW)
    prompts, sampler = [[1, 2, 3, 4], [5, 6]], Sampler(temperature, top_k=5, top_p=0.9)
    drafter.begin(prompts)
    cache = growing(prefill(target, [[0] * 4] * 2).cache)
    lengths, lengths_B = (4, 2), torch.empty(2, dtype=torch.int64, device="meta")
    last = cache.layers[-1]
    with torch.inference_mode():
        frontier = Frontier([[*prompt, 7] for prompt in prompts], lengths, lengths_B, lengths_B, (last.keys, last.values))
        tree = drafter.propose(frontier, shape, sampler)
        visibility = TreeVisibility(lengths, lengths_B, tree.seen_BSS, tree.depths_S, tree.depths_S)
        positions = lengths_B[:, None] + tree.depths_S
        logits_BSV = target(tree.tokens_BS, position_ids=positions, past_key_values=cache, visibility=visibility).logits
        verdict = descend(logits_BSV, tree, sampler)
        compact(cache, tree.tokens_BS.shape[1], verdict.path_BE, lengths_B, 6)
        drafter.commit(verdict.path_BE, verdict.kept_B)
    assert verdict.tokens_BE.device.type == "meta"
    with pytest.raises(RuntimeError):
        verdict.kept_B.tolist()


def test_the_targets_cache_grows_in_place_and_leaves_the_prompts_as_it_was() -> None:
    """Room is made once for many tokens; what is kept of a tree overwrites nothing before it."""
    target = make_target(0)
    start = prefill(target, [list(range(60))])
    before = [layer.keys.clone() for layer in start.cache.layers]
    cache, lengths_B, places = growing(start.cache), torch.tensor([60]), set()
    for _ in range(4):
        new = torch.randn(2, 1, 2, 3, 8, dtype=torch.float64)
        keys = [cache.update(*new, layer_idx=layer)[0] for layer in range(2)]
        places.add(keys[0].data_ptr())
        compact(cache, 3, torch.tensor([[0, 2]]), lengths_B, cache.get_seq_length() - 1)
        torch.testing.assert_close(cache.layers[0].keys[:, :, -2:], new[0][:, :, [0, 2]])
        lengths_B = lengths_B + 2
    assert len(places) <= 2
    for layer, grown, keys in zip(start.cache.layers, cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(grown.keys[:, :, :60], keys)
