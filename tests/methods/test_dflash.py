"""DFlash's training forward against plain PyTorch, block by block, in float64; first, a row that is learnt is drafted."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from longspec.decode.autoregressive import decode_plain
from longspec.decode.prefill import prefill
from longspec.decode.speculate import speculate
from longspec.methods.dflash import method as dflash_method
from longspec.methods.dflash.drafter import DFlashDrafter
from longspec.methods.dflash.method import METHOD
from longspec.methods.dflash.settings import Settings
from longspec.methods.dflash.trainer import DFlashTrainer
from longspec.models import losses
from longspec.models.attention import sdpa
from longspec.states.forward import STATES_ATTENTION, TargetStates
from tests.eager import EAGER
from tests.methods import dflash_reference as reference
from tests.methods.test_eagle3 import REDUCED, compare, compare_steps, masked, packed_row, text_of
from tests.targets import SHAPES, VOCABULARY, states_of

FOUR = SHAPES | {"num_hidden_layers": 4}
CONFIGS = {"llama": LlamaConfig(**FOUR), "qwen3": Qwen3Config(**FOUR, head_dim=16)}
LAYERS = (1, 3)
SMALL = {"layers": LAYERS, "depth": 2, "block_size": 4, "mask_token": 5, "gamma": 2.0}


def make(name: str = "llama", dtype: torch.dtype = torch.float64, **settings: Any) -> DFlashTrainer:
    torch.manual_seed(3)
    made = METHOD.trainer(states_of(CONFIGS[name], dtype), Settings(**SMALL | settings), None)
    for parameter in made.draft_model.parameters():  # away from the special points of a fresh layer
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def test_a_row_that_is_learnt_is_drafted_whole() -> None:
    """Every token an anchor: when the row is decoded, all drafts of every block are kept."""
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(CONFIGS["qwen3"], attn_implementation=STATES_ATTENTION)
    target.requires_grad_(False).eval()
    prompt, rounds, settings = [3, 1, 4], 5, Settings(layers=LAYERS, depth=2, block_size=5, anchors=99, loss="hard")
    new = 1 + rounds * settings.block_size  # the prompt's own forward gives the first
    text = decode_plain(target, prefill(target, [prompt]), new, -1).ids
    assert len(set(text)) > 10, "a text that repeats itself is no test"
    made = METHOD.trainer(TargetStates(target), settings, None)
    ids = torch.tensor([prompt + text])
    optimizer = torch.optim.AdamW(made.draft_model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        output = made(ids, ids, with_llm_loss=False)
        output.loss.backward()
        optimizer.step()
    assert int(output.counts["blocks"]) == len(prompt) + new - 1
    drafter = DFlashDrafter(target, made.draft_model.eval(), settings)
    (row,) = speculate(target, drafter, [prompt], max_new_tokens=new, shape=4).rows
    assert row.ids == text
    assert row.accepted == [settings.predicted] * rounds


@pytest.fixture
def exact(exact_norms: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are smaller than what they cut."""
    monkeypatch.setattr(losses, "chunk_tokens", lambda *_: 7)
    monkeypatch.setattr(sdpa, "QUERY_BLOCK", 12)


def plain(made: DFlashTrainer) -> reference.Draft:
    config, settings = made.states.config, made.settings
    alpha = made.settings.alpha
    return reference.Draft(
        state=dict(made.draft_model.named_parameters()),
        heads=(config.num_attention_heads, config.num_key_value_heads),
        eps=config.rms_norm_eps,
        mask_H=made.states.target.model.embed_tokens.weight[settings.mask_token],
        target_head_TH=made.states.head_weight,
        ids=list(settings.ids or range(config.vocab_size)),
        slots=settings.block_size,
        depth=settings.depth,
        loss=settings.loss,
        weights=reference.d_pace(alpha) if settings.weights == "d_pace" else reference.falling(settings.gamma),
        window=settings.sliding_window,
    )


ALL = {"anchors": 99}


@pytest.mark.parametrize(
    ("name", "settings", "every"),
    [
        ("llama", {**ALL}, None),
        ("llama", {**ALL, **REDUCED, "tied_k_norm": False}, 3),
        ("qwen3", {**ALL, "loss": "hard", "depth": 1}, 3),
        ("llama", {**ALL, **REDUCED, "loss": "hard", "weights": "d_pace", "alpha": 0.3}, 3),
        ("qwen3", {**ALL, "weights": "d_pace", "sliding_window": 6, "depth": 3}, 5),
        ("llama", {**ALL, "sliding_window": 5, **REDUCED}, None),
    ],
)
def test_a_text_is_as_its_blocks_one_by_one(exact: None, name: str, settings: dict[str, Any], every: int | None) -> None:
    made = make(name, **settings)
    ids = torch.randint(0, VOCABULARY, (2, 14))
    labels = masked(ids, every=every)
    output = made(ids, labels, num_labels=11)
    texts = [text_of(made, *row) for row in zip(ids, labels, strict=True)]
    sums = [reference.document_sums(plain(made), text, reference.anchors_of(text)) for text in texts]
    compare(made, output.loss, sum(each.weighted for each in sums) / 11)
    outside = sum(sum(each.reached) - sum(each.inside) for each in sums)
    wanted = {"blocks": sum(each.blocks for each in sums), "leading_hits": sum(each.leading_hits for each in sums)}
    assert {key: int(count) for key, count in output.counts.items()} == wanted | {"outside_vocabulary": outside}
    compare_steps(made, ids, labels, output, sums, made.settings.predicted)


