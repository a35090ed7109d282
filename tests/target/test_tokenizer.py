import dataclasses
import random
import shutil
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, Qwen2Config

from longspec.atomic_files import read_json
from longspec.config import Build
from longspec.data.chat.chat_template import CHATML
from longspec.target import tokenizer
from tests.corpus import Corpus, write_raw

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
    with pytest.raises(ValueError, match=r"build\.vocabulary: the text yields \d+ entries, not 5000"):
        tokenizer.make(dataclasses.replace(corpus.build, vocabulary=5000), [corpus.raw], tmp_path / "t.json")
    assert not (tmp_path / "t.json").exists()
    assert not (tmp_path / "tokenizer").exists()
