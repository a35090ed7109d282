"""Answers through a server that fails, stalls, limits the rate, cuts answers and says nonsense."""

import json
import re
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from longspec import jsonl
from longspec.answers import client
from longspec.answers.settings import Regenerate
from tests.answers.chat_server import Reply, ask, echo, question, said, serving
from tests.answers.conftest import ASKED, Case, journal_of, turns, write_chats


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
    assert told == [{"model": "the-target", "max_tokens": 12, "temperature": 0.25, "top_p": 0.5}] * len(told)
    assert len({body["seed"] for body in server.asked}) == len(server.asked) == made["answers"]
    assert server.keys == {"Bearer a-secret"}
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and "a-secret" in path.read_text()]


def test_many_requests_are_under_way_at_once(case: Case, tmp_path: Path) -> None:
    together = threading.Barrier(4)

    def wait(body: dict[str, Any], number: int) -> Reply:
        if len(body["messages"]) == 1 and question(body) in ASKED[:4]:
            together.wait(20)
        return echo(body, number)

    raw = write_chats(tmp_path / "chats", [turns(each) for each in ASKED[:4]], [])
    with serving(wait) as server:
        ask(Case(raw, case.target, case.tokenizer), tmp_path / "out", server)
    assert server.most == 4


def test_what_passes_is_tried_again(case: Case, tmp_path: Path) -> None:
    faults: list[Reply] = [(429, {"error": {"message": "slow down"}}), (503, b"")]
    with serving(lambda body, number: faults[number] if number < 2 else echo(body, number)) as server:
        made = ask(case, tmp_path, server)
    assert made["ends"]["answered"] == 14
    assert set(server.seen.values()) >= {3}


def test_a_stalled_request_is_tried_again(case: Case, tmp_path: Path) -> None:
    def stall(body: dict[str, Any], number: int) -> Reply:
        if question(body) == "why?" and number == 0:
            time.sleep(1.5)
        return echo(body, number)

    with serving(stall) as server:
        assert ask(case, tmp_path, server, timeout=0.4)["ends"]["answered"] == 14


def test_cut_empty_and_foreign_answers_are_told_apart(case: Case, tmp_path: Path) -> None:
    replies = {"why?": said("torn", "length"), "the cat": said(" "), "a bird": said("x", "content_filter")}

    def reply(body: dict[str, Any], number: int) -> Reply:
        return replies.get(question(body)) or echo(body, number)

    raw = write_chats(tmp_path / "chats", [*map(turns, ASKED), turns(ASKED[0], "why?", "and?")], [])
    odd = Case(raw, case.target, case.tokenizer)
    with serving(reply) as server:
        kept = ask(odd, tmp_path / "keep", server, max_failed=0.5)
        dropped = ask(odd, tmp_path / "drop", server, max_failed=0.5, cut="drop")
    assert kept["ends"] == {"answered": 2, "shortened": 0, "cut": 2, "dropped": 1, "skipped": 0, "failed": 1}
    assert dropped["ends"] == {"answered": 2, "shortened": 1, "cut": 0, "dropped": 2, "skipped": 0, "failed": 1}
    assert kept["reasons"]["failed"] == {f"{server.address}: finish_reason 'content_filter'": 1}
    assert [message["content"] for message in journal_of(tmp_path / "keep")["train", 6]["messages"]][2:] == ["why?", "torn"]
    assert len(journal_of(tmp_path / "drop")["train", 6]["messages"]) == 2


def test_too_many_failures_end_the_job_with_their_reasons_and_the_next_one_asks_for_these_alone(
    case: Case, tmp_path: Path
) -> None:
    def refuse(body: dict[str, Any], number: int) -> Reply:
        bad = question(body) == "why?"
        return (400, {"error": {"message": f"no {len(body['messages'])} whys"}}) if bad else echo(body, number)

    told = r"of 14 records failed, more than the share 0\.1 .*: \d x \S+/v1: HTTP N: no N whys; what is answered stays"
    with serving(refuse) as server, pytest.raises(ValueError, match=told):
        ask(case, tmp_path, server, max_failed=0.1)
    done = journal_of(tmp_path)
    assert not (tmp_path / "shard.json").exists()
    with serving(echo) as server:
        assert ask(case, tmp_path, server)["ends"]["answered"] == 14
    assert {key: journal_of(tmp_path)[key] for key in done} == done
    assert sum(len(body["messages"]) == 1 for body in server.asked) == 14 - len(done)