@pytest.mark.parametrize(("name", "settings"), [("llama", {}), ("qwen3", {"sliding_window": 6, **REDUCED})])
def test_packed_documents_are_as_if_alone(exact: None, name: str, settings: dict[str, Any]) -> None:
    """Documents shorter and longer than a block, and padding; a first label that nobody may learn from the document before."""
    made = make(name, anchors=99, **settings)
    documents, ids, positions, numbers = packed_row([9, 1, 2, 3, 11], 5)
    labels = ids.masked_fill(numbers == -1, -100)
    output = made(ids, labels, position_ids=positions, document_ids=numbers, num_labels=1)
    texts = [text_of(made, document, document) for document in documents]
    sums = [reference.document_sums(plain(made), text, reference.anchors_of(text)) for text in texts]
    compare(made, output.loss, sum(each.weighted for each in sums))


def test_a_draw_of_anchors_is_the_loss_of_all_in_the_mean(exact: None) -> None:
    """A draw takes as many tokens as it is to, of the highest numbers; over all draws the loss is that of all anchors."""
    made = make(anchors=2)
    ids = torch.randint(0, VOCABULARY, (1, 9))
    labels = masked(ids, every=4)  # leaves five anchors
    text = text_of(made, ids[0], labels[0])
    anchors = reference.anchors_of(text)
    found = []
    for number, first in enumerate(anchors):
        for second in anchors[number + 1 :]:
            priority = torch.linspace(0.5, 0.4, 9)[None].clone()
            priority[0, [first, second]] = torch.tensor([0.7, 0.6])
            output = made(ids, labels, num_labels=1, priority=priority)
            own = reference.document_sums(plain(made), text, [first, second]).weighted * len(anchors) / 2
            torch.testing.assert_close(output.loss, own, rtol=1e-9, atol=0)
            found.append(output.loss.detach())
    every = reference.document_sums(plain(made), text, anchors).weighted
    torch.testing.assert_close(torch.stack(found).mean(), every.detach(), rtol=1e-9, atol=0)
    evenly = made(ids, labels, num_labels=1)
    assert int(evenly.counts["blocks"]) == 2


B, S, W = 2, 20, 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"), [("llama", {"depth": 2, **REDUCED}), ("qwen3", {"depth": 1, "loss": "hard", "sliding_window": 6})]
)
def test_a_step_is_counted_as_torch_counts_it(name: str, settings: dict[str, Any]) -> None:
    """Dense attention multiplies every pair of slots and keys of a row."""
    made = make(name, dtype=torch.float32, anchors=6, block_size=W, **settings)
    made.states.attention = EAGER
    ids = torch.randint(0, VOCABULARY, (B, S))
    found = made.states(ids, torch.arange(S).expand(B, S), None, ["hidden.1", "hidden.3", "final"])
    made.states.forward = lambda *_: found
    with FlopCounterMode(display=False) as counter:
        output = made(ids, ids, with_llm_loss=False)
        output.loss.backward()
    config, chosen, slots = made.states.config, made.settings, 6 * W
    assert dflash_method.slots_of(replace(chosen, row_tokens=S), B * S) == B * slots
    places = torch.arange(S - 1)  # evenly spread over the anchors there can be
    anchors = places[(places * 6 // (S - 1)) != ((places - 1) * 6 // (S - 1))]
    predicted = B * int(sum((anchors + slot < S).sum() for slot in range(1, W)))
    is_soft = chosen.loss == "soft"
    wanted = dflash_method.projection_operations(config, chosen, B * S)
    wanted += dflash_method.block_operations(config, chosen, B * slots, B * slots * (S + slots))
    wanted += dflash_method.head_operations(config, chosen, predicted, with_teacher=is_soft)
    assert counter.get_total_flops() == wanted


def test_the_whole_is_its_parts() -> None:
    """With every token an anchor, pairs counted one by one in documents that do not see each other."""
    config, window = CONFIGS["llama"], 6
    settings = Settings(layers=(1, 3), depth=2, block_size=W, anchors=40, row_tokens=40, vocabulary=30, sliding_window=window)
    pairs = 0
    for length in (9, 22, 9):
        for place in range(length):
            for slot in range(W):
                pairs += sum(place + slot - key < window for key in range(place)) + slot + 1
    of_layers, of_head = dflash_method.operations(config, settings, 40, [9, 22, 9], 40, with_teacher=True)
    projection = dflash_method.projection_operations(config, settings, 40)
    assert of_layers == pytest.approx(projection + dflash_method.block_operations(config, settings, 40 * W, pairs))
    assert of_head == dflash_method.head_operations(config, settings, 40 * (W - 1), with_teacher=True)
