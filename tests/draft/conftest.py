"""A target's configuration, and the room's verbs."""

from collections.abc import Callable

import pytest
from transformers import Qwen2Config

from longspec.draft.__main__ import main

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG = Qwen2Config(**SHAPE, num_hidden_layers=2, vocab_size=97)
Verb = Callable[..., None]


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Verb:
    """A verb of the room with its arguments, as on a command line. An error of ours is raised as SystemExit."""

    def run(*arguments: object) -> None:
        monkeypatch.setattr("sys.argv", ["draft", *map(str, arguments)])
        main()

    return run
