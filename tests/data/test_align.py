"""Aligners: what each makes of a record, which records it cannot work on, and which settings are refused."""

from typing import Any

import pytest

from longspec.data.align import pipeline
from longspec.data.read.record_checks import RecordError
from longspec.data.read.records import to_messages_or_text

TAGGED = '{"name": "f", "arguments": {"a": 1}}'
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
TAGS = {"read_tool_tags": {"field": "a"}}
UNCLOSED = "holds a tag of tools that is not closed, or text beside what tools returned"


def run(steps: list[Any], *records: dict[str, Any]) -> list[Any]:
    """What all steps make of the records; a fault as (field, reason)."""
    parsed = pipeline.parse("d", steps)
    made = [outcome for record in records for outcome in pipeline.apply(parsed, record)]
    return [(each.field, each.reason) if isinstance(each, RecordError) else each for each in made]


MADE: list[tuple[Any, dict[str, Any], list[Any]]] = [
    ({"rename": {"question": "problem", "answer": "qwq"}}, {"question": "q", "answer": "a"}, [{"problem": "q", "qwq": "a"}]),
    ({"rename": {"a": "b", "b": "a"}}, {"a": 1, "b": 2, "c": 3}, [{"b": 1, "a": 2, "c": 3}]),
    ({"select": ["b", "a"]}, {"a": 1, "b": None, "c": 3}, [{"b": None, "a": 1}]),
    ({"drop": ["a", "z"]}, {"a": 1, "b": 2}, [{"b": 2}]),
    ({"set": {"source": "book", "n": 1}}, {"source": "x", "text": "t"}, [{"source": "book", "text": "t", "n": 1}]),
    ({"add_id": {"prefix": "p"}}, {"a": 1}, [{"a": 1, "id": "p-0"}]),
    ({"flatten": {"field": "a"}}, {"a": [1, "x"], "b": 2}, [{"b": 2, "a": 1}, {"b": 2, "a": "x"}]),
    ({"flatten": {"field": "a", "to": "c"}}, {"a": [1, 2], "c": None}, [{"c": 1}, {"c": 2}]),
    ({"flatten": {"field": "meta.a"}}, {"meta": {"a": [1]}, "b": 2}, [{"meta": {"a": [1]}, "b": 2, "meta.a": 1}]),
    ({"flatten": {"field": "a", "merge": True}}, {"a": [{"x": 1}, {"y": 2}], "b": 3}, [{"b": 3, "x": 1}, {"b": 3, "y": 2}]),
    ({"flatten": {"field": ["a", "b"]}}, {"a": [1, 2], "b": [3, 4]}, [{"a": 1, "b": 3}, {"a": 2, "b": 4}]),
    (
        {"compose": {"to": "text", "template": "{title}\n\n{text}{{}}"}},
        {"title": "T", "text": "b {title}"},
        [{"title": "T", "text": "T\n\nb {title}{}"}],
    ),
    (
        {"compose": {"to": "t", "template": "{m.x} {m.l.1}"}},
        {"m": {"x": "a", "l": ["b", "c"]}},
        [{"m": {"x": "a", "l": ["b", "c"]}, "t": "a c"}],
    ),
    (
        {"compose": {"to": "t", "template": "{a.b}"}},
        {"a.b": "flat", "a": {"b": "deep"}},
        [{"a.b": "flat", "a": {"b": "deep"}, "t": "flat"}],
    ),
    (
        {"compose": {"to": "t", "template": "{a}\n\n{b}!", "optional": ["b"]}},
        {"a": "x", "b": ""},
        [{"a": "x", "b": "", "t": "x!"}],
    ),
    ({"filter": {"field": "lang", "equals": "en"}}, {"lang": "de"}, [None]),
    ({"filter": {"field": "m.lang", "in": ["en", "fr"]}}, {"m": {"lang": "fr"}}, [{"m": {"lang": "fr"}}]),
    ({"filter": {"field": "lang", "not_in": ["en", "fr"]}}, {"lang": "fr"}, [None]),
    ({"filter": {"field": "n", "min": 0.5, "max": 2}}, {"n": 0.5}, [{"n": 0.5}]),
    ({"filter": {"field": "n", "min": 0.5, "max": 2}}, {"n": 2.1}, [None]),
    ({"filter": {"field": "t", "min_characters": 2, "max_characters": 3}}, {"t": "äö"}, [{"t": "äö"}]),
    ({"filter": {"field": "t", "min_characters": 2}}, {"t": "x"}, [None]),
    ({"filter": {"field": "t", "present": True}}, {"t": ""}, [None]),
    ({"filter": {"field": "t", "present": False}}, {"t": None}, [{"t": None}]),
    (
        {"alternate": {"field": "data"}},
        {"id": 1, "data": ["u", "a"]},
        [{"id": 1, "messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}],
    ),
    (
        {"alternate": {"field": "data", "to": "data", "roles": ["system", "human", "gpt"]}},
        {"data": ["s", "u", "a", "s"]},
        [{"data": [{"role": r, "content": c} for r, c in (("system", "s"), ("human", "u"), ("gpt", "a"), ("system", "s"))]}],
    ),
    (
        {"start_at": {"field": "c"}},
        {
            "c": [
                {"from": "gpt", "value": "0"},
                {"from": "system", "value": "s"},
                {"from": "human", "value": "1"},
                {"from": "gpt"},
            ]
        },
        [{"c": [{"from": "system", "value": "s"}, {"from": "human", "value": "1"}, {"from": "gpt"}]}],
    ),
    (
        {"lay_out": {"chat_template_kwargs": {"enable_thinking": False}, "train_thoughts": False}},
        {"a": 1, "chat_template_kwargs": {"b": 1}},
        [{"a": 1, "chat_template_kwargs": {"enable_thinking": False}, "train_thoughts": False}],
    ),
    (
        {"read_tool_tags": {"field": "c"}},
        {
            "c": [
                {"from": "human", "value": "<tool_call>"},
                {"from": "gpt", "value": f"I see.\n<tool_call>\n{TAGGED}\n</tool_call>\n<tool_call>{TAGGED}</tool_call>"},
                {"from": "tool", "value": "<tool_response>\n1\n</tool_response>\n<tool_response>2</tool_response>"},
                {"from": "gpt", "value": "so"},
            ]
        },
        [
            {
                "c": [
                    {"from": "human", "value": "<tool_call>"},
                    {"from": "gpt", "value": "I see.", "tool_calls": [CALL, CALL]},
                    {"from": "tool", "value": "1"},
                    {"from": "tool", "value": "2"},
                    {"from": "gpt", "value": "so"},
                ]
            }
        ],
    ),
]

FAULTS: list[tuple[Any, dict[str, Any], tuple[str, str]]] = [
    ({"rename": {"a": "b"}}, {"c": 1}, ("a", "is missing or null")),
    ({"rename": {"a": "b"}}, {"a": 1, "b": 2}, ("b", "is there already; drop it first, or choose another name")),
    ({"rename": {"m.a": "b"}}, {"m": {"a": 1}}, ("m.a", "stands inside another field; compose can copy it from there")),
    ({"select": ["a"]}, {"b": 1}, ("a", "is missing")),
    ({"add_id": {}}, {"id": "x"}, ("id", "is there already; drop it first, or choose another name")),
    ({"flatten": {"field": "a"}}, {"a": []}, ("a", "is an empty list")),
    ({"flatten": {"field": "a"}}, {"a": "text"}, ("a", "must be a list, is str")),
    ({"flatten": {"field": ["a", "b"]}}, {"a": [1], "b": [1, 2]}, ("b", "has 2 elements, a has 1")),
    ({"flatten": {"field": "a", "merge": True}}, {"a": [3]}, ("element", "must be an object to be merged, is int (in a[0])")),
    (
        {"flatten": {"field": "a", "merge": True}},
        {"a": [{"b": 1}], "b": 2},
        ("b", "stands in the record and in the element (in a[0])"),
    ),
    ({"compose": {"to": "t", "template": "{a}{b}"}}, {"a": "x"}, ("b", "is missing or null")),
    ({"compose": {"to": "t", "template": "{a}"}}, {"a": " "}, ("a", "is empty")),
    ({"compose": {"to": "t", "template": "{a}"}}, {"a": True}, ("a", "must be text, is bool")),
    ({"filter": {"field": "a", "min": 1}}, {"a": "1"}, ("a", "must be a number, is str")),
    ({"filter": {"field": "a", "min_characters": 1}}, {"a": 1}, ("a", "must be text, is int")),
    ({"start_at": {"field": "a"}}, {"a": [{"role": "assistant"}]}, ("a", "has no user message to start at")),
    (TAGS, {"a": [{"role": "assistant", "content": "<tool_call>{}"}]}, ("a[0].content", UNCLOSED)),
    (TAGS, {"a": [{"role": "tool", "content": "x <tool_response>1</tool_response>"}]}, ("a[0].content", UNCLOSED)),
    (
        TAGS,
        {"a": [{"role": "assistant", "content": '<tool_call>{"name": ""}</tool_call>'}]},
        ("a[0].content[0].name", "is empty"),
    ),
]

REFUSED: list[tuple[Any, str]] = [
    ("rename", r"data\.d\.align: must be a list"),
    ([{"renam": {"a": "b"}}], r"data\.d\.align\[0\]\.renam: no such aligner; known: rename, set, select, drop, add_id"),
    ([{"drop": ["a"]}, "rename"], r"data\.d\.align\[1\]: must be one aligner with its settings"),
    ([{"rename": ["a"]}], r"data\.d\.align\[0\]\.rename: must be a mapping"),
    ([{"rename": {"a": 3}}], r"data\.d\.align\[0\]\.rename\.a: must be a field's new name, is 3"),
    ([{"rename": {"a": "c", "b": "c"}}], r"data\.d\.align\[0\]\.rename\.a: another field becomes 'c' too"),
    ([{"select": "a"}], r"data\.d\.align\[0\]\.select: must be a list of fields' names"),
    ([{"add_id": {"prefx": "a"}}], r"data\.d\.align\[0\]\.add_id\.prefx: .*, is 'a'; known: prefix, field, by"),
    ([{"add_id": {"prefix": 3}}], r"add_id\.prefix: .*, is 3"),
    ([{"add_id": {"by": "date"}}], r"add_id\.by: must be number or hash, is 'date'"),
    ([{"flatten": {}}], r"flatten\.field: Missing.*; known: field, to, merge"),
    ([{"flatten": {"field": ["a", "b"], "to": "c"}}], r"flatten\.field: several fields, `to` and `merge` exclude each other"),
    ([{"compose": {"to": "t", "template": "{a"}}], r"compose\.template: .* a brace that is text is written twice"),
    ([{"compose": {"to": "t", "template": "{a:>3}"}}], r"compose\.template: each unit is a field's name"),
    ([{"compose": {"to": "t", "template": "abc"}}], r"compose\.template: names no unit"),
    ([{"compose": {"to": "t", "template": "{a}", "optional": ["b"]}}], r"compose\.optional: 'b' is no unit of the template"),
    ([{"filter": {"field": "a", "present": True, "equals": 1}}], r"filter\.field: needs a condition; `present` stands alone"),
    ([{"filter": {"field": "a", "min": True}}], r"filter\.min: .* number, is True"),
    ([{"filter": {"field": "a", "in_": [1]}}], r"filter\.in_: .*; known: field, present, equals, in, not_in"),
    ([{"alternate": {"field": "a", "roles": ["me"]}}], r"alternate\.roles: must be roles such as \[user, assistant\]"),
    ([{"lay_out": {}}], r"lay_out\.train_thoughts: is not given, nor is chat_template_kwargs; give one of them"),
    ([{"lay_out": {"train_thoughts": "no"}}], r"data\.d\.align\[0\]\.lay_out\.train_thoughts: .*, is 'no'"),
    ([{"lay_out": {"chat_template_kwargs": {"tools": []}}}], r"lay_out\.chat_template_kwargs: 'tools' is no argument"),
    ([{"start_at": {"field": "a", "role": "human"}}], r"start_at\.role: must be one of assistant, system, user, is 'human'"),
]


@pytest.mark.parametrize(("step", "record", "made"), MADE)
def test_what_a_step_makes(step: Any, record: dict[str, Any], made: list[Any]) -> None:
    before = repr(record)
    assert run([step], record) == made
    assert repr(record) == before


@pytest.mark.parametrize(("step", "record", "fault"), FAULTS)
def test_what_a_step_cannot_work_on(step: Any, record: dict[str, Any], fault: tuple[str, str]) -> None:
    assert run([step], record) == [fault]


@pytest.mark.parametrize(("steps", "message"), REFUSED)
def test_settings_are_refused_with_their_key(steps: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pipeline.parse("d", steps)


def test_ids_number_the_records_of_a_run_and_hashes_follow_the_content() -> None:
    numbered = run([{"add_id": {"prefix": "n"}}], {"a": 1}, {"a": 1}, {"a": 2})
    assert [record["id"] for record in numbered] == ["n-0", "n-1", "n-2"]
    hashed = run([{"add_id": {"by": "hash"}}], {"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 2})
    assert hashed[0]["id"] == hashed[1]["id"] != hashed[2]["id"]


def test_steps_go_on_from_each_other_and_count_what_they_did() -> None:
    steps = pipeline.parse(
        "d",
        [
            {"flatten": {"field": "chapters", "merge": True}},
            {"flatten": {"field": "pages", "to": "page"}},
            {"filter": {"field": "page", "min_characters": 2}},
            {"compose": {"to": "text", "template": "{book}: {title}\n{page}"}},
            {"select": ["text"]},
        ],
    )
    book = {
        "book": "B",
        "chapters": [{"title": "1", "pages": ["aa", "b", "cc"]}, {"title": "2", "pages": ["dd", 5]}, {"pages": []}],
    }
    made = list(pipeline.apply(steps, book))
    assert [each["text"] for each in made if isinstance(each, dict)] == ["B: 1\naa", "B: 1\ncc", "B: 2\ndd"]
    assert made.count(None) == 1
    assert [str(each) for each in made if isinstance(each, RecordError)] == [
        "page: must be text, is int (in pages[1]) (in chapters[1])",
        "pages: is an empty list (in chapters[2])",
    ]
    assert [dict(each.tally) for each in steps[:3]] == [
        {pipeline.FLATTENED: 1, pipeline.MADE: 3},
        {pipeline.FLATTENED: 2, pipeline.MADE: 5},
        {pipeline.FILTERED: 1},
    ]


def test_messages_left_out_are_counted() -> None:
    steps = pipeline.parse("d", [{"start_at": {"field": "c"}}])
    turns = [{"from": who, "value": "x"} for who in ("gpt", "gpt", "human", "gpt")]
    for record in ({"c": turns}, {"c": turns[2:]}, {"c": turns[1:]}):
        assert [
            to_messages_or_text({"conversations": made["c"]})
            for made in pipeline.apply(steps, record)
            if isinstance(made, dict)
        ]
    assert steps[0].tally == {"conversations begun later": 2, "messages left out": 3}
