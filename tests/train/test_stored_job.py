"""Stored states from the command line: a stage that reads them trains as one beside its target, killed or not."""

from pathlib import Path

import pytest
from transformers import Qwen2Config

from longspec.atomic_files import read_json
from longspec.states.declaration import hash_of
from tests.corpus import Corpus, sentences
from tests.jobs import PLAIN, Job, finish, kill_rank, start, torchrun
from tests.states.stored import save_target
from tests.states.test_partitioned import WIDE
from tests.train.test_held_out_estimate import make_packed
from tests.train.test_job import assert_same
from tests.train.test_replay_job import MixJob

pytestmark = pytest.mark.slow
PLAIN_POSITIONS, OFFLINE = "recipe.draft.anchors=off", ["recipe.states.source=offline", "recipe.states.dtype=float32"]
MEASURED = ["runtime.held_out_every=4", "runtime.held_out_rows=2", "recipe.steps=12", "runtime.save_every=4"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> Path:
    """The manifest of a target so wide that DeepSpeed spreads it over ranks."""
    return save_target(tmp_path_factory.mktemp("target"), Qwen2Config(vocab_size=corpus.build.vocabulary, **WIDE))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> Path:
    held_out = [{"text": "the old cat meets the red fox. " * n} for n in (1, 4, 30)]
    return make_packed(tmp_path_factory.mktemp("packed"), corpus, "base", sentences(60), held_out)


def verb(job: Job, *words: object) -> str:
    """Run `python -m longspec.states`, which must end well."""
    text, code = finish(start([*PLAIN, "-m", "longspec.states", *map(str, words)], job.out))
    assert code == 0, text[-6000:]
    return text


def given(job: Job) -> list[str]:
    job.freeze()
    files = [f"--{name}={job.out}/{name}.yaml" for name in ("recipe", "runtime")]
    return [*files, f"--target={job.target}", f"--data={job.data}"]


def test_a_stage_from_stored_states(tmp_path: Path, target: Path, packed: Path) -> None:
    """The same rows of metrics, held-out estimates and weights as online, killed in between; damage is told with its cure."""
    beside = Job(tmp_path / "online", target, packed, [PLAIN_POSITIONS, *MEASURED])
    beside.run()
    folder, shards = tmp_path / "states", []
    job = MixJob(tmp_path / "offline", target, packed, [*beside.overrides, *OFFLINE])
    for shard in range(2):
        verb(job, "build", *given(job), f"--shard={shard}", "--num-shards=2", f"--out={folder}/{shard}-of-2")
        shards.append(f"{folder}/{shard}-of-2/shard.json")
    verb(job, "build", "--held-out", *given(job), f"--out={folder}/held-out-2")
    job.more = ["--states", *shards]
    assert "holds other states than this job reads" in job.refusal()
    job.more.append(f"{folder}/held-out-2/shard.json")
    process = job.start()
    job.wait_for(6, process)
    process.kill()
    finish(process)
    file = next(folder.glob("0-of-2/*.safetensors"))
    content = file.read_bytes()
    file.unlink()
    told = job.refusal()
    assert f"{file}: missing; have it made again after: rm -f {file} " in told
    verb(job, "build", *given(job), "--num-shards=2", f"--out={folder}/0-of-2")
    assert file.read_bytes() == content
    assert "starting at step 4" in (log := job.run()) or "starting at step 8" in log
    assert "target weights" not in log
    assert_same(beside, job)
    measured = [[row.get("held_out", {}).get("expected_tokens") for row in each.rows()] for each in (beside, job)]
    assert measured[0] == measured[1]
    assert measured[0][3] is not None
    identity = read_json(job.out / "checkpoint.json")["identity"]
    assert identity["states"]["declaration"] == hash_of(read_json(folder / "0-of-2/shard.json")["declaration"])
    assert "states" not in read_json(beside.out / "checkpoint.json")["identity"]


def test_ranks_share_a_shard_also_of_a_partitioned_target(tmp_path: Path, target: Path, packed: Path) -> None:
    """A rank killed on the way, the files of one process beside the whole target, bit by bit.

    Forwards of one row each are the same whoever makes them; of more rows the last bits hang on which ones are together.
    """
    common, words = [PLAIN_POSITIONS, *OFFLINE, "runtime.micro_batch=1"], ["--shard=0", "--num-shards=2"]
    one = Job(tmp_path / "one", target, packed, common)
    verb(one, "build", *given(one), *words, f"--out={one.out}/shard")
    two = Job(tmp_path / "two", target, packed, [*common, "runtime.target=partitioned"])
    build = [*torchrun(2), "-m", "longspec.states", "build", *given(two), *words, f"--out={two.out}/shard"]
    process = start(build, two.out)
    two.wait_until((two.out / "shard").exists, process)
    kill_rank(process, 1)
    assert finish(process)[1] != 0
    assert not (two.out / "shard/shard.json").exists()
    text, code = finish(start(build, two.out))
    assert code == 0, text[-6000:]
    files = [{path.name: path.read_bytes() for path in (job.out / "shard").glob("rows-*")} for job in (one, two)]
    assert files[0] == files[1]
