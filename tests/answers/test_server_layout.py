"""What a server is sent, and whether it reads that as the target would: prompts, tools, the name of what it serves."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from longspec import jsonl
from longspec.answers.merge import merge
from longspec.atomic_files import read_json
from tests.answers.chat_server import Reply, echo, question, said, serving
from tests.answers.conftest import Case, ask, journal_of, turns, with_template
from tests.corpus import write_raw
from tests.refusals import refused


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