def test_what_fails_all_requests_ends_the_job_at_once(case: Case, tmp_path: Path) -> None:
    told = r"/v1/chat/completions: HTTP 401: no key; .* or set OPENAI_API_KEY"
    with serving(lambda *_: (401, {"message": "no key"})) as server, pytest.raises(ValueError, match=told):
        ask(case, tmp_path, server, max_failed=1.0)
    assert len(server.asked) <= 12


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_a_thought_that_the_server_keeps_apart_is_the_answers_thought(case: Case, tmp_path: Path, field: str) -> None:
    raw = write_chats(tmp_path / "chats", [turns("why?"), turns("who?")], [])
    replies = {"why?": said("x", **{field: "hm"}), "who?": said(None, "length", **{field: "h"})}
    with serving(lambda body, _: replies[question(body)]) as server:
        made = ask(Case(raw, case.target, case.tokenizer), tmp_path / "out", server)
    [_, answer] = journal_of(tmp_path / "out")["train", 1]["messages"]
    assert answer == {"role": "assistant", "content": "x", "reasoning_content": "hm"}
    assert made["reasons"]["dropped"] == {"ends inside its thought, behind which a template lays out no answer": 1}


def test_a_server_that_is_not_there_or_serves_another_model_is_named(case: Case, tmp_path: Path) -> None:
    with serving(echo) as server:
        address = server.address
        with pytest.raises(ValueError, match=r"serves the-target; set regenerate\.served_model"):
            ask(case, tmp_path, server, served_model="other")
    with pytest.raises(ValueError, match=rf"{re.escape(address)}: lists no models: .*\(2 tries\)"):
        case.make(tmp_path, engine="endpoint", endpoint=address, tries=2)


def test_the_key_goes_to_no_other_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with serving(echo) as other, serving(echo) as server:
        server.location = f"{other.address}/models"
        settings = Regenerate(new_tokens=4, engine="endpoint", endpoint=server.address)
        with pytest.raises(ValueError, match=r"lists no models: HTTP 302"):
            client.Client(server.address, settings).find_model()
        assert (server.keys, other.keys) == ({"Bearer secret"}, set())


@pytest.mark.parametrize(
    ("reply", "place"),
    [
        (b'{"choices": [{"mess', "all of it"),
        (json.dumps(said("x")[1] | {"usage": {"completion_tokens": "x"}}).encode(), "usage.completion_tokens"),
        (json.dumps(said("x", reasoning_content={"a": 1})[1]).encode(), "choices.0.message.reasoning_content"),
        (b'{"choices": []}', "choices.0.finish_reason"),
    ],
)
def test_a_bad_reply_fails_its_record_alone(case: Case, tmp_path: Path, reply: bytes, place: str) -> None:
    def some(body: dict[str, Any], number: int) -> Reply:
        return (200, reply) if question(body) == "why?" else echo(body, number)

    raw = write_chats(tmp_path / "chats", [turns("why?"), turns("who?")], [])
    with serving(some) as server:
        made = ask(Case(raw, case.target, case.tokenizer), tmp_path / "out", server, max_failed=0.5)
    assert (made["ends"]["answered"], made["ends"]["failed"]) == (1, 1)
    (told,) = made["reasons"]["failed"]
    assert told.startswith(f"{server.address}: the reply to chat/completions: {place.replace('0', 'N')}: ")


def test_a_special_token_in_a_servers_text_drops_the_answer(case: Case, tmp_path: Path) -> None:
    raw = write_chats(tmp_path / "chats", [turns("why?"), turns("who?"), turns("what?")], [])
    replies = {"why?": said("so<|im_end|>"), "who?": said("x", reasoning_content="<|im_end|>"), "what?": said("fine")}
    with serving(lambda body, _: replies[question(body)]) as server:
        made = ask(Case(raw, case.target, case.tokenizer), tmp_path / "out", server)
    assert made["reasons"]["dropped"] == {"the answer holds the special token <|im_end|>": 2}


def test_a_server_that_repeats_the_key_puts_it_nowhere(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """White space around the key, a carriage return say, is no part of it."""
    monkeypatch.setenv("OPENAI_API_KEY", " sk-secret-1\r\n")
    reply = (400, {"error": {"message": "the key Bearer sk-secret-1 does not do"}})
    with serving(lambda *_: reply) as server, pytest.raises(ValueError, match="Bearer \\$OPENAI_API_KEY does not do") as found:
        ask(case, tmp_path, server, max_failed=0.1, tries=1)
    assert server.keys == {"Bearer sk-secret-1"}
    with serving(lambda *_: reply) as server, suppress(ValueError):
        ask(case, tmp_path / "all", server, max_failed=1.0, tries=1)
    printed = "".join(capfd.readouterr())
    kept = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert "sk-secret" not in printed + kept + str(found.value)


def test_a_proxy_that_cannot_be_used_is_named_and_is_none_of_an_own_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    settings = Regenerate(new_tokens=4, engine="endpoint")
    with pytest.raises(ValueError, match="ALL_PROXY"):
        client.Client("http://127.0.0.1:9/v1", settings)
    client.Client("http://127.0.0.1:9/v1", settings, own=True)


def test_a_key_that_no_header_takes_is_refused_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-a\rb")
    with pytest.raises(ValueError, match="OPENAI_API_KEY: holds white space or a character outside ASCII") as found:
        client.Client("http://127.0.0.1:9/v1", Regenerate(new_tokens=4, engine="endpoint"))
    assert "sk-a" not in str(found.value)
