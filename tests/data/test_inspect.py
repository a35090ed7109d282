"""What a person is shown of rows and documents."""

import contextlib
import io
import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from longspec.atomic_files import read_json, write_json
from longspec.data import inspection, tokenize
from longspec.data.pack import packing
from longspec.draft_vocabulary import tokenizer_files
from longspec.target import fetch
from tests.corpus import write_raw
from tests.data import families
from tests.refusals import refused

END = "<|im_end|>"
RECORDS: list[dict[str, Any]] = [
    {"problem": "p0", "qwq": "the answer zero"},
    {"problem": "p1", "qwq": "answer [bold]one[/bold] \x1b[31m"},
    {"problem": "p2", "qwq": "word " * 200},
]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, tokenizer_manifest: Path) -> Path:
    folder = tmp_path_factory.mktemp("inspect")
    raw = write_raw(folder / "raw", RECORDS)
    tokens = [folder / "tokens" / f"{shard:03}.json" for shard in range(2)]
    for shard, path in enumerate(tokens):
        tokenize.make(raw, tokenizer_manifest, shard, 2, path)
    packing.make(tokens, 128, "longcot", "split", folder / "packed" / "manifest.json")
    return folder / "packed" / "manifest.json"


def shown(path: Path, row: int = 0) -> str:
    """The output."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        inspection.show(path, row)
    return out.getvalue()


@pytest.fixture(scope="module")
def pages(packed: Path) -> list[str]:
    return [shown(packed, row) for row in range(read_json(packed)["rows"])]


def test_trained_text_stands_between_marks(pages: list[str]) -> None:
    trained = [text for page in pages for text in re.findall(r"⟦([^⟧]*)⟧", page.split("⟦trained⟧")[1])]
    # The escape of a record is shown, not obeyed, and what looks like markup is text.
    assert f"the answer zero{END}" in trained
    assert f"answer [bold]one[/bold] ␛[31m{END}" in trained
    assert 190 < "".join(trained).count("word") < 200  # the first token of a further piece is no label
    assert not any("p1" in text for text in trained)
    assert sum("<|im_start|>user\np1" in page for page in pages) == 1


def test_every_document_names_its_record(packed: Path, pages: list[str]) -> None:
    train = packed.parents[1] / "raw/train.jsonl"
    lines: list[int] = []
    starts: dict[int, list[tuple[int, int]]] = {}
    for page in pages:
        found = re.findall(r"document \d+: its tokens ([\d,]+) to ([\d,]+), .*\n(\S+) line (\d+)", page)
        for start, end, path, line in found:
            assert Path(path) == train
            lines.append(int(line))
            starts.setdefault(int(line), []).append((int(start.replace(",", "")), int(end.replace(",", ""))))
    assert set(lines) == {1, 2, 3}
    # The pieces of the long record cover it from its first token on.
    ends = sorted(starts[3])
    assert ends[0][0] == 0
    assert all(before[1] + 1 == after[0] for before, after in itertools.pairwise(ends))


def test_refusals(packed: Path) -> None:
    with refused("--row:", "0..", 10**6):
        inspection.show(packed, 10**6)
    tokens = packed.parents[1] / "tokens/000.json"
    with refused(f"{tokens}: sequence_length:", "data/packed"):
        inspection.show(tokens, 0)


def test_a_space_behind_a_special_token_is_shown() -> None:
    """Also where the tokenizer drops the one that a text begins with."""
    tokenizer = families.family("mistral", families.spaces_in_words())
    ids = tokenizer("[INST] the hat [/INST] so", add_special_tokens=False).input_ids
    trained = [int(place > ids.index(tokenizer.convert_tokens_to_ids("[/INST]"))) for place in range(len(ids))]
    shown_as = inspection._text(ids, trained, tokenizer)
    whole = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert shown_as == whole.replace("[/INST]", "[/INST]⟦") + "⟧"


def test_thoughts_calls_and_results_are_shown_as_they_are_laid_out(tmp_path: Path) -> None:
    """Through tokens and rows: a record of two documents, one that cannot be laid out, and the counts of all."""
    tokenizer = families.family("qwen3-tools", families.byte_level())
    tokenizer.save_pretrained(tmp_path / "files")
    fetch.write_manifest(tmp_path / "tokenizer.json", tmp_path / "files", "test", tokenizer_files(tmp_path / "files"))
    call = {"function": {"name": "sum", "arguments": '{"a": 14}'}}
    turns = [
        {"role": "user", "content": "14 + 3?"},
        {"role": "assistant", "content": None, "reasoning_content": "I add.", "tool_calls": [call]},
        {"role": "tool", "content": "17"},
        {"role": "assistant", "content": "It is 17.", "reasoning_content": "So it is."},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "17 - 3 = 14"},
        {"role": "user", "content": "thanks"},
    ]
    unknown = {"messages": turns, "chat_template_kwargs": {"thinking": True}}
    raw = write_raw(tmp_path / "raw", [{"messages": turns}, unknown, {"problem": "p", "qwq": "q"}])
    write_json(raw, read_json(raw) | {"settings": read_json(raw).get("settings", {}) | {"max_rejected": 0.5}})
    made = tokenize.make(raw, tmp_path / "tokenizer.json", 0, 1, tmp_path / "tokens" / "000.json")
    assert (made["documents"], made["further_documents"], made["left_out_messages"]) == (3, 1, 1)
    reasons = {"chat_template_kwargs.thinking: the chat template does not ask for it; correct or drop it"}
    assert set(made["skipped"]["reasons"]) == reasons
    manifest = tmp_path / "packed" / "manifest.json"
    done = packing.make([tmp_path / "tokens" / "000.json"], 2048, "longcot", "split", manifest)
    assert (done["documents"], done["further_documents"], done["skipped"]) == (3, 1, 1)
    page = shown(manifest)
    assert "1 documents beyond one a record" in page
    assert page.count("train.jsonl line 1\n") == 2
