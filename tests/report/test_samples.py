"""The coloured text of the page against lines made by hand, hostile ones among them."""

import json
from pathlib import Path

import pytest

from longspec import jsonl
from tests.report.test_numbers import TINY, report, write_tiny
from tests.report.test_page import read_page

pytestmark = pytest.mark.usefixtures("undrawn")
TOKENS = [
    {"text": "x", "depth": 0},
    {"text": "<script>", "depth": 1},
    {"text": "alert(1)", "depth": 2},
    {"text": '</script>"\n', "depth": 0},
    {"text": '&amp;" onclick="x', "depth": 1},
    {"text": "\x00\t", "depth": 0},
]


def test_hostile_texts_are_shown_and_do_nothing(tmp_path: Path) -> None:
    arguments, path = write_tiny(tmp_path), tmp_path / "results/base/evaluation/longcot.jsonl"
    sample = {"sample": {"before": "<img src=x onerror=alert(2)>", "tokens": TOKENS}}
    jsonl.write(path, [row | (sample if row["prompt"] == 0 else {}) for row in list(jsonl.read(path))])
    report(arguments)
    parser, source, text = read_page(tmp_path)
    assert not parser.tags & {"script", "img"}
    assert "onclick" not in {name for _, attributes in parser.elements for name in attributes}
    assert "<img src=x onerror=alert(2)>" in text
    assert "longcot: 3 of 6 tokens were drafted" in text
    spans = [attributes["class"] for tag, attributes in parser.elements if tag == "span" and "title" in attributes]
    assert spans == ["target", "kept-1", "kept-2", "target", "kept-1", "target missed"]
    assert "&lt;/script&gt;&#34;↵\n" in source
    assert '<script> alert(1) </script>"↵ &amp;" onclick="x ␀⇥' in text


def test_lines_of_vllm_show_what_it_does_not_tell_as_unknown(tmp_path: Path) -> None:
    arguments = write_tiny(tmp_path, engine="vllm", seconds_draft=None, seconds_target=None)
    settings = json.dumps(TINY | {"engine": "vllm"})
    arguments[arguments.index("--settings") + 1] = settings
    numbers = report(arguments)
    speed = numbers["speed"]["base"]["longcot"]
    assert speed["speed_up"]["mean"] == 1.5
    names = ("draft_share", "target_share", "other_share", "measured_cost_ratio", "verification_cost_ratio")
    assert [speed[name] for name in names] == [None] * 5
    assert {row["draft_share"] for row in numbers["measured"]["base"]["longcot"]} == {None}
    _, _, text = read_page(tmp_path)
    assert "Everything was decoded by vLLM and counted by its own counters; prompt lookup is vLLM's." in text
    assert "nan" not in text.lower().split()
