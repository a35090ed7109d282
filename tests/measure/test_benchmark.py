"""Prompts from files: the benchmarks' own layouts, what is cut, and what is wrong told by file, line and field."""

import json
import re
import zipfile
from pathlib import Path
from shlex import quote
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longspec.atomic_files import describe_files, files_below, write_json
from longspec.data import presets
from longspec.data.chat.encoding import load_tokenizer
from longspec.data.hub import parse
from longspec.measure import tasks
from longspec.measure.prompt_files import manifest_of, read_records
from longspec.measure.prompts import read_prompts
from tests.corpus import Corpus
from tests.refusals import refused

CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
ASKED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
LONG = {"context": "C", "input": "I", "answers": ["A", "B"], "length": 3, "all_classes": None, "_id": "0"}
# A record of a published file of each kind, and the prompt that the benchmark makes of it.
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
    "lcc": (LONG, "Please complete the code given below. \nCNext line of code:\n", "A", 64),
}


@pytest.fixture
def tokenizer(corpus: Corpus) -> Any:
    loaded = load_tokenizer(corpus.tokenizer)[0]
    loaded.chat_template = CHAT
    return loaded


def prompts_of(folder: Path, tokenizer: Any, records: list[Any], positions: int = 4096, count: int = 3, **keys: Any) -> Any:
    """The prompts of a task whose file holds these records; text stands in it as it is."""
    path = folder / "in.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in records))
    settings = presets.expand("t", {"source": str(path)} | keys, presets.TASK)
    task = tasks.task_of("t", settings, 9)
    return read_prompts("t", task, count, tokenizer, seed=0, positions=positions)


def place(preset: str, records: list[dict[str, Any]]) -> tuple[tasks.Benchmark, Path]:
    """A preset's task, and the file of these records that stands in for what is fetched, in the format of its name."""
    task = tasks.task_of("t", presets.expand("t", {"preset": preset}, presets.TASK), 9)
    manifest = manifest_of(task)
    path = manifest.parent / "files" / parse(str(task.source)).file.replace("*", "00000-of-00001")
    path.parent.mkdir(parents=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    elif task.member:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(task.member, lines)
    else:
        path.write_text(lines)
    return task, path


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_names_its_files_on_the_hub(
    tmp_path: Path, tokenizer: Any, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `fetch` leaves them; a commit is named, and the bytes are pinned."""
    monkeypatch.chdir(tmp_path)
    record, text, reference, new_tokens = PUBLISHED[preset]
    task, path = place(preset, [record, record])
    manifest = manifest_of(task)
    assert re.fullmatch(r"[0-9a-f]{40}", task.revision)
    with refused(
        "evaluation.tasks.t.source", f"fetch --source {quote(task.source)} --revision {task.revision} --out data/hub/"
    ):
        read_prompts("t", task, 1, tokenizer, seed=0, positions=4096)
    files = describe_files(manifest.parent, [f"files/{name}" for name in files_below(manifest.parent / "files")])
    write_json(manifest, {"source": task.source, "revision": task.revision, "files": files})
    made = read_prompts("t", task, 2, tokenizer, seed=0, positions=4096)
    assert [(tokenizer.decode(prompt.ids), prompt.reference, prompt.new_tokens) for prompt in made] == [
        (text, reference, new_tokens)
    ] * 2
    path.write_bytes(path.read_bytes() + b"\n")
    with refused(path, f"{path.stat().st_size} bytes", manifest):
        read_prompts("t", task, 1, tokenizer, seed=0, positions=4096)


def test_a_copy_on_this_machine_takes_the_place_of_a_presets_source() -> None:
    task = tasks.task_of("t", presets.expand("t", {"preset": "lcc", "source": "in.jsonl"}, presets.TASK), 9)
    assert (task.source, task.revision, task.member, manifest_of(task)) == ("in.jsonl", None, "", None)


@pytest.mark.parametrize(
    ("keys", "key", "fact"),
    [
        ({"source": "hf:o"}, "source", "'hf:o'"),
        ({"source": "hf:o/n/a.zip"}, "member: ''", ".zip"),
        ({"source": "hf:o/n/a.jsonl", "member": "b"}, "member: 'b'", ".zip"),
        ({"source": "in.jsonl", "revision": "v1"}, "revision: unknown", "a file; known: source"),
        ({"source": "hf:o/n", "lenght": 3}, "lenght: unknown", "hub; known: source"),
    ],
)
def test_a_source_that_cannot_be_meant_is_refused(keys: Any, key: str, fact: str) -> None:
    with refused(f"evaluation.tasks.t.{key}", fact):
        tasks.task_of("t", keys, 9)


def test_a_file_of_an_archive_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data/a.jsonl", '{"x": 1}\n{no json}\n')
    read = read_records(path, "data/a.jsonl")
    assert next(read) == (f"{path}/data/a.jsonl: line 1", {"x": 1})
    with refused(f"{path}/data/a.jsonl: line 2: line", "JSON"):
        next(read)
    with refused(path, "data/b.jsonl", "`member`"):
        next(read_records(path, "data/b.jsonl"))


def test_prompts_are_drawn_without_repetition(tmp_path: Path, tokenizer: Any) -> None:
    records = [{"prompt": f"number {n}"} for n in range(50)]
    made = prompts_of(tmp_path, tokenizer, records, count=20, chat=False)
    numbers = [prompt.record for prompt in made]
    assert len(set(numbers)) == len(numbers) == 20
    assert sorted(numbers) != list(range(20))
    assert prompts_of(tmp_path, tokenizer, records, count=9, chat=False) == made[:9]  # more prompts keep the first ones' lines
    assert [tokenizer.decode(prompt.ids) for prompt in made] == [f"number {n}" for n in numbers]


def test_tasks_of_one_file_are_of_the_same_texts() -> None:
    """Which count once in intervals; a member of an archive is a file of its own."""
    settings = [{"preset": "lcc"}, {"preset": "lcc", "template": "{input}", "chat": False}, {"preset": "qmsum"}]
    one, other, inside = (tasks.task_of("t", presets.expand("t", each, presets.TASK), 9).texts for each in settings)
    assert one == other != inside


@pytest.mark.parametrize(("positions", "longest"), [(4096, 30), (tasks.ROOM + 9 + 1 + 30, 0)])
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
    ("records", "keys", "told"),
    [
        ([{"prompt": "a"}, "{no json"], {}, ("in.jsonl: line 2: line", "JSON")),
        ([{"prompt": "a"}, {"prompts": "b"}], {}, ("in.jsonl: line 2: prompt", "missing", "evaluation.tasks.t")),
        ([{"prompt": " "}], {}, ("in.jsonl: line 1: prompt", "empty")),
        ([{"prompt": "a", "reference": 4}], {}, ("in.jsonl: line 1: reference", "is int")),
        ([LONG | {"context": None}], {"preset": "lcc"}, ("in.jsonl: line 1: context", "missing")),
        ([], {}, ("in.jsonl", "no record", "evaluation.tasks.t")),
        ([{"prompt": "a"}], {"new_tokens": 5000}, ("evaluation.tasks.t.new_tokens: 5000", "4096 positions")),
    ],
)
def test_what_makes_no_prompt_is_named(
    tmp_path: Path, tokenizer: Any, records: Any, keys: Any, told: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with refused(*told):
        prompts_of(Path(), tokenizer, records, **keys)
