"""EAGLE-3's trainer as a job: under every sharding, killed, and gone on with by other ranks."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config

from longspec.atomic_files import read_json, write_json
from longspec.draft_vocabulary import DraftVocabulary
from tests.corpus import Corpus, sentences
from tests.jobs import EAGLE3, PLAIN, Job, finish, kill_all, torchrun
from tests.states.test_partitioned import WIDE, save
from tests.train.test_held_out_estimate import make_packed
from tests.train.test_job import assert_same, weights

pytestmark = pytest.mark.slow
PROPOSED, STEPS = 40, 3
PARTITIONED = "runtime.target=partitioned"


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> Path:
    """The manifest of a target of three layers, so wide that DeepSpeed spreads it and its draft over the ranks."""
    folder = tmp_path_factory.mktemp("wide")
    config = Qwen2Config(vocab_size=corpus.build.vocabulary, **WIDE | {"num_hidden_layers": 3})
    write_json(folder / "target.json", {"path": save(config, folder / "target"), "source": "test", "files": {}})
    return folder / "target.json"


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> Path:
    """Tokens that the corpus has many of, and some that it has not."""
    path = tmp_path_factory.mktemp("vocabulary") / "draft_vocabulary_40.json"
    size = corpus.build.vocabulary
    ids = tuple(range(size // 2 - PROPOSED // 2, size // 2 + PROPOSED // 2))
    DraftVocabulary(ids, size, read_json(corpus.packed)["tokenizer"], {"all": 1.0}).write(path)
    return path


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> Path:
    """Rows with held-out records, one shorter than a chain."""
    held_out = [{"text": "the old cat meets the red fox. " * n} for n in (1, 4, 30)]
    return make_packed(tmp_path_factory.mktemp("packed"), corpus, "base", sentences(200), [{"text": "a"}, *held_out])


@pytest.fixture
def make(tmp_path: Path, wide: Path, packed: Path, vocabulary: Path) -> Callable[..., Job]:
    def job(name: str, *overrides: str, ranks: int | None = None) -> Job:
        launcher = PLAIN if ranks is None else torchrun(ranks)
        return Job(tmp_path / name, wide, packed, [*overrides], launcher, EAGLE3, vocabulary=vocabulary)

    return job


@pytest.mark.long  # of GLIDE test_job.py shows it; what a method adds is sharded as any other parameter
def test_every_sharding_trains_the_same_draft(make: Callable[..., Job]) -> None:
    """ZeRO-0 in one process; on two ranks ZeRO-1 and 2, and ZeRO-3 without and with offload beside a partitioned target.

    The latter two estimate acceptance in between, which changes no weight.
    """
    short, estimates = "recipe.steps=4", ["runtime.held_out_every=2", "runtime.held_out_rows=3"]
    jobs = [
        make("plain", "deepspeed=zero0", short),
        make("zero1", "deepspeed=zero1-offload", short, ranks=2),
        make("zero2", "deepspeed=zero2-offload", "runtime.deepspeed.offload_optimizer=none", short, ranks=2),
        make("zero3", "deepspeed=zero3-offload", "runtime.deepspeed.offload_optimizer=none", short, *estimates, ranks=2),
        make("shared", "deepspeed=zero3-offload", PARTITIONED, "runtime.target_chunk=20", short, *estimates, ranks=2),
    ]
    for job in jobs:
        job.run()
    whole, *others = [job.rows() for job in jobs]
    assert all(row["loss"] > 0 and row["llm_loss"] > 0 for row in whole)
    assert all(row["outside_vocabulary"] > 0 and 0 < row["past_document"] < STEPS * row["labels"] for row in whole)
    for rows in others:
        for left, right in zip(whole, rows, strict=True):
            assert (left["loss"], left["llm_loss"]) == pytest.approx((right["loss"], right["llm_loss"]), rel=1e-4)
            assert [left[name] for name in ("labels", "past_document")] == [right[name] for name in ("labels", "past_document")]
            assert left["outside_vocabulary"] == pytest.approx(right["outside_vocabulary"], abs=2)
    estimated = [[row["held_out"] for row in rows if "held_out" in row] for rows in others[2:]]
    assert len(estimated[0]) == 2
    for left, right in zip(*estimated, strict=True):
        assert [name for name in left if name.startswith("acceptance")] == [f"acceptance_{step + 1}" for step in range(STEPS)]
        assert left["loss"] == pytest.approx(right["loss"], rel=1e-4)
    states = [weights(job) for job in jobs]
    for state in states[1:]:
        assert state.keys() == states[0].keys() >= {"lm_head.weight", "fc.weight", "midlayer.self_attn.q_proj.weight"}
        for name, tensor in states[0].items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-3, atol=1e-4)


# In float32 under ZeRO-3 a method's job is killed in test_job.py.
@pytest.mark.parametrize(
    "setting", [pytest.param(("zero3-offload", "fp32"), marks=pytest.mark.long), ("zero1-offload", "bf16")]
)
def test_a_killed_job_goes_on_bit_by_bit(make: Callable[..., Job], setting: tuple[str, str]) -> None:
    """On two ranks."""
    overrides = [f"deepspeed={setting[0]}", f"recipe.precision={setting[1]}"]
    whole, killed = (make(name, *overrides, ranks=2) for name in ("whole", "killed"))
    whole.run()
    process = killed.start()
    killed.wait_for(6, process)
    kill_all(process)
    assert finish(process)[1] != 0
    assert killed.step() < 12
    assert re.search(r"starting at step (4|8)\b", killed.run())
    assert_same(whole, killed)


def test_a_job_goes_on_with_other_ranks(make: Callable[..., Job]) -> None:
    """Begun on two ranks with ZeRO-3, ended on one without: the same global batches."""
    whole, moved = make("whole", "deepspeed=zero0"), make("moved", "deepspeed=zero3-offload", ranks=2)
    whole.run()
    process = moved.start()
    moved.wait_for(6, process)
    process.kill()
    finish(process)
    moved.overrides, moved.launcher = ["deepspeed=zero0"], PLAIN
    assert re.search(r"starting at step (4|8)\b", moved.run())
    losses = [torch.tensor([row["loss"] for row in job.rows()]) for job in (whole, moved)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=0)
