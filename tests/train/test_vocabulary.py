"""A training job's draft vocabulary: which one it takes, how it is told of it, and what it becomes part of."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from longspec.atomic_files import read_json, write_json
from longspec.config import compose
from longspec.data.pack.arrow_shards import PackedRows
from longspec.data.schedule import TrainedRows
from longspec.draft_vocabulary import DraftVocabulary
from longspec.train.arguments import Job
from longspec.train.setup import identity_of, read_vocabulary
from tests.corpus import Corpus
from tests.refusals import refused

EAGLE3 = ["run=demo-eagle3", "variant=ttt", "recipe.method.vocabulary=3", "recipe.method.layers=[0,1,2]"]


@pytest.fixture
def job(tmp_path: Path, target: Path, corpus: Corpus) -> Job:
    """Of a recipe that wants three tokens, with a file of three that fit."""
    tokenizer = PackedRows(corpus.packed).manifest["tokenizer"]
    path = tmp_path / "draft_vocabulary_3.json"
    DraftVocabulary((1, 4, 9), corpus.build.vocabulary, tokenizer, {"all": 0.5}).write(path)
    config = compose("train", EAGLE3)
    return Job(config.recipe, config.runtime, target, [corpus.packed], None, tmp_path / "out", vocabulary=path)


def test_it_is_part_of_the_identity_where_there_is_one(job: Job) -> None:
    rows = TrainedRows(PackedRows(job.data[0]))
    vocabulary = read_vocabulary(job, rows)
    assert vocabulary.ids == (1, 4, 9)
    identity = identity_of(job, rows, torch.float32, vocabulary)
    assert identity["vocabulary"] == vocabulary.hash
    glide = compose("train", ["run=demo"])
    plain = replace(job, recipe=glide.recipe, vocabulary=None)
    assert read_vocabulary(plain, rows) is None
    assert set(identity_of(plain, rows, torch.float32, None)) == set(identity) - {"vocabulary"}


def test_one_that_does_not_fit_is_refused(job: Job) -> None:
    path, rows = job.vocabulary, TrainedRows(PackedRows(job.data[0]))
    whole = read_json(path)
    for changed, key in (({"tokenizer": "u"}, "tokenizer"), ({"ids": [1, 4]}, "ids: are 2, recipe.method.vocabulary is 3")):
        write_json(path, whole | changed)
        with refused(f"{path}: {key}"):
            read_vocabulary(job, rows)
