"""The draft against plain PyTorch, row by row and document by document; its draws, and its operations in closed form; how it
begins, as a copy of a layer of its target or with a norm at its end; and what a forward refuses.

Operations less what tests/train/estimate/test_flops.py compares with torch's own counter.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen3Config, Qwen3ForCausalLM

from longspec.config import compose
from longspec.families import position_limit
from longspec.methods.glide import method
from longspec.methods.glide.attach import attach
from longspec.methods.glide.layer import fresh_layer
from longspec.methods.glide.method import RowDraw, draw_row, shift_positions
from longspec.methods.glide.settings import Draft
from longspec.methods.glide.trainer import Glide, LlamaGlide, Qwen2Glide
from longspec.models.attention.visibility import Visibility, block_pairs, causal_pairs
from longspec.states.declaration import checked_config
from longspec.states.forward import TargetStates
from tests.methods.test_eagle3 import compare, packed_row
from tests.reference import draft_hidden
from tests.refusals import refused
from tests.targets import SHAPES, TARGETS, VOCABULARY, save_target

WINDOW = 20


def make(target_path: str, loss: str = "hard", window: int = WINDOW, **draft: Any) -> Glide:
    settings = Draft(window=window, anchors="off", lag_mode="random", loss=loss, **draft)
    torch.manual_seed(3)
    glide = attach(target_path, dtype=torch.float32, draft=settings)
    for parameter in glide.draft_model.parameters():  # away from the special points of a fresh layer
        torch.nn.init.normal_(parameter, std=0.2)
    return glide


def reference_loss(glide: Glide, ids_S: Tensor, labels_S: Tensor, positions_S: Tensor, target_seen_SS: Tensor) -> Tensor:
    """Summed hard loss of one document, with transformers' eager target."""
    window = glide.draft_settings.window
    config = glide.config
    eager = AutoModelForCausalLM.from_pretrained(glide.target.name_or_path, dtype=torch.float32, attn_implementation="eager")
    causal = torch.ones(len(ids_S), len(ids_S)).tril().bool()
    with torch.no_grad():
        out = eager.model(
            ids_S[None],
            position_ids=positions_S[None],
            attention_mask=torch.where(causal, 0.0, torch.finfo(torch.float32).min)[None, None],
            use_cache=True,
        )
        embedded_SH = eager.model.embed_tokens(ids_S)
    last = out.past_key_values.layers[-1]
    distance = torch.arange(len(ids_S))[:, None] - torch.arange(len(ids_S))[None, :]
    hidden_SH = draft_hidden(
        dict(glide.draft_model.named_parameters()),
        embedded_SH,
        positions_S,
        last.keys[0],
        last.values[0],
        (distance >= 0) & (distance <= window),
        target_seen_SS,
        (config.num_attention_heads, config.num_key_value_heads),
        config.rms_norm_eps,
        config.rope_parameters["rope_theta"],
    )
    logits_SV = hidden_SH @ eager.lm_head.weight.T
    return torch.nn.functional.cross_entropy(logits_SV[:-1], labels_S[1:], ignore_index=-100, reduction="sum")


def lagged(length: int, lag: int) -> Tensor:
    return torch.arange(length)[:, None] - torch.arange(length)[None, :] >= lag


def blocked(length: int, block: int) -> Tensor:
    return torch.arange(length)[:, None] // block > torch.arange(length)[None, :] // block


PUBLISHED_WINDOW, PROMPT = 512, 200


@pytest.mark.parametrize(("length", "draws"), [(700, [(0, 0, 1), (4, 2300, 2)]), (900, [(1, 2500, 4), (3, 0, 3)])])
def test_the_published_forward_beyond_the_window(target_path: str, length: int, draws: list[tuple[int, int, int]]) -> None:
    """The faithful setting: hard labels, window 512, prompt labels masked, given sink, offset and lag, one of each a row."""
    glide = make(target_path, window=PUBLISHED_WINDOW)
    ids_BS = torch.randint(0, VOCABULARY, (2, length))
    labels_BS = ids_BS.clone()
    labels_BS[:, :PROMPT] = -100
    rows = [RowDraw(*draw) for draw in draws]
    positions_BS = torch.stack([torch.from_numpy(shift_positions(np.arange(length), row)) for row in rows])
    for row, (sink, offset, _) in enumerate(draws):  # the paper's own words
        assert positions_BS[row, :sink].tolist() == list(range(sink))
        assert positions_BS[row, sink:].tolist() == [index + offset for index in range(sink, length)]
    lags_B = torch.tensor([row.lag for row in rows])
    output = glide(ids_BS, labels_BS, positions_BS, lag=lags_B)
    expected = [
        reference_loss(glide, ids_BS[row], labels_BS[row], positions_BS[row], lagged(length, rows[row].lag)) for row in range(2)
    ]
    compare(glide, output.loss, sum(expected) / (2 * (length - PROMPT)), 1e-4)


