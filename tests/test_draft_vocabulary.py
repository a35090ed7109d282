"""The file of a draft vocabulary: written and read back, torn and strange ones named."""

import json
from pathlib import Path
from typing import Any

import pytest

from longspec.atomic_files import describe_files, read_json, sha256_text, write_json
from longspec.config import compose_stage
from longspec.draft_vocabulary import DraftVocabulary, read_draft_vocabulary, tokenizer_hash, tokenizer_hash_of
from longspec.methods import vocabulary_for
from tests.refusals import refused

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


def test_a_target_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """Whether its manifest is there or its folder; where neither tells of one, the number of tokens alone is looked at."""
    for name in ("target", "other"):
        write_json(tmp_path / name / "tokenizer.json", {"version": name})
        write_json(tmp_path / name / "config.json", {"vocab_size": 8})
    own, other = (tokenizer_hash_of(tmp_path / name) for name in ("target", "other"))
    assert own != other
    files = describe_files(tmp_path / "target", ["config.json", "tokenizer.json"])
    assert tokenizer_hash(files) == own == sha256_text(json.dumps({"tokenizer.json": files["tokenizer.json"]}))
    assert tokenizer_hash({}) is tokenizer_hash_of(tmp_path) is None
    held = DraftVocabulary((0, 3), 8, str(own), {"all": 1.0})
    for known in (own, None):
        held.check_tokens("v.json", 8, "target", known)
    with refused("v.json: tokenizer"):
        held.check_tokens("v.json", 8, "target", other)
    with refused("v.json: size", "8 tokens", "has 9"):
        held.check_tokens("v.json", 9, "target", own)


def test_a_recipe_gets_the_one_that_it_wants(path: Path) -> None:
    glide, eagle3 = (compose_stage(*each, "base").recipe for each in (("demo", "base"), ("demo-eagle3", "ttt")))
    assert vocabulary_for(glide, None) is None
    for recipe, given, told in (
        (glide, path, (f"{path}", "vocabulary out")),
        (eagle3, None, ("draft vocabulary: missing", "--vocabulary", "files.vocabulary=")),
        (eagle3, path, (f"{path}: ids: are 3", "recipe.method.vocabulary")),
    ):
        with refused(*told):
            vocabulary_for(recipe, given)
