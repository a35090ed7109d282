"""Questions and answers between text and tokens, through tokenizers of known kinds."""

from pathlib import Path
from typing import Any

import pytest

from longspec.answers.conversation import Conversation
from longspec.answers.questions import OTHER, Asker
from longspec.answers.settings import Regenerate
from longspec.data.chat.encoding import Encoder
from tests.data.families import byte_level, family

QUESTION = {"role": "user", "content": "größer, <|end|>?"}
TOOL = {"type": "function", "function": {"name": "sum", "description": "Adds.", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    backend = byte_level()
    return {name: family(name, backend) for name in ("harmony", "qwen3-tools", "llama", "llama-tools")}


def asker(tokenizer: Any) -> Asker:
    return Asker(tokenizer, Path("no-such-target"), 4096, Regenerate(new_tokens=64), "data.chats.regenerate")


def trained(tokenizer: Any, record: dict[str, Any]) -> list[int]:
    """The tokens of a record's answer as it is trained."""
    encoder = Encoder(tokenizer)
    [[document]] = encoder.encode(encoder.plan([record]))
    return document.ids[document.answer_mask == 1].tolist()


@pytest.mark.parametrize("thought", ["I add 🙂.", ""])
def test_channels_are_read_as_the_template_writes_them(tokenizers: dict[str, Any], thought: str) -> None:
    tokenizer = tokenizers["harmony"]
    said = {"role": "assistant", "content": "It is 17."} | ({"reasoning_content": thought} if thought else {})
    record = {"messages": [QUESTION, said], "tools": [TOOL]}
    tokens = trained(tokenizer, record)
    conversation = Conversation(("train", 1), record, "keep")
    conversation.take(asker(tokenizer).answer(tokens))
    assert conversation.line()["messages"] == record["messages"]
    assert trained(tokenizer, conversation.line()) == tokens
    assert tokenizer.convert_tokens_to_ids("<|end|>") not in asker(tokenizer).ends, "it ends the thought alone"


def test_an_answer_torn_within_its_channels_is_never_kept_and_one_torn_in_its_text_is_cut(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["harmony"]
    record = {"messages": [QUESTION, {"role": "assistant", "content": "It is 17.", "reasoning_content": "I add."}]}
    tokens = trained(tokenizer, record)
    says = len(tokens) - 1 - len(tokenizer("It is 17.")["input_ids"])
    for length in range(1, len(tokens)):
        conversation = Conversation(("train", 1), record, "keep")
        conversation.take(asker(tokenizer).answer(tokens[:length]))
        assert (conversation.end == "cut") == (length > says), length


@pytest.mark.parametrize(
    "text",
    [
        "<|channel|>analysis<|message|>I<|end|><|start|>assistant to=functions.f<|channel|>commentary<|message|>{}<|call|>",
        "<|channel|>commentary<|message|>I add.<|return|>",
        "<|channel|>final<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>",
        "It is 17.<|return|>",
    ],
)
def test_other_channels_are_told_by_name(tokenizers: dict[str, Any], text: str) -> None:
    tokenizer = tokenizers["harmony"]
    assert asker(tokenizer).answer(tokenizer(text, add_special_tokens=False)["input_ids"]).fault == OTHER


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