@pytest.mark.parametrize(("lag", "masked"), [(3, False), ("blocks", True)])
def test_packed_documents_are_as_if_alone(target_path: str, lag: int | str, masked: bool) -> None:
    """Whether or not the caller has masked each document's first label, which is the last one's of the document before."""
    glide = make(target_path)
    documents, ids, positions, numbers = packed_row([23, 1, 41], 5)
    labels = ids.masked_fill(numbers == -1, -100)
    if masked:
        labels[positions == 0] = -100
    positions[(numbers == 2) & (positions > 0)] += 500  # the third document has an anchor and an offset
    loss = glide(ids, labels, position_ids=positions, lag=lag, document_ids=numbers, num_labels=1).loss
    expected = torch.zeros(())
    for number, document in enumerate(documents):
        seen = blocked(len(document), 4) if lag == "blocks" else lagged(len(document), 3)
        expected = expected + reference_loss(glide, document, document, positions[numbers == number], seen)
    compare(glide, loss, expected, 1e-4)


DRAFT = Draft(anchors="random", lag_mode="random", lag=4)


def draws(draft: Draft, length: int = 1024, target_positions: int = 40960, count: int = 3000) -> list[RowDraw]:
    return [draw_row(draft, 42, step, row, length, target_positions) for step in range(count // 30) for row in range(30)]


def test_ranges_are_filled_and_kept() -> None:
    drawn = draws(DRAFT)
    assert {d.anchors for d in drawn} == {0, 1, 2, 3, 4}
    assert {d.lag for d in drawn} == {1, 2, 3, 4}
    offsets = np.array([d.offset for d in drawn])
    assert offsets.min() >= 0
    assert offsets.max() <= 30000 - 1024
    # Mean of U{0..28976}; 5 standard errors of 3000 draws.
    assert abs(offsets.mean() - 28976 / 2) < 5 * 28976 / np.sqrt(12 * 3000)


def test_short_targets_and_long_rows() -> None:
    assert max(d.offset for d in draws(DRAFT, target_positions=4096)) <= 4096 - 1000 - 1024
    assert {d.offset for d in draws(DRAFT, target_positions=1500)} == {0}
    assert {d.offset for d in draws(DRAFT, length=1201)} == {0}
    assert {d.offset for d in draws(DRAFT, length=1200)} != {0}


def test_shift_keeps_each_documents_anchors() -> None:
    positions_S = np.array([0, 1, 2, 3, 4, 0, 1, 2])
    shifted = shift_positions(positions_S, RowDraw(anchors=2, offset=10, lag=1))
    assert shifted.tolist() == [0, 1, 12, 13, 14, 0, 1, 12]


HIDDEN = 32
CONFIG = Qwen2Config(hidden_size=HIDDEN, num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCABULARY)


def seen(length: int, **visibility: Any) -> int:
    """Pairs the masks leave, counted one by one."""
    first_BS, last_BS = Visibility(**visibility).bounds_BS(length, length, torch.device("cpu"))
    return int((last_BS - first_BS + 1).clamp(min=0).sum())


@pytest.mark.parametrize("length", [1, 8, 30])
def test_pairs_are_those_the_masks_leave(length: int) -> None:
    assert causal_pairs(length) == seen(length)
    for window in (0, 1, 5, 8, 40):
        assert causal_pairs(length, window) == seen(length, window=window)
    for lag in (1, 2, 4, 31):
        assert causal_pairs(length, lag=lag) == seen(length, lag_B=torch.tensor([lag]))
        assert causal_pairs(length, 5, lag) == seen(length, window=5, lag_B=torch.tensor([lag]))
    for block in (1, 4, 9):
        assert block_pairs(length, block) == seen(length, lag_blocks=block)


def test_random_lags_count_as_their_mean() -> None:
    every = [seen(30, lag_B=torch.tensor([lag])) for lag in (1, 2, 3, 4)]
    assert method.cross_pairs(30, Draft(anchors="off", lag_mode="random", lag=4)) == sum(every) / 4
    assert method.cross_pairs(30, Draft(anchors="off", lag_mode="fixed", lag=4)) == every[3]


@pytest.mark.parametrize(
    ("lag_mode", "cross"),
    [
        ("blocks", seen(9, lag_blocks=4) + 2 * seen(20, lag_blocks=4)),
        ("fixed", seen(9, lag_B=torch.tensor([3])) + 2 * seen(20, lag_B=torch.tensor([3]))),
    ],
)
def test_documents_do_not_see_each_other(lag_mode: str, cross: int) -> None:
    """Without tokens there are no products but those of the attention."""
    draft = Draft(anchors="off", lag_mode=lag_mode, lag=3, block=4, window=5)
    own = seen(9, window=5) + 2 * seen(20, window=5)
    of_layer, of_head = method.operations(CONFIG, draft, 0, [20, 9, 20], 0, with_teacher=True)
    assert of_layer == HIDDEN * (12 * own + 8 * cross)
    assert of_head == 0


TOKENS = 12


def draft(start: str) -> Draft:
    return Draft(anchors="off", lag_mode="random", start=start)


@pytest.mark.parametrize("start", ["last", "middle"])
def test_without_its_cross_attention_it_is_that_layer(target_path: str, start: str) -> None:
    target = AutoModelForCausalLM.from_pretrained(target_path, dtype=torch.float32, attn_implementation="eager").eval()
    for vector in (parameter for parameter in target.parameters() if parameter.ndim == 1):
        torch.nn.init.normal_(vector, 1.0, 0.3)  # norms and biases that tell one from another
    layers: Any = target.model.layers
    chosen, last = layers[-1 if start == "last" else len(layers) // 2], layers[-1]
    layer = fresh_layer(TargetStates(target), draft(start)).eval()
    torch.testing.assert_close(layer.cross_attn.q_proj.weight, last.self_attn.q_proj.weight, rtol=0, atol=0)
    torch.testing.assert_close(layer.cross_attn.o_proj.weight, last.self_attn.o_proj.weight, rtol=0, atol=0)
    torch.testing.assert_close(layer.post_self_attention_layernorm.weight, last.input_layernorm.weight, rtol=0, atol=0)
    position_ids = torch.arange(TOKENS)[None]
    embedded_BSH = target.model.embed_tokens(torch.randint(VOCABULARY, (1, TOKENS)))
    rope = target.model.rotary_emb(embedded_BSH, position_ids)
    hidden = torch.full((TOKENS, TOKENS), torch.finfo(torch.float32).min).triu(1)[None, None]
    with torch.no_grad():
        layer.cross_attn.o_proj.weight.zero_()
        own = layer.own_keys_values(embedded_BSH, rope)
        seen = Visibility()
        found = layer(embedded_BSH, rope, own, own, seen, seen)
        wanted = chosen(embedded_BSH, attention_mask=hidden, position_embeddings=rope, position_ids=position_ids)
    torch.testing.assert_close(found, wanted[0] if isinstance(wanted, tuple) else wanted, rtol=1e-5, atol=1e-5)


def test_a_layer_with_parts_that_the_draft_has_not_is_refused(tmp_path: Any) -> None:
    experts = AutoModelForCausalLM.from_pretrained(save_target("qwen3-experts", tmp_path), dtype=torch.float32)
    biases = LlamaForCausalLM(LlamaConfig(**SHAPES, mlp_bias=True))
    norms = Qwen3ForCausalLM(Qwen3Config(**SHAPES))
    for target, part in ((experts, "experts"), (biases, "biases"), (norms, "norms of queries")):
        with refused("recipe.draft.start: last", part):
            fresh_layer(TargetStates(target), draft("last"))


def test_a_final_norm_starts_as_the_targets_own_and_stands_before_the_head(target_path: str) -> None:
    """Scaling the draft's last hidden states changes nothing any more."""
    glide = attach(target_path, dtype=torch.float32, draft=Draft(anchors="off", lag_mode="fixed", loss="hard", final_norm=True))
    own = glide.draft_model.final_layernorm.weight
    assert torch.equal(own, glide.model.norm.weight)
    assert own.data_ptr() != glide.model.norm.weight.data_ptr()
    assert own.requires_grad
    for parameter in glide.draft_model.parameters():  # fresh biases are zero, and hide what is wrong with them
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.1)
    ids_BS = torch.randint(0, VOCABULARY, (1, 20))
    plain = glide(ids_BS, ids_BS).loss
    glide.draft_model.final_layernorm.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 3,))
    torch.testing.assert_close(glide(ids_BS, ids_BS).loss, plain, rtol=1e-4, atol=1e-5)


