"""The file of a draft vocabulary: written and read back, torn and strange ones named."""

import re
from pathlib import Path
from typing import Any

import pytest

from longspec.atomic_files import read_json, write_json
from longspec.config import compose_stage
from longspec.draft_vocabulary import DraftVocabulary, read_draft_vocabulary
from longspec.methods import vocabulary_for

HELD = DraftVocabulary((0, 3, 7), 8, "t", {"base": 0.75, "all": 0.96})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    HELD.write(tmp_path / "v.json")
    return tmp_path / "v.json"


def test_it_is_read_back_as_it_was(path: Path) -> None:
    assert read_draft_vocabulary(path) == HELD
    assert HELD.hash == DraftVocabulary((0, 3, 7), 8, "t", {"all": 0.1}).hash
    others = [
        DraftVocabulary((0, 3, 6), 8, "t", {}),
        DraftVocabulary((0, 3, 7), 9, "t", {}),
        DraftVocabulary((0, 3, 7), 8, "u", {}),
    ]
    assert len({HELD.hash, *(other.hash for other in others)}) == 4


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ids": [3, 0]}, "ids: must be tokens 0 to 7 of the target, ascending, each once; remove the file"),
        ({"ids": [3, 3]}, "ids: must be tokens 0 to 7"),
        ({"ids": [3, 8]}, "ids: must be tokens 0 to 7"),
        ({"ids": [-1, 3]}, "ids: must be tokens 0 to 7"),
        ({"ids": [True, 3]}, "ids: must be tokens 0 to 7"),
        ({"ids": []}, "ids: must be tokens 0 to 7"),
        ({"ids": "0 3"}, "ids: not as a draft vocabulary has it; remove the file"),
        ({"tokenizer": None}, "tokenizer: not as a draft vocabulary has it"),
        ({"size": "8"}, "size: not as a draft vocabulary has it"),
        ({"coverage": {"base": 0.5}}, "coverage: must be shares from 0 to 1, that of all rows as 'all'; remove the file"),
        ({"coverage": {"all": 95}}, "coverage: must be shares from 0 to 1"),
    ],
)
def test_strange_ones_are_refused(path: Path, changed: dict[str, Any], message: str) -> None:
    write_json(path, read_json(path) | changed)
    with pytest.raises(ValueError, match=re.escape(f"{path}: {message}")):
        read_draft_vocabulary(path)


def test_a_torn_one_is_refused(path: Path) -> None:
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ValueError, match=re.escape(str(path))):
        read_draft_vocabulary(path)


def test_a_recipe_gets_the_one_that_it_wants(path: Path) -> None:
    glide, eagle3 = (compose_stage(*each, "base").recipe for each in (("demo", "base"), ("demo-eagle3", "ttt")))
    assert vocabulary_for(glide, None) is None
    size = eagle3.method.vocabulary
    for recipe, given, message in (
        (glide, path, f"--vocabulary: {path}: this recipe's draft proposes all of the target's tokens; leave it out"),
        (eagle3, None, f"--vocabulary: missing; recipe.method.vocabulary is {size}: give draft_vocabulary_{size}.json"),
        (eagle3, path, f"{path}: ids: are 3, recipe.method.vocabulary is {size}; count it again"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            vocabulary_for(recipe, given)
