"""Questions and answers between text and tokens, through tokenizers of known kinds."""

from pathlib import Path
from typing import Any

import pytest

from longspec.answers.conversation import Conversation
from longspec.answers.questions import Asker
from longspec.answers.settings import Regenerate
from longspec.data.chat.encoding import Encoder
from tests.data.families import byte_level, family

QUESTION = {"role": "user", "content": "größer, <|end|>?"}
TOOL = {"type": "function", "function": {"name": "sum", "description": "Adds.", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    backend = byte_level()
    return {name: family(name, backend) for name in ("harmony", "qwen3-tools", "llama", "llama-tools")}


def asker(tokenizer: Any, **settings: Any) -> Asker:
    return Asker(tokenizer, Path("no-such-target"), 4096, Regenerate(new_tokens=64, **settings), "data.chats.regenerate")


def test_answers_in_channels_are_a_servers(tokenizers: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^data\.chats\.regenerate\.engine: transformers does not read .*; set endpoint:"):
        asker(tokenizers["harmony"])
    served = asker(tokenizers["harmony"], engine="endpoint", endpoint="http://host/v1")
    assert tokenizers["harmony"].convert_tokens_to_ids("<|end|>") not in served.ends, "it ends the thought alone"
    asker(tokenizers["llama"])


@pytest.mark.parametrize("name", ["harmony", "qwen3-tools", "llama", "llama-tools"])
def test_what_a_server_reads_is_what_transformers_lays_out(tokenizers: dict[str, Any], name: str) -> None:
    """Of this day, and with names of special tokens in a question as tokens, as servers of transformers' templates have it."""
    tokenizer = tokenizers[name]
    beside: dict[str, Any] = {} if name == "llama" else {"tools": [TOOL]}
    arguments = {"enable_thinking": False} if name == "qwen3-tools" else {}
    record = {"messages": [QUESTION, {"role": "assistant", "content": "old"}], **beside, "chat_template_kwargs": arguments}
    chat = Conversation(("train", 1), record, "keep").asked
    laid_out = tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True, **beside, **arguments)["input_ids"]
    assert Encoder(tokenizer).as_sent(chat) == laid_out
    [ours] = Encoder(tokenizer).requests([chat])
    marked = {"harmony": True, "qwen3-tools": False, "llama": True, "llama-tools": False}[name]
    assert (ours == laid_out) is not marked, "a special token's name, and the day, are otherwise in ours"
