"""What is made of llama.cpp's stream and counters: its rounds, the text that is measured, and what it is refused for."""

import io
import json
import operator
from typing import Any

import pytest

from longspec.measure.engines import llama_cpp
from longspec.measure.engines.llama_cpp import Engine, Event, rounds_of
from longspec.measure.engines.protocol import Request, within
from tests.refusals import refused

REQUEST = Request("a", [3, 4], 6, 0.0, 0, [0], 0)


def events(kept: list[int], chain: int, silent: tuple[int, ...] = ()) -> list[Event]:
    """The stream of rounds that kept so many drafts each; nothing is said at the `silent` tokens of the text."""
    said, tokens, total = [Event(1, 0, 0, 0.0)], 1, 0
    for number, count in enumerate(kept, start=1):
        total += count
        for _ in range(count + 1):
            tokens += 1
            said.append(Event(tokens, number * chain, total, tokens / 10))
    return [event for event in said if event.tokens not in silent]


def by_place(kept: list[int], chain: int) -> list[int]:
    return [sum(count > place for count in kept) for place in range(chain)]


@pytest.mark.parametrize(
    ("kept", "silent"),
    [
        ([2, 0, 4, 1], ()),
        ([2, 0, 4, 1], (3, 5, 6, 7)),
        ([0, 3, 0], (1, 2)),
        ([1, 3, 0], (2, 3, 4)),  # the counters tell it from [3, 1, 0]'s places alone where these differ
        ([0, 0, 0], (2, 3)),
        ([], ()),
    ],
)
def test_rounds_are_read_where_the_stream_is_silent_too(kept: list[int], silent: tuple[int, ...]) -> None:
    """Places, sums and number are those of the rounds; within one silence their order may be another."""
    found = rounds_of(events(kept, 4, silent), 4, by_place(kept, 4))
    assert (sorted(found), by_place(found, 4)) == (sorted(kept), by_place(kept, 4))
    assert silent or found == kept


def test_two_ways_to_read_a_silence_are_told_apart_by_the_counters() -> None:
    """Two rounds kept two drafts together."""
    for kept in ([2, 0], [1, 1]):
        assert sorted(rounds_of(events([*kept, 1], 4, (2, 3, 4)), 4, by_place([*kept, 1], 4))) == sorted([*kept, 1])
    with refused("llama.cpp", "counted [3, 0, 0, 1]", "its stream"):
        rounds_of(events([2, 0, 1], 4, (2, 3, 4)), 4, [3, 0, 0, 1])


def test_rounds_that_drafted_nothing_or_less_are_rounds() -> None:
    """As at the end of a text, and of prompt lookup."""
    said = [Event(1, 0, 0, 0.0), Event(2, 0, 0, 0.1), Event(3, 2, 1, 0.2), Event(4, 2, 1, 0.2), Event(5, 2, 1, 0.3)]
    assert rounds_of(said, 4, [1, 0, 0, 0]) == [0, 1, 0]


def test_a_text_is_cut_and_the_round_that_reaches_its_end_is_whole() -> None:
    assert [within([2, 0, 4, 1], length) for length in (6, 4)] == [[2, 0, 4], [2]]
    assert within([2], 1) == []


def test_an_answer_is_the_engines_text_up_to_its_end_with_the_rounds_of_its_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """One chain more than is wanted is asked for; the token that was not streamed is asked for again.

    The server has eight tokens, two of each round kept; nothing is streamed at the third.
    """
    asked: list[dict[str, Any]] = []
    text = [11, 12, 13, 14, 15, 16, 17, 0, 18, 19]

    def reply(_: Engine, verb: str, path: str, body: dict[str, Any] | None) -> io.BytesIO:
        if body is None:
            name = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"
            streams = sum(bool(each.get("stream")) for each in asked)
            lines = [f'{name}{{position="{place}"}} {3 * streams}' for place in range(2)]
        elif body.get("stream"):
            times = [{"predicted_n": each.tokens, "predicted_ms": 1000 * each.seconds} for each in said]
            drafts = [{"draft_n": each.drafted, "draft_n_accepted": each.kept} if each.drafted else {} for each in said]
            whole = zip(text, map(operator.or_, times, drafts), strict=True)
            lines = [f"data: {json.dumps({'tokens': [token], 'timings': each})}" for token, each in whole]
            del lines[2]
        else:
            likely = [{"id": token, "top_logprobs": [{"id": token, "logprob": -0.5}]} for token in text if token != 13]
            lines = [json.dumps({"tokens": text, "completion_probabilities": likely})]
        asked.append(body or {})
        return io.BytesIO("\n".join(lines).encode())

    said = events([2, 2, 2], 2)
    monkeypatch.setattr(llama_cpp, "_asked", reply)
    found = llama_cpp.answer(Engine(None, 2), REQUEST, 2)
    assert (found.tokens, found.accepted, found.seconds) == ([11, 12, 13, 14, 15, 16], [2, 2], [0.6, 0.6])
    bodies = [body for body in asked if body]
    assert [body.get("stream", False) for body in bodies] == [True, True, False]
    assert {(body["n_predict"], body["temperature"], body["cache_prompt"]) for body in bodies} == {(8, 0, False)}
    ended = llama_cpp.answer(Engine(None, 2), Request("b", [3], 10, 0.0, 0, [0], 1), 1)
    assert (ended.tokens[-1], ended.accepted) == (0, [2, 2, 2])
    assert ended.best[2:4] == [[(13, 0.0)], [(14, -0.5)]]
