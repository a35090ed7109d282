"""A small target of our own: its tokenizer, its weights, and how its rows and steps are laid out."""

import dataclasses
import itertools
import random
import re
import shutil
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from longspec.atomic_files import check_files, read_json
from longspec.config import Build
from longspec.data.chat.chat_template import CHATML
from longspec.data.chat.encoding import load_tokenizer
from longspec.data.pack.arrow_shards import PackedRows, Row
from longspec.draft_vocabulary import tokenizer_hash, tokenizer_hash_of
from longspec.models.losses import NO_LABEL
from longspec.target import tokenizer, train
from tests.corpus import LENGTH, Corpus, write_raw
from tests.refusals import refused


@pytest.fixture(autouse=True)
def deterministic_only_here():
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


def unigram_entropy(rows: PackedRows) -> float:
    """Nats per label of the best guess that knows no context."""
    labels = np.concatenate([rows[i].input_ids_S[rows[i].loss_mask_S == 1] for i in range(len(rows))])
    share = np.bincount(labels) / len(labels)
    return float(-(share[share > 0] * np.log(share[share > 0])).sum())


def test_training_learns_more_than_frequencies_and_twice_the_same(corpus: Corpus, tmp_path: Path) -> None:
    outs = [tmp_path / name / "target_manifest.json" for name in ("one", "two")]
    for out in outs:
        train.make(corpus.build, corpus.tokenizer, [corpus.packed], out)
    one, two = map(read_json, outs)
    assert one["files"] == two["files"]  # hashes: the weights are equal bit by bit
    assert one | {"path": ""} == two | {"path": ""}, "drafts and evaluations know a target by its manifest's hash"
    assert one["loss"][f"tiny-{LENGTH}"] < unigram_entropy(PackedRows(corpus.packed)) - 1.0
    assert one["steps"] == 40


def test_the_folder_loads_as_its_manifest_says(corpus: Corpus, tmp_path: Path) -> None:
    out = tmp_path / "target_manifest.json"
    build = dataclasses.replace(corpus.build, mixture=[{**corpus.build.mixture[0], "steps": 4}])
    trained = train.make(build, corpus.tokenizer, [corpus.packed], out)
    manifest = read_json(out)
    folder = Path(manifest["path"])
    check_files(folder, manifest["files"])
    assert tokenizer_hash(manifest["files"]) == tokenizer_hash_of(folder) == load_tokenizer(corpus.tokenizer)[1]
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert manifest["parameters"] == trained["parameters"] == sum(p.numel() for p in model.parameters())
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == model.generation_config.eos_token_id


@pytest.mark.parametrize("steps", [[300], [300, 60, 100], [1, 1, 5], [7, 0, 3]])
def test_every_kind_stays_in_proportion(steps: list[int]) -> None:
    order = train.order_of(steps)
    assert Counter(order) == Counter({phase: count for phase, count in enumerate(steps) if count})
    for done in range(1, len(order) + 1):
        for phase, count in enumerate(steps):
            assert abs(order[:done].count(phase) - count * done / len(order)) <= 1.0


def test_warm_up_then_cosine(corpus: Corpus) -> None:
    rates = [train.learning_rate(corpus.build, step, 100) for step in range(100)]
    assert rates[:5] == pytest.approx([corpus.build.lr * n / 5 for n in range(1, 6)])
    assert rates[5] == corpus.build.lr
    assert all(after < before for before, after in itertools.pairwise(rates[5:]))
    assert rates[-1] < 0.001 * corpus.build.lr


def row_of(lengths: list[int], padding: int, draw: np.random.Generator) -> Row:
    """A row of random documents, written down here without the packer."""
    total = sum(lengths) + padding
    ids = draw.integers(1, 275, total).astype(np.int32)
    mask = np.ones(total, np.uint8)
    mask[np.cumsum([0, *lengths[:-1]])] = 0
    mask[total - padding :] = 0
    documents = [number for number, length in enumerate(lengths) for _ in range(length)] + [-1] * padding
    positions = [place for length in [*lengths, padding] for place in range(length)]
    return Row(ids, mask, np.array(documents, np.int32), np.array(positions, np.int32), list(range(len(lengths))))


