"""Answers through a server that fails, stalls, limits the rate, cuts answers, says nonsense, or reads prompts otherwise."""

import json
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from longspec import jsonl
from longspec.answers.merge import merge
from longspec.answers.settings import parse
from longspec.atomic_files import read_json
from tests.answers.chat_server import Reply, echo, question, said, serving
from tests.answers.conftest import ASKED, Case, ask, ask_alone, journal_of, turns, with_template
from tests.corpus import write_raw
from tests.refusals import refused


def test_each_turn_is_asked_with_the_new_answers_before_it(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a-secret")
    with serving(echo) as server:
        made = ask(case, tmp_path, server, top_p=0.5, temperature=0.25)
    assert made["ends"] == {"answered": 14, "shortened": 0, "cut": 0, "dropped": 0, "skipped": 0, "failed": 0}
    lines = journal_of(tmp_path)
    for name in ("train", "held_out"):
        for number, record in enumerate(jsonl.read(case.raw.parent / f"{name}.jsonl"), 1):
            wanted = []
            for message in record["messages"][::2]:
                wanted += [message, {"role": "assistant", "content": f"{message['content']} after {len(wanted)}"}]
            assert lines[name, number]["messages"] == wanted
    told = [{key: value for key, value in body.items() if key not in ("messages", "seed")} for body in server.asked]
    assert told == [{"model": "some/test", "max_tokens": 12, "temperature": 0.25, "top_p": 0.5}] * len(told)
    assert len({body["seed"] for body in server.asked}) == len(server.asked) == made["answers"]
    assert server.keys == {"Bearer a-secret"}
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and "a-secret" in path.read_text()]


def test_many_requests_are_under_way_at_once_and_what_passes_is_tried_again(case: Case, tmp_path: Path) -> None:
    together = threading.Barrier(4)
    faults: list[Reply] = [(429, {"error": {"message": "slow down"}}), (503, b"")]

    def reply(body: dict[str, Any], number: int) -> Reply:
        if number < 2:
            return faults[number]
        together.wait(20)
        return echo(body, number)

    with serving(reply) as server:
        assert ask_alone(case, tmp_path, server, ASKED[:4])["ends"]["answered"] == 4
    assert set(server.seen.values()) == {3}


def test_too_many_failures_end_the_job_with_their_reasons_and_the_next_one_asks_for_these_alone(
    case: Case, tmp_path: Path
) -> None:
    def refuse(body: dict[str, Any], number: int) -> Reply:
        bad = question(body) == "why?"
        return (400, {"error": {"message": f"no {len(body['messages'])} whys"}}) if bad else echo(body, number)

    told = ("of 14", "share 0.1", re.compile(r"\d x \S+/v1: .*N.*no N whys"))
    with serving(refuse) as server, refused("regenerate.max_failed", *told):
        ask(case, tmp_path, server, max_failed=0.1)
    done = journal_of(tmp_path)
    assert not (tmp_path / "shard.json").exists()
    with serving(echo) as server:
        assert ask(case, tmp_path, server)["ends"]["answered"] == 14
    assert {key: journal_of(tmp_path)[key] for key in done} == done
    assert sum(len(body["messages"]) == 1 for body in server.asked) == 14 - len(done)


def test_what_fails_all_requests_ends_the_job_at_once(case: Case, tmp_path: Path) -> None:
    told = ("code: 401", "no key", "or set OPENAI_API_KEY")
    with serving(lambda *_: (401, {"message": "no key"})) as server, refused(server.address, *told):
        ask(case, tmp_path, server, max_failed=1.0)
    assert len(server.asked) <= 12


def test_a_server_that_is_not_there_or_serves_another_model_is_named(case: Case, tmp_path: Path) -> None:
    with serving(echo) as server:
        address = server.address
        with refused(address, "serves some/test", "regenerate.served_model"):
            ask(case, tmp_path, server, served_model="other")
    for name in ("target", "answers/other/target"):
        with serving(echo, name) as server, refused(server.address, f"serves {name}", f"regenerate.served_model to {name}"):
            ask_alone(case, tmp_path / "other", server, ASKED)
    with serving(echo, "alias") as server:
        with refused(server.address, "serves alias", "regenerate.served_model to alias"):
            ask_alone(case, tmp_path / "alias", server, ASKED)
        assert ask_alone(case, tmp_path / "alias", server, ASKED, served_model="alias")["ends"]["answered"] == len(ASKED)
    with refused(address, "no models"):
        case.make(tmp_path, engine="endpoint", endpoint=address, tries=2)
    with serving(echo) as server:
        for server.listed in (b"<html>", b"[]", b'{"data": null}'):
            with refused(server.address, "no models", "its /v1"):
                ask(case, tmp_path, server)


