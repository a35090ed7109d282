"""What is made of the streams, counters and steps of llama.cpp and OpenVINO: rounds, the text that is measured, refusals.

The engines themselves are asked in test_llama_cpp.py and test_openvino.py.
"""

import io
import json
import operator
from pathlib import Path
from typing import Any

import pytest

from longspec.measure.engines import llama_cpp, openvino, openvino_ir
from longspec.measure.engines.llama_cpp import Engine, Event, rounds_of
from longspec.measure.engines.openvino import rounds_within
from longspec.measure.engines.protocol import Job, Request, within
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
    """One chain more than wanted is asked for, and a token that was not streamed again; at the third, none is streamed."""
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


def job(target: Path, draft: Path | None, scratch: Path) -> Job:
    return Job(str(target), "eagle3", None if draft is None else str(draft), 3, "float32", 64, 1, [REQUEST], str(scratch))


@pytest.mark.parametrize(
    ("sizes", "length", "rounds"),
    [
        ([1, 4, 2, 1, 4], 8, [3, 1, 0]),  # the round behind the text is none of it
        ([1, 4, 2, 1, 4], 6, [3, 1]),  # the last round is told uncut
        ([1, 4], 1, []),  # a text that ends with the prompt's step
    ],
)
def test_the_rounds_are_those_that_reach_a_texts_end(sizes: list[int], length: int, rounds: list[int]) -> None:
    assert rounds_within(sizes, length) == rounds


@pytest.mark.parametrize("sizes", [[1, 4], [2, 4, 4], []])
def test_steps_that_are_not_of_the_text_are_refused(sizes: list[int]) -> None:
    with refused("OpenVINO", f"{sizes} tokens", "of 6", "serve/openvino.txt"):
        rounds_within(sizes, 6)


def test_files_in_openvinos_format_are_loaded_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("target", "draft", "export"):
        (tmp_path / name).mkdir()
    for name in ("target", "draft"):
        (tmp_path / name / openvino_ir.MODEL).touch()
    target, draft, scratch = tmp_path / "target", tmp_path / "draft", tmp_path / "scratch"
    assert openvino._converted(job(target, draft, scratch)) == (target, draft)
    assert openvino._converted(job(target, None, scratch)) == (target, None)
    with refused(target, "OpenVINO", tmp_path / "export", "give both"):
        openvino._converted(job(target, tmp_path / "export", scratch))
    assert not scratch.exists()
    monkeypatch.setattr(openvino, "CONVERTER", "json.tool")  # stands in for one that ends with its reason
    with refused("evaluation.engine: openvino", "No such file"):
        openvino._converted(job(target / "none", None, scratch))


def test_a_draft_folder_that_is_not_of_this_layout_is_refused(tmp_path: Path) -> None:
    """Its layers are not known then, and OpenVINO would take others."""
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    with refused(f"{tmp_path}: config.json", "hidden_layers_list", "`longspec export DRAFT --layout openvino`"):
        openvino_ir.layers_of(tmp_path)
