"""Jobs of methods with a draft vocabulary: which one a job takes, what it becomes part of, and that killed jobs go on."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config

from longspec.atomic_files import read_json, write_json
from longspec.config import compose
from longspec.data.pack.arrow_shards import PackedRows
from longspec.data.schedule import TrainedRows
from longspec.draft_vocabulary import DraftVocabulary
from longspec.train import arguments
from longspec.train.setup import identity_of, read_vocabulary
from tests.corpus import Corpus
from tests.jobs import DFLASH, EAGLE3, PLAIN, Job, finish, kill_all, torchrun
from tests.refusals import refused
from tests.states.stored import rows_and_vocabulary, save_target
from tests.states.test_partitioned import WIDE
from tests.train.test_job import assert_same

THREE = ["run=demo-eagle3", "variant=ttt", "recipe.method.vocabulary=3", "recipe.method.layers=[0,1,2]"]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> Path:
    """The manifest of a target of three layers, so wide that DeepSpeed spreads it and its draft over the ranks."""
    config = Qwen2Config(vocab_size=corpus.build.vocabulary, **WIDE | {"num_hidden_layers": 3})
    return save_target(tmp_path_factory.mktemp("wide"), config)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> tuple[Path, Path]:
    """With held-out records, one shorter than a chain; and a draft vocabulary."""
    return rows_and_vocabulary(tmp_path_factory.mktemp("rows"), corpus, 200, {"text": "a"})


@pytest.fixture
def make(tmp_path: Path, wide: Path, rows: tuple[Path, Path]) -> Callable[..., Job]:
    def job(name: str, method: list[str], *overrides: str, ranks: int = 1) -> Job:
        launcher = PLAIN if ranks == 1 else torchrun(ranks)
        return Job(tmp_path / name, wide, rows[0], [*overrides], launcher, method, vocabulary=rows[1])

    return job


@pytest.mark.slow
@pytest.mark.parametrize("method", [EAGLE3, DFLASH], ids=["eagle3", "dflash"])
def test_a_killed_job_goes_on_bit_by_bit(make: Callable[..., Job], tmp_path: Path, corpus: Corpus, method: list[str]) -> None:
    """In bfloat16, of a small target, which stays whole; in float32 under ZeRO-3 a method's job is killed in test_job.py."""
    shape = WIDE | {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 64}
    narrow = save_target(tmp_path / "narrow", Qwen2Config(vocab_size=corpus.build.vocabulary, **shape))
    overrides = ["deepspeed=zero1-offload", "recipe.precision=bf16", "recipe.steps=8"]
    whole, killed = (make(name, method, *overrides, ranks=2) for name in ("whole", "killed"))
    whole.target = killed.target = narrow
    whole.run()
    process = killed.start()
    killed.wait_for(5, process)
    kill_all(process)
    assert finish(process)[1] != 0
    assert killed.step() < 8
    assert "starting at step 4" in killed.run()
    assert_same(whole, killed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "sharding", "apart"),
    [("adamw", "zero3-offload", 1e-5), ("muon", "zero0", 1e-3)],  # Muon's products are in bfloat16
)
def test_a_block_draft_learns_the_same_on_any_number_of_ranks(
    make: Callable[..., Job], optimizer: str, sharding: str, apart: float
) -> None:
    """Its anchors are drawn by the rows' numbers; one rank takes two rows at once, two ranks one each."""
    overrides = ["recipe.steps=4", f"recipe.optimizer.name={optimizer}"]
    alone = make("alone", DFLASH, *overrides, "deepspeed=zero0", "runtime.micro_batch=2")
    shared = make("shared", DFLASH, *overrides, f"deepspeed={sharding}", ranks=2)
    for job in (alone, shared):
        job.run()
    losses = [torch.tensor([row["loss"] for row in job.rows()]) for job in (alone, shared)]
    torch.testing.assert_close(losses[1], losses[0], rtol=apart, atol=0)
    assert [row["blocks"] for row in alone.rows()] == [row["blocks"] for row in shared.rows()]


@pytest.fixture
def job(tmp_path: Path, target: Path, corpus: Corpus) -> arguments.Job:
    """Of a recipe that wants three tokens, with a file of three that fit."""
    tokenizer = PackedRows(corpus.packed).manifest["tokenizer"]
    path = tmp_path / "draft_vocabulary_3.json"
    DraftVocabulary((1, 4, 9), corpus.build.vocabulary, tokenizer, {"all": 0.5}).write(path)
    config = compose("train", THREE)
    return arguments.Job(config.recipe, config.runtime, target, [corpus.packed], None, tmp_path / "out", vocabulary=path)


def test_a_vocabulary_is_part_of_the_identity_where_there_is_one(job: arguments.Job) -> None:
    rows = TrainedRows(PackedRows(job.data[0]))
    vocabulary = read_vocabulary(job, rows)
    assert vocabulary.ids == (1, 4, 9)
    identity = identity_of(job, rows, torch.float32, vocabulary)
    assert identity["vocabulary"] == vocabulary.hash
    glide = compose("train", ["run=demo"])
    plain = replace(job, recipe=glide.recipe, vocabulary=None)
    assert read_vocabulary(plain, rows) is None
    assert set(identity_of(plain, rows, torch.float32, None)) == set(identity) - {"vocabulary"}


def test_a_vocabulary_that_does_not_fit_is_refused(job: arguments.Job) -> None:
    path, rows = job.vocabulary, TrainedRows(PackedRows(job.data[0]))
    whole = read_json(path)
    for changed, key in (({"tokenizer": "u"}, "tokenizer"), ({"ids": [1, 4]}, "ids: are 2, recipe.method.vocabulary is 3")):
        write_json(path, whole | changed)
        with refused(f"{path}: {key}"):
            read_vocabulary(job, rows)