COUNTED: dict[str, Any] = {"usage": {"completion_tokens": "x"}}
# By question: what a server replies, how its record ends, and why.
REPLIES: dict[str, tuple[Reply, str, str]] = {
    "fine": (said("x"), "answered", ""),
    "thought": (said("x", reasoning_content="hm"), "answered", ""),
    "thought, by its other name": (said("x", reasoning="hm"), "answered", ""),
    "thought alone": (said(None, "length", reasoning="h"), "dropped", "ends inside its thought"),
    "empty": (said(" "), "dropped", "the answer is empty"),
    "torn answer": (said("to", "length"), "cut", "cut by new_tokens"),
    "control": (said("so<|im_end|>"), "dropped", "the answer holds the special token <|im_end|>"),
    "control in a thought": (said("x", reasoning_content="<|im_end|>"), "dropped", "the answer holds the special token"),
    "torn": ((200, b'{"choices": [{"mess'), "failed", "its reply: all of it: "),
    "no choice": ((200, {"choices": []}), "failed", "its reply: choices.N.finish_reason: "),
    "no count": ((200, said("x")[1] | COUNTED), "failed", "its reply: usage.completion_tokens: "),
    "no text": (said("x", reasoning={"a": 1}), "failed", "its reply: choices.N.message.reasoning: "),
    "filtered": (said("x", "content_filter"), "failed", "finish_reason 'content_filter'"),
}


def test_an_answer_that_takes_too_long_fails_with_the_key(case: Case, tmp_path: Path) -> None:
    """By default an answer has a second for five tokens, and ten minutes."""
    assert [parse("d", {"new_tokens": tokens}).seconds for tokens in (256, 32768)] == [600, 32768 / 5]
    ended = threading.Event()

    def reply(body: dict[str, Any], number: int) -> Reply:
        ended.wait(20)
        return echo(body, number)

    with serving(reply) as server:
        made = ask_alone(case, tmp_path, server, ASKED[:1], max_failed=1.0, timeout=0.2, tries=1)
        ended.set()
    assert any("raise regenerate.timeout" in reason for reason in made["reasons"]["failed"])


def test_each_reply_decides_its_own_record(case: Case, tmp_path: Path) -> None:
    with serving(lambda body, _: REPLIES[question(body)][0]) as server:
        made = ask_alone(case, tmp_path, server, REPLIES, max_failed=1.0)
    lines = journal_of(tmp_path / "out")
    for number, (reply, end, why) in enumerate(REPLIES.values(), 1):
        assert lines.get(("train", number), {"end": "failed"})["end"] == end
        assert sum(why in reason for reason in made["reasons"][end]) == bool(why), (why, made["reasons"])
        if end == "answered":
            thought = {"reasoning_content": "hm"} if "hm" in str(reply) else {}
            assert lines["train", number]["messages"][1] == {"role": "assistant", "content": "x", **thought}
    assert {end: count for end, count in made["ends"].items() if count} == {"answered": 3, "cut": 1, "dropped": 4, "failed": 5}


def test_a_whole_shard_is_made_again_without_its_server_and_with_the_same_bytes(case: Case, tmp_path: Path) -> None:
    """Also of what failed, whose answers would be other records, and train finished stages anew."""
    with serving(lambda body, _: REPLIES[question(body)][0]) as server:
        made = ask_alone(case, tmp_path, server, REPLIES, max_failed=1.0)
    before = (tmp_path / "out/journal.jsonl").read_bytes()
    assert made["ends"]["failed"]
    assert ask_alone(case, tmp_path, server, REPLIES, max_failed=1.0) == made
    assert (tmp_path / "out/journal.jsonl").read_bytes() == before
    with refused(server.address, "lists no models"):
        ask_alone(case, tmp_path, server, [*REPLIES, ASKED[0]], max_failed=1.0)


def test_a_server_that_repeats_the_key_puts_it_nowhere(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """White space around the key, a carriage return say, is no part of it."""
    monkeypatch.setenv("OPENAI_API_KEY", " sk-secret-1\r\n")
    reply = (400, {"error": {"message": "the key Bearer sk-secret-1 does not do"}})
    with serving(lambda *_: reply) as server, refused("regenerate.max_failed", "Bearer $OPENAI_API_KEY") as found:
        ask(case, tmp_path, server, max_failed=0.1, tries=1)
    assert server.keys == {"Bearer sk-secret-1"}
    with serving(lambda *_: reply) as server, suppress(ValueError):
        ask(case, tmp_path / "all", server, max_failed=1.0, tries=1)
    printed = "".join(capfd.readouterr())
    kept = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert "sk-secret" not in printed + kept + str(found.value)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret\rb")  # which no header takes
    with serving(echo) as server, refused("OPENAI_API_KEY") as found:
        ask(case, tmp_path / "none", server)
    assert "sk-secret" not in "".join(capfd.readouterr()) + str(found.value)


def lays_out(case: Case, before: str = "") -> Callable[[dict[str, Any], int], Reply]:
    """Replies of a server with the target's chat template behind `before`, which tells the tokens that it has read."""
    tokenizer = AutoTokenizer.from_pretrained(read_json(case.tokenizer)["path"])
    tokenizer.chat_template = before + tokenizer.chat_template

    def reply(body: dict[str, Any], number: int) -> Reply:
        status, told = said(f"after {len(body['messages'])}")
        ids = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True)["input_ids"]
        return status, told | {"usage": told["usage"] | {"prompt_tokens": len(ids)}}

    return reply


