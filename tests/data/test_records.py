"""The record formats: what each becomes, and which field of a broken one is named."""

import json
import re
from typing import Any

import pytest

from longspec.data.read.record_checks import RecordError
from longspec.data.read.records import Chat, Text, to_messages_or_text
from tests.refusals import Fact, refused

ASKED = {"role": "user", "content": "u"}
ANSWERED = {"role": "assistant", "content": "a"}
PARTS = [{"type": "text", "text": " x"}, {"type": "text", "text": "y"}]
EMPTY_SYSTEM = {"role": "system", "content": ""}
SYSTEM = {"role": "system", "content": "s"}
PAIR = Chat([ASKED, ANSWERED])
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [{"id": "i", **CALL}]}
RESULT = {"role": "tool", "content": "r", "tool_call_id": "i"}
THOUGHT = {"role": "assistant", "content": "a", "reasoning_content": "hm"}


def called(field: str, value: Any) -> dict[str, Any]:
    """A record whose answer has another field."""
    return {"messages": [ASKED, ANSWERED | {field: value}]}


def summary(article: str, abstract: str) -> list[dict[str, Any]]:
    asked = f"Please summarize the following article: {article}"
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": abstract}]


GOOD: list[tuple[dict[str, Any], Text | Chat]] = [
    ({"text": "t"}, Text("t")),
    ({"source": "", "target": "t"}, Text("t")),
    ({"source": "\u200b", "target": "t"}, Text("t")),
    ({"text": "\u200ba\u200b"}, Text("\u200ba\u200b")),
    ({"source": "p", "target": "t"}, Text("t", "p")),
    ({"source": "arxiv", "text": "t"}, Text("t")),
    ({"source": "arxiv", "messages": [ASKED, ANSWERED]}, Chat([ASKED, ANSWERED])),
    ({"problem": "u", "qwq": "a"}, PAIR),
    ({"problem": "u", "qwq": "a", "text": None, "messages": None}, PAIR),
    ({"messages": [ASKED, ANSWERED]}, PAIR),
    ({"messages": json.dumps([ASKED, ANSWERED])}, PAIR),
    ({"messages": [{**ASKED, "name": None}, {**ANSWERED, "tool_calls": None, "refusal": None}]}, PAIR),
    ({"conversations": [{"from": "human", "value": "u", "weight": 0}, {"from": "gpt", "value": "a", "weight": 1}]}, PAIR),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "u"}]}, ANSWERED]}, PAIR),
    ({"messages": [{"role": "user", "content": PARTS}, ANSWERED]}, Chat([{"role": "user", "content": " xy"}, ANSWERED])),
    ({"messages": [EMPTY_SYSTEM, ASKED, ANSWERED]}, Chat([EMPTY_SYSTEM, ASKED, ANSWERED])),
    ({"messages": [EMPTY_SYSTEM | {"role": "developer"}, ASKED, ANSWERED]}, Chat([EMPTY_SYSTEM, ASKED, ANSWERED])),
    (called("reasoning_content", "hm"), Chat([ASKED, THOUGHT])),
    (called("reasoning", " \n"), PAIR),
    ({"messages": [ASKED, CALLING, RESULT, ANSWERED]}, Chat([ASKED, CALLING, RESULT, ANSWERED])),
    (
        {"messages": [ASKED, {"role": "assistant", "tool_calls": {"name": "f", "arguments": '{"a": 1}'}}]},
        Chat([ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}]),
    ),
    (
        {
            "conversations": [
                {"from": "human", "value": "u"},
                {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
                {"from": "observation", "value": ""},
                {"from": "gpt", "value": "a"},
            ],
            "tools": '[{"name": "f", "description": "d"}]',
        },
        Chat(
            [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": ""}, ANSWERED],
            [{"type": "function", "function": {"name": "f", "description": "d"}}],
        ),
    ),
    ({"messages": [ASKED, ANSWERED], "tools": [], "chat_template_kwargs": {}}, PAIR),
    # A column of JSON text holds text where other rows say something.
    ({"messages": [{**ASKED, "tool_calls": "[]"}, {**ANSWERED, "tool_calls": "null"}], "tools": "[]"}, PAIR),
    ({"messages": [ASKED, ANSWERED], "tools": "null", "chat_template_kwargs": "null"}, PAIR),
    ({"messages": [ASKED, ANSWERED], "system": "s"}, Chat([SYSTEM, ASKED, ANSWERED])),
    ({"messages": [ASKED, ANSWERED], "system": " "}, PAIR),
    ({"messages": [SYSTEM, ASKED, ANSWERED], "system": "s", "system_prompt": "s"}, Chat([SYSTEM, ASKED, ANSWERED])),
    ({"prompt": "u", "completion": "a", "text": None}, PAIR),
    ({"prompt": [ASKED], "completion": [ANSWERED]}, PAIR),
    (
        {"problem": "u", "qwq": "hm\n</think>\n\na", "chat_template_kwargs": {"x": [1]}},
        Chat([ASKED, THOUGHT], template_arguments={"x": [1]}),
    ),
    ({"source": "arxiv", "article": ["x", "y"], "abstract": ["1", "2"]}, Chat([*summary("x", "1"), *summary("y", "2")])),
]

BAD: list[tuple[dict[str, Any], str, Fact]] = [
    ({"text": 3}, "text", "is int"),
    ({"text": " \n\u2003"}, "text", "is empty"),
    ({"text": "\u200b"}, "text", "is empty"),
    ({"messages": [ASKED, {"role": "assistant", "content": "\u200e\u3164"}]}, "messages[1].content", "is empty"),
    ({"text": "ab\0"}, "text", re.compile("NUL .* 3$")),
    ({"text": "a\ud800b"}, "text", re.compile("surrogate .* 2$")),
    ({"source": "book"}, "text", "missing"),
    ({"source": "x\0", "target": "t"}, "source", "NUL"),
    ({"title": "t"}, "record", "(fields: title;"),
    ({"problem": "p"}, "qwq", "missing"),
    ({"qwq": "p"}, "problem", "missing"),
    ({"prompt": "p", "completion": ""}, "completion", "is empty"),
    ({"prompt": [ASKED], "completion": "a"}, "completion", "no list"),
    ({"prompt": "p"}, "record", "(fields: prompt;"),
    ({"messages": "no JSON"}, "messages", "no JSON"),
    ({"messages": []}, "messages", "not empty"),
    ({"messages": ["hello"]}, "messages[0]", "is str"),
    ({"messages": [ASKED]}, "messages", "no assistant"),
    ({"messages": [ANSWERED, ASKED, ANSWERED]}, "messages[0]", "start_at"),
    ({"messages": [ASKED, {"role": "assistant"}]}, "messages[1].content", "missing"),
    ({"messages": [ASKED, ANSWERED, {"role": "critic", "content": "c"}]}, "messages[2].role", "'critic'"),
    ({"messages": [ASKED, CALLING, {"role": "tool", "content": None}]}, "messages[2].content", "missing"),
    ({"messages": [{**ASKED, "tool_calls": [CALL]}, ANSWERED]}, "messages[0].tool_calls", "lost"),
    ({"messages": [ASKED, {**ANSWERED, "refusal": "no"}]}, "messages[1].refusal", "lost"),
    *(
        ({"messages": [ASKED, ANSWERED], name: ["a"]}, name, "lost")
        for name in ("images", "image", "videos", "audios", "functions")
    ),
    ({"messages": [ASKED, {**ANSWERED, "weight": 0}, ASKED, ANSWERED]}, "messages[1].weight", "is 0"),
    (called("tool_calls", [{"id": 1}]), "messages[1].tool_calls[0].name", "missing"),
    (called("tool_calls", "[{]"), "messages[1].tool_calls", "no JSON"),
    (called("tool_calls", [{"name": "f", "arguments": '{"a": 1, "a": 2}'}]), "messages[1].tool_calls[0].arguments", "twice"),
    (called("tool_calls", [{"name": "f", "arguments": [1]}]), "messages[1].tool_calls[0].arguments", "is list"),
    (called("tool_calls", [{"name": "f", "arguments": {"a": ["\ud800"]}}]), "messages[1].tool_calls[0]", "surrogate"),
    ({"messages": [ASKED, {**ANSWERED, "function_call": CALL}]}, "messages[1].function_call", "lost"),
    (
        {"messages": [ASKED, {**ANSWERED, "reasoning_content": "hm", "thinking": "oh"}]},
        "messages[1].reasoning_content",
        "differs",
    ),
    ({"messages": [ASKED, ANSWERED], "tools": [{"type": "function"}]}, "tools[0].name", "missing"),
    ({"messages": [ASKED, ANSWERED], "chat_template_kwargs": [1]}, "chat_template_kwargs", "is list"),
    ({"messages": [SYSTEM, ASKED, ANSWERED], "system": "t"}, "system", "remove"),
    ({"messages": [ASKED, ANSWERED], "system": "s", "system_prompt": "t"}, "system", "remove"),
    ({"messages": [ASKED, ANSWERED], "system_prompt": 3}, "system_prompt", "is int"),
    ({"messages": [ASKED, ANSWERED], "train_thoughts": False}, "train_thoughts", "is false"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "u"}, {"type": "image_url"}]}, ANSWERED]},
        "messages[0].content[1].type",
        "'image_url' is not 'text'",
    ),
    ({"conversations": [{"from": "human", "value": None}, {"from": "gpt", "value": "a"}]}, "conversations[0].value", "null"),
    ({"source": "arxiv"}, "record", "article + abstract"),
    ({"source": "arxiv", "article": ["a", "b"], "abstract": "c"}, "abstract", "1 for 2 articles"),
]


