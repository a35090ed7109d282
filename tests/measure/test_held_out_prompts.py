"""Prompts come from held-out records alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from longspec.data.chat.encoding import Encoder, load_tokenizer
from longspec.measure.prompts import ROOM_AFTER, draw_prompts
from longspec.measure.tasks import HeldOut
from tests import corpus
from tests.data.families import byte_level, family
from tests.refusals import refused

CONTEXT = (8, 30)
TASK = HeldOut("d", CONTEXT, 24)


@pytest.fixture
def tokenizer(corpus: corpus.Corpus) -> Any:
    return load_tokenizer(corpus.tokenizer)[0]


def write_raw(folder: Path, records: list[dict[str, Any]]) -> Path:
    """Every second one is held out."""
    return corpus.write_raw(folder / "raw", records[::2], records[1::2])


def texts(count: int) -> list[dict[str, Any]]:
    return [{"text": f"number {n} " + "of the words that follow " * (n % 7)} for n in range(count)]


def chats(count: int) -> list[dict[str, Any]]:
    answer = "a long answer that goes on and on " * 3
    return [
        {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": answer}]} for n in range(count)
    ]


@pytest.mark.parametrize("kind", [texts, chats])
def test_stretches_of_held_out_records(tmp_path: Path, tokenizer: Any, kind: Any) -> None:
    """Of a text from anywhere, of a conversation from its beginning; with room for what is decoded."""
    manifest = write_raw(tmp_path, kind(60))
    held_out = [json.loads(line) for line in (manifest.parent / "held_out.jsonl").read_text().splitlines()]
    prompts = draw_prompts("short", TASK, manifest, 40, tokenizer, seed=1)
    assert [prompt.number for prompt in prompts] == list(range(40))
    starts = []
    for prompt in prompts:
        ids = Encoder(tokenizer).documents(held_out[prompt.record])[-1].ids.tolist()
        assert CONTEXT[0] <= len(prompt.ids) <= CONTEXT[1]
        places = [at for at in range(len(ids) - len(prompt.ids) + 1) if ids[at : at + len(prompt.ids)] == prompt.ids]
        assert places, "not a stretch of its record"
        assert places[0] + len(prompt.ids) + ROOM_AFTER <= len(ids)
        starts.append(places[0])
    assert (max(starts) > 0) is (kind is texts)
    assert prompts == draw_prompts("short", TASK, manifest, 40, tokenizer, seed=1)
    assert prompts != draw_prompts("short", TASK, manifest, 40, tokenizer, seed=2)
    assert prompts != draw_prompts("long", TASK, manifest, 40, tokenizer, seed=1)


def turns(count: int, answered: bool) -> list[dict[str, Any]]:
    """Conversations of one to three questions; without the last answer, or with it."""
    made = []
    for n in range(count):
        messages = []
        for turn in range(n % 3 + 1 if answered else 1):
            messages += [{"role": "user", "content": f"question {n} " + "and more " * (n + turn)}]
            messages += [{"role": "assistant", "content": f"answer {turn}"}]
        made.append({"messages": messages if answered else messages[:-1]})
    return made


def test_of_a_mixed_data_set_conversations_are_asked_and_texts_are_cut(tmp_path: Path, tokenizer: Any) -> None:
    """Whichever stands first: each record is taken by its own kind."""
    task = HeldOut("d", (8, 150), 24, whole_questions="auto")
    for mixed in (texts(40) + turns(40, answered=True), turns(40, answered=True) + texts(40)):
        manifest = write_raw(tmp_path, mixed)
        held_out = [json.loads(line) for line in (manifest.parent / "held_out.jsonl").read_text().splitlines()]
        prompts = draw_prompts("short", task, manifest, 100, tokenizer, seed=1)
        asked = {each.record for each in prompts if "messages" in held_out[each.record]}
        assert len(prompts) == len({each.record for each in prompts})
        assert 4 < len(asked) < len(prompts) - 4


@pytest.mark.parametrize("answered", [True, False])
def test_whole_questions_are_what_the_template_makes_of_them(tmp_path: Path, tokenizer: Any, answered: bool) -> None:
    """The prompt is that of transformers' own chat template, of a conversation with answers or without."""
    manifest, task = write_raw(tmp_path, turns(60, answered)), HeldOut("d", (20, 150), 24, whole_questions=True)
    held_out = [json.loads(line) for line in (manifest.parent / "held_out.jsonl").read_text().splitlines()]
    expected: dict[int, list[list[int]]] = {}
    for line, record in enumerate(held_out):
        ends = [n for n, message in enumerate(record["messages"], 1) if message["role"] == "user"]
        asked = [
            tokenizer.apply_chat_template(record["messages"][:end], add_generation_prompt=True)["input_ids"] for end in ends
        ]
        if fitting := [ids for ids in asked if 20 <= len(ids) <= 150]:
            expected[line] = fitting
    assert 5 < len(expected) < len(held_out)
    prompts = draw_prompts("d", task, manifest, 1000, tokenizer, seed=1)
    assert sorted(prompt.record for prompt in prompts) == sorted(expected)
    assert all(prompt.ids in expected[prompt.record] for prompt in prompts)
    assert prompts[:4] == draw_prompts("d", task, manifest, 4, tokenizer, seed=1)
    assert prompts != draw_prompts("d", task, manifest, 1000, tokenizer, seed=2)


STRANGE = [chat | {"chat_template_kwargs": {"enable_thinking": False}} for chat in chats(30)]


@pytest.mark.parametrize(
    ("records", "context", "whole", "told"),
    [
        ([{"text": f"t{n}"} for n in range(60)], CONTEXT, False, "record has 24 tokens"),
        (chats(30), (900, 999), True, "question has 900 to 999 tokens"),
        (texts(30), (1, 999), True, "question has 1 to 999 tokens"),
        (STRANGE, (1, 999), True, "such as: chat_template_kwargs.enable_thinking: the chat"),
    ],
)
def test_records_without_a_prompt_are_named(
    tmp_path: Path, tokenizer: Any, records: list[Any], context: tuple[int, int], whole: bool, told: str
) -> None:
    manifest = write_raw(tmp_path, records)
    with refused(manifest.with_name("held_out.jsonl"), "evaluation.tasks.far.context", told):
        draw_prompts("far", HeldOut("d", context, 24, whole), manifest, 4, tokenizer, seed=1)


def test_whole_questions_have_the_tools_and_template_arguments_of_their_records(tmp_path: Path) -> None:
    """The prompt is that of transformers' own chat template; a question behind a thought is left out."""
    tokenizer = family("qwen3-tools", byte_level())
    beside = {"tools": [{"type": "function", "function": {"name": "sum"}}], "chat_template_kwargs": {"enable_thinking": False}}
    thought = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    questions = [[{"role": "user", "content": f"{each} {n}"} for each in ("first", "then")] for n in range(20)]
    records = [{"messages": [first, thought, then, thought], **beside} for first, then in questions]
    manifest, task = write_raw(tmp_path, records), HeldOut("d", (1, 999), 24, whole_questions=True)
    held_out = [json.loads(line)["messages"] for line in (manifest.parent / "held_out.jsonl").read_text().splitlines()]
    given = {"tools": beside["tools"], "enable_thinking": False, "add_generation_prompt": True}
    expected = [tokenizer.apply_chat_template(messages[:1], **given)["input_ids"] for messages in held_out]
    assert 0 < len(expected) < 20
    found = {prompt.record: prompt.ids for prompt in draw_prompts("d", task, manifest, 20, tokenizer, seed=1)}
    assert [found[line] for line in range(len(expected))] == expected
