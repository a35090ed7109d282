"""Prompts from files: the benchmarks' own layouts, what is cut, and what is wrong told by file, line and field."""

import json
from pathlib import Path
from typing import Any

import pytest

from longspec.data import presets
from longspec.data.tokenize import load
from longspec.evaluate import tasks
from longspec.evaluate.benchmark import ROOM, read_prompts
from longspec.evaluate.prompt_files import read_records
from tests.corpus import Corpus
from tests.terminal import control_characters

CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
ASKED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
LONG = {"context": "C", "input": "I", "answers": ["A", "B"], "length": 3, "all_classes": None, "_id": "0"}
# A record of each published file, and the prompt that the benchmark makes of it.
PUBLISHED: dict[str, tuple[dict[str, Any], str, str, int]] = {
    "gsm8k": ({"question": "Q {x}", "answer": "A"}, f"[user]Q {{x}}{ASKED}[assistant]", "A", 9),
    "math": ({"problem": "P", "solution": "S", "answer": "4"}, f"[user]P{ASKED}[assistant]", "S", 9),
    "gov-report": (
        LONG,
        "[user]You are given a report by a government agency. Write a one-page summary of the report.\n\nReport:\nC\n\n"
        "Now, write a one-page summary of the report.\n\nSummary:[assistant]",
        "A",
        512,
    ),
    "qmsum": (
        LONG,
        "[user]You are given a meeting transcript and a query containing a question or instruction. Answer the query in one or "
        "more sentences.\n\nTranscript:\nC\n\nNow, answer the query based on the above meeting transcript in one or more "
        "sentences.\n\nQuery: I\nAnswer:[assistant]",
        "A",
        512,
    ),
    "multi-news": (
        LONG,
        "[user]You are given several news passages. Write a one-page summary of all news. \n\nNews:\nC\n\nNow, write a "
        "one-page summary of all the news.\n\nSummary:[assistant]",
        "A",
        512,
    ),
    "lcc": (LONG, "Please complete the code given below. \nCNext line of code:\n", "A", 64),
    "repobench-p": (LONG, "Please complete the code given below. \nCINext line of code:\n", "A", 64),
}


@pytest.fixture
def tokenizer(corpus: Corpus) -> Any:
    loaded = load(corpus.tokenizer)[0]
    loaded.chat_template = CHAT
    return loaded


def prompts_of(folder: Path, tokenizer: Any, records: list[Any], positions: int = 4096, count: int = 3, **keys: Any) -> Any:
    """The prompts of a task whose file holds these records; text stands in it as it is."""
    path = folder / "in.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in records))
    settings = presets.expand("t", {"source": str(path)} | keys, presets.TASK)
    task = tasks.task_of("t", settings, 9)
    assert isinstance(task, tasks.Benchmark)
    return read_prompts("t", task, count, tokenizer, seed=0, positions=positions)


def test_every_preset_is_tested() -> None:
    assert {path.stem for path in presets.TASK.folder.glob("*.yaml")} == PUBLISHED.keys()


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_lays_a_published_record_out(tmp_path: Path, tokenizer: Any, preset: str) -> None:
    record, text, reference, new_tokens = PUBLISHED[preset]
    [prompt] = prompts_of(tmp_path, tokenizer, [record], preset=preset)
    assert tokenizer.decode(prompt.ids) == text
    assert (prompt.reference, prompt.new_tokens, prompt.cut_tokens, prompt.record) == (reference, new_tokens, 0, 0)


def test_plain_records_need_no_preset(tmp_path: Path, tokenizer: Any) -> None:
    made = prompts_of(tmp_path, tokenizer, [{"prompt": "a"}, {"prompt": "b", "reference": "r"}], chat=False)
    assert [(tokenizer.decode(prompt.ids), prompt.reference) for prompt in made] == [("a", None), ("b", "r")]


def test_prompts_are_drawn_without_repetition(tmp_path: Path, tokenizer: Any) -> None:
    records = [{"prompt": f"number {n}"} for n in range(50)]
    made = prompts_of(tmp_path, tokenizer, records, count=20, chat=False)
    numbers = [prompt.record for prompt in made]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 20
    assert numbers != list(range(20))
    assert [tokenizer.decode(prompt.ids) for prompt in made] == [f"number {n}" for n in numbers]


@pytest.mark.parametrize(("positions", "longest"), [(4096, 30), (ROOM + 9 + 1 + 30, 0)])
def test_a_long_prompt_loses_its_middle(tmp_path: Path, tokenizer: Any, positions: int, longest: int) -> None:
    """By the task's own limit, or by the target's positions, of which the answer and some room are kept free."""
    text = "the red fox meets the lazy dog. " * 40
    [prompt] = prompts_of(tmp_path, tokenizer, [{"prompt": text}], positions, chat=False, longest=longest)
    whole = tokenizer(text)["input_ids"]
    assert prompt.cut_tokens == len(whole) - 30
    assert tokenizer.decode(prompt.ids) == tokenizer.decode(whole[:15]) + tokenizer.decode(whole[-15:])


def test_the_names_of_special_tokens_stay_text(tmp_path: Path, tokenizer: Any) -> None:
    name = tokenizer.eos_token
    [prompt] = prompts_of(tmp_path, tokenizer, [{"prompt": f"what is {name}?"}])
    assert tokenizer.eos_token_id not in prompt.ids
    assert tokenizer.decode(prompt.ids) == f"[user]what is {name}?[assistant]"


@pytest.mark.parametrize(
    ("records", "keys", "message"),
    [
        ([{"prompt": "a"}, "{no json"], {}, r"in\.jsonl: line 2: line: is not valid JSON"),
        (
            [{"prompt": "a"}, {"prompts": "b"}],
            {},
            r"in\.jsonl: line 2: prompt: is missing or null; correct it, or evaluation\.tasks\.t",
        ),
        ([{"prompt": " "}], {}, r"in\.jsonl: line 1: prompt: is empty"),
        ([{"prompt": "a", "reference": 4}], {}, r"in\.jsonl: line 1: reference: must be text, is int"),
        ([LONG | {"context": None}], {"preset": "lcc"}, r"in\.jsonl: line 1: context: is missing or null"),
        ([], {}, r"in\.jsonl: holds no record, but evaluation\.tasks\.t needs prompts"),
        ([{"prompt": "a"}], {"new_tokens": 5000}, r"evaluation\.tasks\.t\.new_tokens: 5000 leave no room for a prompt"),
    ],
)
def test_what_makes_no_prompt_is_named(tmp_path: Path, tokenizer: Any, records: Any, keys: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prompts_of(tmp_path, tokenizer, records, **keys)


def test_the_name_of_a_file_of_prompts_stays_in_its_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a\x1b[2J\n\x9b\u202e.jsonl"
    path.write_bytes(b'{"x": "q"}\r\n')
    assert len(list(read_records([path]))) == 1
    said = capfd.readouterr().out
    assert control_characters(said.encode()) == []
    assert said.count("\n") == 1
    assert "a␛[2J␊<U+009B><U+202E>.jsonl: 1 x the line ends in CRLF" in said