@pytest.mark.parametrize(("record", "document"), GOOD)
def test_published_formats(record: dict[str, Any], document: Text | Chat) -> None:
    assert to_messages_or_text(record) == document


@pytest.mark.parametrize(("record", "field", "fact"), BAD)
def test_faults_name_the_field(record: dict[str, Any], field: str, fact: Fact) -> None:
    with refused(f"{field}:", fact, kind=RecordError):
        to_messages_or_text(record)


UNANSWERED = [
    ({"messages": [ASKED]}, [ASKED]),
    ({"messages": [SYSTEM, ASKED]}, [SYSTEM, ASKED]),
    ({"problem": "p"}, [{"role": "user", "content": "p"}]),
    ({"messages": [ASKED, ANSWERED, ASKED]}, [ASKED, ANSWERED, ASKED]),
]


@pytest.mark.parametrize(("record", "messages"), UNANSWERED)
def test_questions_alone_are_records_where_they_are_answered_anew(
    record: dict[str, Any], messages: list[dict[str, str]]
) -> None:
    assert to_messages_or_text(record, unanswered=True) == Chat(messages)
    if ANSWERED not in messages:
        with refused("qwq:" if "problem" in record else "messages:", "data.<name>.regenerate is set", kind=RecordError):
            to_messages_or_text(record)
    nothing = [({"messages": [SYSTEM]}, "user message"), ({"problem": "p", "qwq": " "}, "is empty")]
    for asks_nothing, fact in nothing:
        with refused(f"{[*asks_nothing][-1]}:", fact, kind=RecordError):
            to_messages_or_text(asks_nothing, unanswered=True)