IDS = torch.arange(12).reshape(2, 6)


@pytest.fixture(scope="module")
def glide(tmp_path_factory: pytest.TempPathFactory) -> Qwen2Glide:
    return attach(save_target("qwen2", tmp_path_factory.mktemp("target")), dtype=torch.float32)


@pytest.mark.parametrize(
    ("lag", "told"),
    [
        (0, ("lag: 0", "1 or more")),
        (torch.tensor([1, 2, 3]), ("lag", "int64 [2]", "torch.int64 [3]")),
        ("block", ("lag: 'block'", "'blocks'")),
    ],
)
def test_a_wrong_lag_dies_by_name(glide: Qwen2Glide, lag: Any, told: tuple[str, ...]) -> None:
    with refused(*told):
        glide(IDS, IDS, lag=lag)


def test_a_class_refuses_another_family(tmp_path: Any) -> None:
    path = save_target("qwen3", tmp_path)
    for family in (LlamaGlide, Qwen2Glide):
        with refused(f"{path}: config.json: model_type 'qwen3'", family.__name__):
            family.from_pretrained(path)


def test_rows_longer_than_the_targets_positions_are_refused(tmp_path: Path) -> None:
    recipe = compose("train", ["run=demo", "variant=base", "stage=base", "recipe.data.sequence_length=4097"]).recipe
    with refused("recipe.data.sequence_length: 4097", 4096):
        checked_config(save_target("qwen2", tmp_path), recipe)


def test_positions_reach_as_far_as_yarn_stretches_them() -> None:
    assert position_limit(TARGETS["qwen2"]) == 4096
    assert position_limit(TARGETS["qwen2-yarn"]) == 4096  # 4 x 1024
    stretched = type(TARGETS["qwen2"])(
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    )
    assert position_limit(stretched) == 131072
