"""Answers through a server that fails, stalls, limits the rate, cuts answers and says nonsense."""

import re
import threading
import time
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


@pytest.mark.parametrize(
    "fault",
    [
        (429, {"error": {"message": "slow down"}}),
        (500, b"oops"),
        (503, b""),
        (200, b'{"choices": [{"mess'),
        (200, b""),
    ],
)
def test_what_passes_is_tried_again(case: Case, tmp_path: Path, fault: Reply) -> None:
    with serving(lambda body, number: fault if number < 2 else echo(body, number)) as server:
        made = ask(case, tmp_path, server)
    assert made["ends"]["answered"] == 14
    assert set(server.seen.values()) >= {3}


def test_a_server_says_how_long_it_wants_to_be_left_alone(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAUSE", 1e6)
    with serving(lambda body, number: (429, b"") if number == 0 else echo(body, number)) as server:
        server.retry_after = "0"
        assert ask(case, tmp_path, server)["ends"]["answered"] == 14


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
    assert kept["reasons"]["failed"] == {"finish_reason 'content_filter'": 1}
    assert [message["content"] for message in journal_of(tmp_path / "keep")["train", 6]["messages"]][2:] == ["why?", "torn"]
    assert len(journal_of(tmp_path / "drop")["train", 6]["messages"]) == 2


def test_too_many_failures_end_the_job_with_their_reasons_and_the_next_one_asks_for_these_alone(
    case: Case, tmp_path: Path
) -> None:
    def refuse(body: dict[str, Any], number: int) -> Reply:
        bad = question(body) == "why?"
        return (400, {"error": {"message": f"no {len(body['messages'])} whys"}}) if bad else echo(body, number)

    told = r"of 14 records failed, more than the share 0\.1 .*: \d x HTTP N: no N whys; what is answered stays"
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
    with pytest.raises(ValueError, match=rf"{re.escape(address)}: does not answer: .*\(2 tries\)"):
        case.make(tmp_path, engine="endpoint", endpoint=address, tries=2)


def test_the_key_goes_to_no_other_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with serving(echo) as other, serving(echo) as server:
        server.location = f"{other.address}/models"
        settings = Regenerate(new_tokens=4, engine="endpoint", endpoint=server.address)
        with pytest.raises(ValueError, match=r"does not answer: HTTP 302"):
            client.Client(server.address, settings).find_model()
        assert (server.keys, other.keys) == ({"Bearer secret"}, set())
