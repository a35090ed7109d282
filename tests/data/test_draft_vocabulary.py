"""A draft vocabulary against counts by hand, what it refuses, and its file: read back as it was, strange ones named."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longspec.atomic_files import describe_files, read_json, sha256_text, write_json
from longspec.config import compose_stage
from longspec.data import draft_vocabulary
from longspec.data.__main__ import parser, run
from longspec.data.pack import packing
from longspec.data.pack.arrow_shards import TokenWriter
from longspec.draft_vocabulary import DraftVocabulary, read_draft_vocabulary, tokenizer_hash, tokenizer_hash_of
from longspec.methods import vocabulary_for
from tests.refusals import refused

EOS, TOKENS = 2, 12
Document = tuple[list[int], list[int]]  # ids, answer mask
# Of answers 5, 7, 7 and 3, 3 are trained: a document's first token is never a label.
ANSWERS: list[Document] = [([5, 5, 7, 9, 7], [1, 1, 1, 0, 1]), ([3, 3, 3], [0, 1, 1])]
# Of text 9, 9, 5.
TEXT: list[Document] = [([4, 9, 9, 5], [0, 0, 0, 0])]


def write_rows(folder: Path, documents: list[Document], collation: str, tokenizer: str = "t") -> Path:
    """The manifest of their packed rows."""
    folder.mkdir(parents=True)
    with TokenWriter(folder / "000.arrow") as writer:
        for number, (ids, mask) in enumerate(documents):
            writer.write([(np.array(ids, dtype=np.int32), np.array(mask, dtype=np.uint8))], [number])
    told = {"dataset": "d", "raw": "r", "tokenizer": tokenizer, "template": "c", "eos": EOS, "num_shards": 1, "shard": 0}
    told |= {"documents": len(documents), "tokens": writer.tokens, "skipped": {"count": 0, "allowed": 0.0}}
    told |= {"raw_records": {"train": len(documents)}, "files": describe_files(folder, ["000.arrow"])}
    write_json(folder / "000.json", told)
    out = folder / "packed/manifest.json"
    packing.make([folder / "000.json"], 8, collation, "split", out)
    return out


@pytest.fixture
def rows(tmp_path: Path) -> dict[str, Path]:
    """Rows of answers and of text, and a target of some more tokens than they have."""
    write_json(tmp_path / "target/config.json", {"vocab_size": TOKENS})
    write_json(tmp_path / "target.json", {"path": str(tmp_path / "target"), "files": {}})
    return {"answers": write_rows(tmp_path / "a", ANSWERS, "longcot"), "text": write_rows(tmp_path / "b", TEXT, "base")}


def count(tmp_path: Path, rows: dict[str, Path], size: int, *options: str) -> DraftVocabulary:
    """The file that the verb writes."""
    out = tmp_path / f"draft_vocabulary_{size}.json"
    named = [f"{name}={path}" for name, path in rows.items()]
    given = ["--target", str(tmp_path / "target.json"), "--size", str(size), "--out", str(out), *options]
    run(parser().parse_args(["vocabulary", "--packed", *named, *given]))
    return read_draft_vocabulary(out)


def test_the_most_frequent_labels_of_all_rows_with_ties_by_id(tmp_path: Path, rows: dict[str, Path]) -> None:
    """3, 5, 7 and 9 stand twice each, padding and first tokens (2, 4) are no labels."""
    found = count(tmp_path, rows, 2)
    assert found == DraftVocabulary((3, 5), TOKENS, "t", {"answers": 3 / 5, "text": 1 / 3, "all": 4 / 8})
    assert count(tmp_path, rows, 3).ids == (3, 5, 7)
    assert "holds 50.0% of the trained tokens, less than 95%" in found.low_coverage
    assert count(tmp_path, rows, 5).ids == (0, 3, 5, 7, 9)  # what is never trained comes by id, too
    assert count(tmp_path, rows, 4).low_coverage == ""


def test_record_batches_add_up(tmp_path: Path, rows: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """One row a batch gives the counts of all at once."""
    monkeypatch.setattr(packing, "BATCH_TOKENS", 1)
    parts = write_rows(tmp_path / "c", [*ANSWERS, *ANSWERS], "longcot")
    assert len(list(draft_vocabulary.PackedRows(parts).batches())) > 1
    found = draft_vocabulary.trained_tokens(draft_vocabulary.PackedRows(parts), TOKENS)
    assert {token: count for token, count in enumerate(found.tolist()) if count} == {3: 4, 5: 2, 7: 4}


def test_tokens_of_another_run_cover_these_rows(tmp_path: Path, rows: dict[str, Path]) -> None:
    taken = tmp_path / "other.json"
    DraftVocabulary((7, 9), TOKENS, "t", {"all": 1.0}).write(taken)
    found = count(tmp_path, rows, 2, "--ids-of", str(taken))
    assert (found.ids, found.coverage) == ((7, 9), {"answers": 2 / 5, "text": 2 / 3, "all": 4 / 8})


def test_tokens_that_do_not_fit_are_refused(tmp_path: Path, rows: dict[str, Path]) -> None:
    other = tmp_path / "other.json"
    for held, place, fact in (
        (DraftVocabulary((7, 9), TOKENS, "u", {"all": 1.0}), "tokenizer: u", f"{rows['answers']}, t"),
        (DraftVocabulary((7, 9), 99, "t", {"all": 1.0}), "size:", f"99 tokens, {tmp_path}/target"),
        (DraftVocabulary((3, 4, 5), TOKENS, "t", {"all": 1.0}), "ids: are 3", "--size is 2"),
    ):
        held.write(other)
        with refused(f"{other}: {place}", fact):
            count(tmp_path, rows, 2, "--ids-of", str(other))
    assert not list(tmp_path.glob("draft_vocabulary_*"))


def test_rows_and_sizes_that_do_not_fit_are_refused(tmp_path: Path, rows: dict[str, Path]) -> None:
    other = rows | {"other": write_rows(tmp_path / "c", TEXT, "base", tokenizer="u")}
    larger = {"x": write_rows(tmp_path / "d", [([1, 50], [1, 1])], "base")}
    for given, size, place, fact in (
        (rows, TOKENS, f"--size: {TOKENS}:", "recipe.method.vocabulary: null"),
        (other, 2, "--packed: answers, text, other:", "tokenizers"),
        (larger, 2, f"{tmp_path}/d/packed/rows.arrow: holds token 50", "ends at 11"),
    ):
        with refused(place, fact):
            count(tmp_path, given, size)
    assert not list(tmp_path.glob("draft_vocabulary_*"))


HELD = DraftVocabulary((0, 3, 7), 8, "t", {"base": 0.75, "all": 0.96})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    HELD.write(tmp_path / "v.json")
    return tmp_path / "v.json"


def test_it_is_read_back_as_it_was(path: Path) -> None:
    assert read_draft_vocabulary(path, counted=True) == HELD
    assert HELD.hash == DraftVocabulary((0, 3, 7), 8, "t", {"all": 0.1}).hash
    others = (((0, 3, 6), 8, "t"), ((0, 3, 7), 9, "t"), ((0, 3, 7), 8, "u"))
    assert len({HELD.hash, *(DraftVocabulary(*each, {}).hash for each in others)}) == 4


@pytest.mark.parametrize(
    ("key", "value"),
    [("ids", [3, 0]), ("ids", [3, 8]), ("ids", [True, 3]), ("ids", "0 3"), ("tokenizer", None), ("coverage", {"base": 0.5})],
)
def test_strange_ones_are_refused(path: Path, key: str, value: Any) -> None:
    write_json(path, read_json(path) | {key: value})
    with refused(f"{path}: {key}", "python -m longspec.data vocabulary"):
        read_draft_vocabulary(path, counted=True)


def test_a_targets_tokenizer_is_known_by_its_manifest_or_its_folder(tmp_path: Path) -> None:
    for name in ("target", "other"):
        write_json(tmp_path / name / "tokenizer.json", {"version": name})
        write_json(tmp_path / name / "config.json", {"vocab_size": 8})
    own = tokenizer_hash_of(tmp_path / "target")
    files = describe_files(tmp_path / "target", ["config.json", "tokenizer.json"])
    assert tokenizer_hash(files) == own == sha256_text(json.dumps({"tokenizer.json": files["tokenizer.json"]}))
    assert own != tokenizer_hash_of(tmp_path / "other")
    assert tokenizer_hash({}) is tokenizer_hash_of(tmp_path) is None


def test_a_recipe_gets_the_one_that_it_wants(path: Path) -> None:
    glide, eagle3 = (compose_stage(*each, "base").recipe for each in (("demo", "base"), ("demo-eagle3", "ttt")))
    assert vocabulary_for(glide, None) is None
    for recipe, given, told in (
        (glide, path, (f"{path}", "vocabulary out")),
        (eagle3, None, ("draft vocabulary: missing", "--vocabulary", "files.vocabulary=")),
    ):
        with refused(*told):
            vocabulary_for(recipe, given)
