"""Regenerated answers are trained as the tokens that the target has written, behind the tokens that it was asked with."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from longspec import jsonl
from longspec.answers.conversation import Answer, Conversation
from longspec.answers.merge import merge
from longspec.atomic_files import read_json
from longspec.data import raw, tokenize
from longspec.data.chat.encoding import Encoder
from longspec.data.read.record_checks import RecordError
from tests.answers.chat_server import Reply, echo, said, serving
from tests.answers.conftest import Case, ask_alone, journal_of, turns, with_template
from tests.data.families import encoded
from tests.refusals import refused

# Puts an empty thought before an answer without one, and strips answers: as many reasoning models' templates.
THINKING = """{% for turn in messages %}
{%- if turn.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}
{%- if '</think>' not in turn.content %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{{- turn.content | trim + '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + turn.role + '\\n' + turn.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def spelt(document: Any) -> list[int]:
    """The trained tokens of a document."""
    return document.ids[document.answer_mask == 1].tolist()


@pytest.mark.parametrize("template", [None, THINKING])
def test_what_is_trained_is_what_was_written(case: Case, tmp_path: Path, template: str | None) -> None:
    """By transformers' own rendering: each answer's tokens stand behind the template's request, and nothing else is trained."""
    case = case if template is None else with_template(case, template, tmp_path)
    case.make(tmp_path / "out", batch=5)
    merge([tmp_path / "out/shard.json"], case.raw, tmp_path / "merged/manifest.json")
    tokenizer = AutoTokenizer.from_pretrained(read_json(case.tokenizer)["path"])
    trained = 0
    for record in jsonl.read(tmp_path / "merged/train.jsonl"):
        answers = [number for number, message in enumerate(record["messages"]) if message["role"] == "assistant"]
        documents = encoded(tokenizer, record)
        assert np.concatenate([spelt(document) for document in documents]).tolist() == [
            token for ids in record["answer_ids"] for token in ids
        ]
        whole = [document.ids.tolist() for document in documents]
        for number, ids in zip(answers, record["answer_ids"], strict=True):
            prompt = tokenizer.apply_chat_template(record["messages"][:number], add_generation_prompt=True, return_dict=False)
            assert any(tokens[: len(prompt) + len(ids)] == prompt + ids for tokens in whole)
            said = tokenizer.decode(ids[:-1] if ids[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>") else ids)
            assert said.rstrip("\ufffd") == record["messages"][number]["content"]
            trained += 1
        assert all(document.as_served for document in documents)
    assert trained > 10


def test_a_cut_answer_does_not_learn_to_end(case: Case, tmp_path: Path) -> None:
    case.make(tmp_path, new_tokens=2)
    tokenizer = AutoTokenizer.from_pretrained(read_json(case.tokenizer)["path"])
    cut = [line for line in journal_of(tmp_path).values() if line["end"] == "cut"]
    assert cut
    for line in cut:
        (*_, document) = encoded(tokenizer, line)
        assert document.ids[-1] == tokenizer.eos_token_id
        assert document.answer_mask[-1] == 0


def test_an_answer_cut_inside_a_character_keeps_its_tokens_and_learns_no_end() -> None:
    """Its text is without the torn character; what is trained are the tokens."""
    conversation = Conversation(("train", 1), {"messages": turns("why?")["messages"]}, "keep")
    conversation.take(Answer("so\ufffd", 3, cut=True, ids=(5, 6, 7)))
    line = conversation.line()
    assert (line["end"], line["messages"][1]["content"], line["answer_ids"]) == ("cut", "so", [[5, 6, 7]])


def test_tokens_of_another_targets_answers_are_not_trained(case: Case, tmp_path: Path) -> None:
    """As a data set of their own they are text; by hand, with another tokenizer, they are refused."""
    case.make(tmp_path / "out")
    answers = tmp_path / "merged/manifest.json"
    merge([tmp_path / "out/shard.json"], case.raw, answers)
    assert any("answer_ids" in record for record in jsonl.read(answers.parent / "train.jsonl"))
    raw.make("d", {"source": str(answers.parent / "train.jsonl"), "held_out": 0}, tmp_path / "raw/manifest.json")
    assert not any("answer_ids" in record for record in jsonl.read(tmp_path / "raw/train.jsonl"))
    other = with_template(case, THINKING, tmp_path).tokenizer
    with refused(answers, other):
        tokenize.make(answers, other, 0, 1, tmp_path / "tokens/000.json")


def test_turns_stand_in_one_document_where_their_tokens_go_on(case: Case) -> None:
    """Tokens that a tokenizer would not make of the text, as a model may write them, part the turns."""
    tokenizer = AutoTokenizer.from_pretrained(read_json(case.tokenizer)["path"])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    usual = tokenizer("the fox", add_special_tokens=False)["input_ids"]
    apart = [token for letter in "the fox" for token in tokenizer(letter, add_special_tokens=False)["input_ids"]]
    assert usual != apart
    assert tokenizer.decode(apart) == "the fox"
    record = turns("why?", "who?", "what?")
    for message in record["messages"][1::2]:
        message["content"] = "the fox"
    found = {}
    for name, first in (("usual", usual), ("apart", apart)):
        ids = [[*first, end], [*usual, end], [*usual, end]]
        documents = encoded(tokenizer, record | {"answer_ids": ids})
        assert np.concatenate([spelt(each) for each in documents]).tolist() == [token for each in ids for token in each]
        found[name] = len(documents)
    assert found == {"usual": 1, "apart": 2}


@pytest.mark.parametrize(
    ("ids", "fact"), [([], "1 answers"), ([[1], [2]], "1 answers"), ([["x"]], "token ids"), ([[10**6]], 10**6)]
)
def test_tokens_that_are_none_are_refused(case: Case, ids: Any, fact: str | int) -> None:
    encoder = Encoder(AutoTokenizer.from_pretrained(read_json(case.tokenizer)["path"]))
    with refused("answer_ids", fact, kind=RecordError):
        encoder.plan(turns("why?") | {"answer_ids": ids})


def test_a_vllm_is_asked_for_the_tokens_and_another_server_is_not(case: Case, tmp_path: Path) -> None:
    """Tokens that are not those of the text, or do not end as it does, are left out: the text is trained as ever."""
    tokenizer = AutoTokenizer.from_pretrained(read_json(case.tokenizer)["path"])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    fox = tokenizer("the fox", add_special_tokens=False)["input_ids"]
    told = {"why?": [*fox, end], "who?": fox, "what?": [*tokenizer("a cat", add_special_tokens=False)["input_ids"], end]}

    def reply(body: dict[str, Any], number: int) -> Reply:
        status, found = said("the fox")
        found["choices"][0]["token_ids"] = told[body["messages"][-1]["content"]]
        return status, found

    with serving(reply, owner="vllm") as server:
        ask_alone(case, tmp_path, server, told)
    assert {body["return_token_ids"] for body in server.asked} == {True}
    lines = journal_of(tmp_path / "out")
    assert [lines["train", number].get("answer_ids") for number in (1, 2, 3)] == [[[*fox, end]], None, None]
    with serving(echo) as server:
        ask_alone(case, tmp_path / "other", server, told)
    assert not any("return_token_ids" in body for body in server.asked)
