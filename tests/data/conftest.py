"""A small byte-level tokenizer with a ChatML template in which padding and end are one token."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import configuration, settings

from longspec.data.chat.chat_template import CHATML
from longspec.draft_vocabulary import tokenizer_files
from longspec.target import fetch
from tests.data import families

# Few examples, the same ones every time where a failure must mean something new; what is kept of them lies in .cache.
configuration.set_hypothesis_home_dir(Path(__file__).parents[2] / ".cache/hypothesis")
settings.register_profile("bounded", max_examples=60, deadline=None, derandomize="CI" in os.environ)
settings.load_profile("bounded")


@pytest.fixture(scope="session")
def tokenizer_manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The manifest of the tokenizer's folder."""
    tokenizer = families.family("qwen2.5", families.byte_level())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|endoftext|>", "<|im_start|>"]})
    tokenizer.chat_template = CHATML
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder / "files")
    fetch.write_manifest(folder / "manifest.json", folder / "files", "build", tokenizer_files(folder / "files"))
    return folder / "manifest.json"


@pytest.fixture(scope="session")
def tokenizer(tokenizer_manifest: Path) -> Any:
    from longspec.data.chat.encoding import load_tokenizer

    return load_tokenizer(tokenizer_manifest)[0]
