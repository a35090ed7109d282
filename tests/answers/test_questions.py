"""Which questions of a record are asked, how they are laid out, and which answers are kept."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longspec.answers.conversation import ANSWERED, DROPPED, SHORTENED, SKIPPED, Answer, Asker, Conversation
from longspec.answers.settings import Regenerate
from longspec.data.chat.encoding import Encoder
from longspec.data.chat.special_tokens import LayoutError
from longspec.data.read.record_checks import MARKS, Marks
from longspec.data.read.records import to_messages_or_text
from tests.data.families import byte_level, family
from tests.refusals import refused

SYSTEM, ASKED = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
OLD, NEW = {"role": "assistant", "content": "old"}, {"role": "assistant", "content": "new"}


@pytest.mark.parametrize(
    ("record", "history", "messages"),
    [
        ({"messages": [ASKED]}, [ASKED], [ASKED, NEW]),
        ({"messages": [SYSTEM, ASKED]}, [SYSTEM, ASKED], [SYSTEM, ASKED, NEW]),
        ({"messages": [ASKED, OLD, ASKED]}, [ASKED], [ASKED, NEW, ASKED]),
    ],
)
def test_one_answer_is_asked_for(record: dict[str, Any], history: list[Any], messages: list[Any]) -> None:
    conversation = Conversation(("train", 1), record, "keep")
    assert (conversation.turns, conversation.end, conversation.history) == (1, "", history)
    conversation.take(Answer("new", 1, cut=False))
    assert (conversation.end, conversation.line()["messages"]) == (ANSWERED, messages)


TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}
RESULT = {"role": "tool", "content": "r"}


@pytest.mark.parametrize(
    "beside", [{"tools": [TOOL]}, {"chat_template_kwargs": {"enable_thinking": False}}], ids=lambda beside: next(iter(beside))
)
def test_what_a_record_gives_the_template_is_asked_and_kept_with_its_answer(beside: dict[str, Any]) -> None:
    record = {"messages": [ASKED, OLD], **beside}
    conversation = Conversation(("train", 1), record, "keep")
    assert conversation.asked == replace(to_messages_or_text(record), messages=[ASKED])
    conversation.take(Answer("new", 1, cut=False))
    line = conversation.line()
    assert (line["end"], to_messages_or_text(line)) == (ANSWERED, to_messages_or_text(record | {"messages": [ASKED, NEW]}))


@pytest.mark.parametrize("behind", [[RESULT, OLD], [ASKED, OLD]])
def test_where_tools_are_offered_nothing_is_asked_behind_the_first_answer(behind: list[Any]) -> None:
    first = CALL if RESULT in behind else OLD
    conversation = Conversation(("train", 1), {"messages": [ASKED, first, *behind], "tools": [TOOL]}, "keep")
    conversation.take(Answer('{"name": "f"}', 1, cut=False))
    assert (conversation.end, conversation.turns) == (SHORTENED, 1)
    assert conversation.line()["messages"] == [ASKED, {"role": "assistant", "content": '{"name": "f"}'}]


def test_calls_of_tools_that_are_not_offered_are_skipped_with_their_name() -> None:
    conversation = Conversation(("train", 1), {"messages": [ASKED, CALL, RESULT, OLD]}, "keep")
    assert (conversation.end, conversation.reason) == (SKIPPED, "calls of tools that the record does not offer")


@pytest.mark.parametrize("marks", MARKS, ids=lambda marks: marks.opener)
@pytest.mark.parametrize("is_opened", [False, True])
def test_an_answer_that_ends_inside_its_thought_is_dropped(marks: Marks, is_opened: bool) -> None:
    conversation = Conversation(("train", 1), {"messages": [ASKED]}, "keep")
    conversation.opened = marks if is_opened else None
    conversation.take(Answer("half" if is_opened else f"{marks.opener}half", 1, cut=False))
    assert (conversation.end, "inside its thought" in conversation.reason) == (DROPPED, True)


@pytest.mark.parametrize(
    "thought",
    [Answer(marks.written("why", "new"), 3, cut=False) for marks in MARKS] + [Answer("new", 3, cut=False, thought="why")],
    ids=["<think>", "[THINK]", "apart"],
)
def test_no_turn_is_asked_behind_a_thought_which_a_template_would_leave_out(thought: Answer) -> None:
    several = Conversation(("train", 1), {"messages": [ASKED, OLD, ASKED, OLD]}, "keep")
    several.take(thought)
    assert (several.end, len(several.line()["messages"])) == (SHORTENED, 2)
    assert several.line()["messages"][1]["content"] == thought.text
    alone = Conversation(("train", 2), {"messages": [ASKED, OLD, ASKED]}, "keep")
    alone.take(thought)
    assert alone.end == ANSWERED


QUESTION = {"role": "user", "content": "größer?"}
SUM = {"type": "function", "function": {"name": "sum", "description": "Adds.", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    backend = byte_level()
    return {name: family(name, backend) for name in ("harmony", "qwen3-tools", "llama", "llama-tools")}


def asker(tokenizer: Any, **settings: Any) -> Asker:
    return Asker(tokenizer, Path("no-such-target"), 4096, Regenerate(new_tokens=64, **settings), "data.chats.regenerate")


def test_answers_in_channels_are_a_servers(tokenizers: dict[str, Any]) -> None:
    with refused("data.chats.regenerate.engine", "transformers", "set endpoint:"):
        asker(tokenizers["harmony"])
    served = asker(tokenizers["harmony"], engine="endpoint", endpoint="http://host/v1")
    assert tokenizers["harmony"].convert_tokens_to_ids("<|end|>") not in served.ends, "it ends the thought alone"
    asker(tokenizers["llama"])


def test_a_token_that_the_tokenizer_does_not_know_drops_its_answer_alone(tokenizers: dict[str, Any]) -> None:
    """Of an embedding with more rows than tokens, padding may be sampled."""
    answers, known = asker(tokenizers["llama"]), max(tokenizers["llama"].get_vocab().values())
    text = tokenizers["llama"].encode("so", add_special_tokens=False)
    assert [bool(answers.answer([*text, last]).fault) for last in (text[0], known + 1, known + 64)] == [False, True, True]


@pytest.mark.parametrize("name", ["harmony", "qwen3-tools", "llama", "llama-tools"])
def test_what_a_server_reads_is_what_transformers_lays_out(tokenizers: dict[str, Any], name: str) -> None:
    """Of this day. What names special tokens, which are tokens to a server and text in training, is not sent."""
    tokenizer = tokenizers[name]
    beside: dict[str, Any] = {} if name == "llama" else {"tools": [SUM]}
    arguments = {"enable_thinking": False} if name == "qwen3-tools" else {}
    record = {"messages": [QUESTION, {"role": "assistant", "content": "old"}], **beside, "chat_template_kwargs": arguments}
    chat = Conversation(("train", 1), record, "keep").asked
    laid_out = tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True, **beside, **arguments)["input_ids"]
    assert Encoder(tokenizer).as_sent(chat) == laid_out
    [ours] = Encoder(tokenizer).requests([chat])
    tells_the_day = {"harmony": True, "qwen3-tools": False, "llama": True, "llama-tools": False}[name]
    assert (ours == laid_out) is not tells_the_day
    with pytest.raises(LayoutError):
        Encoder(tokenizer).as_sent(replace(chat, messages=[QUESTION | {"content": f"{Encoder(tokenizer).special[0]}?"}]))
