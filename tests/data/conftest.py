"""A small byte-level tokenizer with a ChatML template in which padding and end are one token."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import configuration, settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from longspec.atomic_files import describe_files, write_json
from longspec.data.chat.chat_template import CHATML
from longspec.demo import puzzles
from tests.data.hub_standin import Hub, running

# Few examples, the same ones every time where a failure must mean something new; what is kept of them lies in .cache.
configuration.set_hypothesis_home_dir(Path(__file__).parents[2] / ".cache/hypothesis")
settings.register_profile("bounded", max_examples=60, deadline=None, derandomize="CI" in os.environ)
settings.load_profile("bounded")

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="session")
def tokenizer_manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The manifest of the tokenizer's folder."""
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = [record["qwq"] for _, record in puzzles.generate(20, seed=5)]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[:2]})
    tokenizer.chat_template = CHATML
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder / "files")
    names = [path.name for path in (folder / "files").iterdir()]
    files = describe_files(folder / "files", names)
    write_json(folder / "manifest.json", {"path": str(folder / "files"), "source": "build", "files": files})
    return folder / "manifest.json"


@pytest.fixture(scope="session")
def tokenizer(tokenizer_manifest: Path) -> Any:
    from longspec.data.chat.encoding import load_tokenizer

    return load_tokenizer(tokenizer_manifest)[0]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A stand-in for the hub, asked without a token."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with running() as started:
        monkeypatch.setenv("HF_ENDPOINT", started.address)
        yield started