def test_a_packed_row_costs_what_its_documents_cost_alone(corpus: Corpus, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    layouts = [([20, 3, 17], 8), ([48], 0), ([2, 46], 0), ([40], 8)]
    rows = [row_of(lengths, padding, draw) for lengths, padding in layouts]
    model = train.new_model(corpus.build, 0)
    model.save_pretrained(tmp_path)
    eager = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    inputs, labels_BS = train.collate(rows)
    loss_BS = cross_entropy(model(**inputs).logits.transpose(1, 2), labels_BS, reduction="none", ignore_index=NO_LABEL)
    for row, (lengths, _) in enumerate(layouts):
        start = 0
        for length in lengths:
            alone_1S = torch.from_numpy(rows[row].input_ids_S[start : start + length]).long()[None]
            expected = cross_entropy(eager(alone_1S).logits[0, :-1], alone_1S[0, 1:], reduction="none")
            torch.testing.assert_close(loss_BS[row, start : start + length - 1], expected, atol=1e-5, rtol=0)
            start += length
        labels = sum(lengths) - len(lengths)
        assert int((labels_BS[row] != NO_LABEL).sum()) == labels


TEXTS = [
    "def f(x):\n    return x  # don't\r\n\t\tif 12345:\n\n\n",
    "Grüße, 東京 𝔘𝔫𝔦 👩‍👩‍👧 \u202e \x01\x7f \ufeff",
    "   leading and trailing   ",
]


def random_text(seed: int) -> str:
    """300 characters of all planes, in the form that Unicode composes."""
    draw = random.Random(seed)
    points = [draw.choice([draw.randrange(0x80), draw.randrange(0xD800), draw.randrange(0xE000, 0x110000)]) for _ in "x" * 300]
    return unicodedata.normalize("NFC", "".join(map(chr, points)))


@pytest.fixture
def loaded(corpus: Corpus) -> Any:
    return AutoTokenizer.from_pretrained(read_json(corpus.tokenizer)["path"])


def test_special_tokens(loaded: Any, corpus: Corpus) -> None:
    assert len(loaded) == corpus.build.vocabulary
    assert loaded.eos_token == loaded.pad_token == "<|endoftext|>"
    assert loaded.chat_template == CHATML
    assert loaded.model_max_length == corpus.build.max_position
    for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"):
        assert loaded(f"a{token}b").input_ids[1] == loaded.convert_tokens_to_ids(token)
        assert loaded.decode(loaded(token).input_ids, skip_special_tokens=True) == ""


def test_text_comes_back_and_has_the_same_ids_beside_a_qwen2_config(corpus: Corpus, loaded: Any, tmp_path: Path) -> None:
    # There transformers makes another class of tokenizer, which reads no more than the merges.
    shutil.copytree(read_json(corpus.tokenizer)["path"], tmp_path / "model")
    Qwen2Config(vocab_size=corpus.build.vocabulary).save_pretrained(tmp_path / "model")
    beside = AutoTokenizer.from_pretrained(tmp_path / "model")
    for text in [*TEXTS, *map(random_text, range(5)), "e\u0301<|im_end|>", "\u212b"]:
        assert beside(text).input_ids == loaded(text).input_ids
        assert loaded.decode(loaded(text).input_ids) == unicodedata.normalize("NFC", text)


def test_a_small_dataset_weighs_as_much_as_a_large_one(tmp_path: Path) -> None:
    large = [{"text": " ".join(f"alpha{n} beta gamma delta" for n in range(2000))}]
    raw = [write_raw(tmp_path / "large", large), write_raw(tmp_path / "small", [{"problem": "zyx", "qwq": "wvu zyx"}])]
    tokenizer.make(Build(vocabulary=270), raw, tmp_path / "m" / "tokenizer_manifest.json")
    small = AutoTokenizer.from_pretrained(tmp_path / "m" / "tokenizer")
    assert small.tokenize("zyx") == ["zyx"]


def test_vocabulary_that_does_not_fit(corpus: Corpus, tmp_path: Path) -> None:
    with refused("build.vocabulary:", re.compile(r"\d+ entries, not 5000")):
        tokenizer.make(dataclasses.replace(corpus.build, vocabulary=5000), [corpus.raw], tmp_path / "t.json")
    assert not (tmp_path / "t.json").exists()
    assert not (tmp_path / "tokenizer").exists()