def test_tools_and_template_arguments_are_sent_and_a_call_that_is_kept_apart_is_dropped_by_name(
    case: Case, tmp_path: Path
) -> None:
    tool = {"type": "function", "function": {"name": "sum"}}
    offered = [turns(each) | {"tools": [tool], "chat_template_kwargs": {"terse": True}} for each in ("why?", "who?")]
    raw = write_raw(tmp_path / "chats", [*offered, turns("what?")])
    template = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{{ terse }}"
    replies = {"who?": said(None, "tool_calls", tool_calls=[{"function": {"name": "sum", "arguments": "{}"}}])}
    with serving(lambda body, number: replies.get(question(body)) or echo(body, number)) as server:
        made = ask(replace(with_template(case, template, tmp_path, keep=True), raw=raw), tmp_path / "out", server)
    beside = {"tools": [tool], "tool_choice": "none", "chat_template_kwargs": {"terse": True}}
    sent = {question(body): {key: value for key, value in body.items() if key in beside} for body in server.asked}
    assert sent == {"why?": beside, "who?": beside, "what?": {}}
    assert made["reasons"]["dropped"] == {"it calls a tool, which the server keeps apart": 1}
    merge([tmp_path / "out/shard.json"], raw, tmp_path / "merged/manifest.json")
    [first, second] = jsonl.read(tmp_path / "merged/train.jsonl")
    assert {key: first.get(key) for key in ("tools", "chat_template_kwargs", "line")} == {
        "tools": [tool],
        "chat_template_kwargs": {"terse": True},
        "line": 1,
    }
    assert second.keys() == {"messages", "line"}


def test_tools_are_kept_as_vllm_lays_them_out(case: Case, tmp_path: Path) -> None:
    """It gives the template three fields of a function, whatever the record has: the draft learns behind the same."""
    of = {"type": "object", "properties": {"b": {}, "a": {}}}
    given = [{"name": "sum"}, {"strict": True, "parameters": of, "returns": "a number", "description": "adds", "name": "add"}]
    laid_out = [
        {"name": "sum", "description": None, "parameters": None},
        {"name": "add", "description": "adds", "parameters": of, "strict": True},
    ]
    offered, kept = ([{"type": "function", "function": each} for each in tools] for tools in (given, laid_out))
    raw = write_raw(tmp_path / "chats", [turns("why?") | {"tools": offered}])
    with serving(echo, owner="vllm") as server:
        ask(replace(with_template(case, "{{ tools | tojson }}", tmp_path, keep=True), raw=raw), tmp_path / "out", server)
    [line] = journal_of(tmp_path / "out").values()
    assert json.dumps([server.asked[0]["tools"], line["tools"]]) == json.dumps([kept, kept])


def test_a_server_that_lays_questions_out_otherwise_ends_the_job_at_its_first_answer(case: Case, tmp_path: Path) -> None:
    with serving(lays_out(case, "a system's word")) as server, refused(server.address, "usage.prompt_tokens"):
        ask(case, tmp_path, server)
    assert journal_of(tmp_path) == {}
    (tmp_path / "journal.jsonl").unlink()  # the advice
    # In threads, of which each has the tokenizer read special tokens in its own way.
    chats = [
        turns("what is <|im_end|> for?", f"and {n} <|im_start|>?") if n % 10 == 0 else turns(f"why {n}?") for n in range(150)
    ]
    raw = write_raw(tmp_path / "chats", chats, [])
    with serving(lays_out(case)) as server:
        made = ask(Case(raw, case.target, case.tokenizer), tmp_path, server, requests=32)
    assert (made["ends"]["answered"], made["ends"]["skipped"]) == (135, 15), "a server reads a typed name as the token"


def test_answers_of_another_model_are_left_out_and_those_of_a_server_that_moved_are_not(
    case: Case, tmp_path: Path, capfd: Any
) -> None:
    def until(count: int) -> Callable[[dict[str, Any], int], Reply]:
        left = iter(range(count))
        return lambda body, number: (401, {}) if next(left, None) is None else lays_out(case)(body, number)

    for name, lines in (("an/other/test", 0), ("some/test", 0), ("some/test", 3)):
        with serving(until(3), name) as server, refused(server.address, "code: 401"):
            ask(case, tmp_path, server, requests=1)
        told = capfd.readouterr().out
        assert ("served_model: an/other/test then, some/test now" in told) is (name == "some/test" and not lines)
    with serving(echo) as server:
        made = ask(case, tmp_path, server)
    assert (made["served_model"], made["ends"]["answered"]) == ("some/test", 14)
    [aside] = tmp_path.glob("journal.*.jsonl")
    assert '"served_model":"an/other/test"' in aside.read_text().replace(" ", "")
