"""Aligners: what each makes of a record, which records it cannot work on, and which settings are refused."""

import json
import re
from typing import Any

import pytest

from longspec.data.align import pipeline
from longspec.data.read.record_checks import RecordError
from tests.refusals import check, refused


def run(steps: list[Any], *records: dict[str, Any]) -> list[Any]:
    """What all steps make of the records; a fault as (field, reason)."""
    parsed = pipeline.parse("d", steps)
    made = [outcome for record in records for outcome in pipeline.apply(parsed, record)]
    return [(each.field, each.reason) if isinstance(each, RecordError) else each for each in made]


ANSWER, SYSTEM, ASKED = ({"from": who, "value": who} for who in ("gpt", "system", "human"))
MADE: list[tuple[Any, dict[str, Any], list[Any]]] = [
    ({"rename": {"question": "problem", "answer": "qwq"}}, {"question": "q", "answer": "a"}, [{"problem": "q", "qwq": "a"}]),
    ({"rename": {"a": "b", "b": "a"}}, {"a": 1, "b": 2, "c": 3}, [{"b": 1, "a": 2, "c": 3}]),
    ({"select": ["b", "a"]}, {"a": 1, "b": None, "c": 3}, [{"b": None, "a": 1}]),
    ({"drop": ["a", "z"]}, {"a": 1, "b": 2}, [{"b": 2}]),
    ({"set": {"source": "book", "n": 1}}, {"source": "x", "text": "t"}, [{"source": "book", "text": "t", "n": 1}]),
    ({"flatten": {"field": "a"}}, {"a": [1, "x"], "b": 2}, [{"b": 2, "a": 1}, {"b": 2, "a": "x"}]),
    ({"flatten": {"field": "meta.a"}}, {"meta": {"a": [1]}, "b": 2}, [{"meta": {"a": [1]}, "b": 2, "meta.a": 1}]),
    ({"flatten": {"field": "a", "merge": True}}, {"a": [{"x": 1}, {"y": 2}], "b": 3}, [{"b": 3, "x": 1}, {"b": 3, "y": 2}]),
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
    ({"start_at": {"field": "c"}}, {"c": [ANSWER, SYSTEM, ASKED, ANSWER]}, [{"c": [SYSTEM, ASKED, ANSWER]}]),
    ({"start_at": {"field": "c"}}, {"c": json.dumps([ANSWER, ASKED, ANSWER])}, [{"c": [ASKED, ANSWER]}]),
]

NESTED = [{"flatten": {"field": "a", "merge": True}}, {"flatten": {"field": "b"}}, {"filter": {"field": "b", "min": 1}}]
FAULTS: list[tuple[Any, dict[str, Any], str, str]] = [
    ({"rename": {"a": "b"}}, {"c": 1}, "a", "missing or"),
    ({"rename": {"a": "b"}}, {"a": 1, "b": 2}, "b", "drop it"),
    ({"rename": {"m.a": "b"}}, {"m": {"a": 1}}, "m.a", "missing or"),
    ({"select": ["a"]}, {"b": 1}, "a", re.compile("missing$")),
    ({"flatten": {"field": "a"}}, {"a": []}, "a", "empty list"),
    ({"flatten": {"field": "a"}}, {"a": "text"}, "a", "no JSON"),
    ({"flatten": {"field": "a"}}, {"a": "3"}, "a", "a list, is int"),
    ({"flatten": {"field": "a", "merge": True}}, {"a": [3]}, "element", "merged, is int (in a[0])"),
    ({"flatten": {"field": "a", "merge": True}}, {"a": [{"b": 1}], "b": 2}, "b", "element (in a[0])"),
    ({"compose": {"to": "t", "template": "{a}{b}"}}, {"a": "x"}, "b", "missing or"),
    ({"compose": {"to": "t", "template": "{a}"}}, {"a": " "}, "a", "is empty"),
    ({"compose": {"to": "t", "template": "{a}"}}, {"a": True}, "a", "text, is bool"),
    ({"filter": {"field": "a", "min": 1}}, {"a": "1"}, "a", "a number, is str"),
    ({"filter": {"field": "a", "min_characters": 1}}, {"a": 1}, "a", "text, is int"),
    ({"start_at": {"field": "a"}}, {"a": [{"role": "assistant"}]}, "a", "user message"),
    (NESTED, {"a": [{"b": ["x"]}]}, "b", "is str (in b[0]) (in a[0])"),
]

# The steps, and the key at fault below `data.d.align`.
REFUSED: list[tuple[Any, str]] = [
    ([{"renam": {"a": "b"}}], "[0].renam"),
    ([{"rename": ["a"]}], "[0].rename"),
    ([{"rename": {"a": 3}}], "[0].rename.a"),
    ([{"rename": {"a": "c", "b": "c"}}], "[0].rename.a"),
    ([{"select": "a"}], "[0].select"),
    ([{"flatten": "a"}], "[0].flatten"),
    ([{"flatten": {}}], "[0].flatten.field"),
    ([{"compose": {"to": "t", "template": "{a"}}], "[0].compose.template"),
    ([{"compose": {"to": "t", "template": "{a:>3}"}}], "[0].compose.template"),
    ([{"compose": {"to": "t", "template": "abc"}}], "[0].compose.template"),
    ([{"compose": {"to": "t", "template": "{a}", "optional": ["b"]}}], "[0].compose.optional"),
    ([{"filter": {"field": "a", "present": True, "equals": 1}}], "[0].filter.field"),
    ([{"filter": {"field": "a", "min": True}}], "[0].filter.min"),
    ([{"filter": {"field": "a", "in_": [1]}}], "[0].filter.in_"),
]


@pytest.mark.parametrize(("step", "record", "made"), MADE)
def test_what_a_step_makes(step: Any, record: dict[str, Any], made: list[Any]) -> None:
    before = repr(record)
    assert run([step], record) == made
    assert repr(record) == before


@pytest.mark.parametrize(("step", "record", "field", "fact"), FAULTS)
def test_what_a_step_cannot_work_on(step: Any, record: dict[str, Any], field: str, fact: str) -> None:
    [fault] = run(step if isinstance(step, list) else [step], record)
    check(": ".join(fault), f"{field}:", fact)


@pytest.mark.parametrize(("steps", "key"), REFUSED)
def test_settings_are_refused_with_their_key(steps: Any, key: str) -> None:
    with refused(f"data.d.align{key}:"):
        pipeline.parse("d", steps)
