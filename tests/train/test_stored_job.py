"""Stored states from the command line: a shard that ranks build together is the one of a single process, killed or not."""

from pathlib import Path

import pytest
from transformers import Qwen2Config

from tests.corpus import Corpus
from tests.jobs import PLAIN, Job, finish, kill_rank, start, torchrun
from tests.states.stored import save_target
from tests.states.test_partitioned import WIDE


def build(job: Job) -> list[str]:
    """The command, for a shard of some files."""
    job.freeze()
    files = [f"--{name}={job.out}/{name}.yaml" for name in ("recipe", "runtime")]
    files += [f"--target={job.target}", f"--data={job.data}", f"--out={job.out}/0-of-9"]
    return [*job.launcher, "-m", "tests.states.small_parts", "build", *files]


@pytest.mark.slow
def test_ranks_share_a_shard_also_of_a_partitioned_target(tmp_path: Path, corpus: Corpus) -> None:
    """A rank killed on the way, the files of one process beside the whole target, bit by bit.

    Forwards of one row each are the same whoever makes them; of more rows the last bits hang on which ones are together.
    """
    target = save_target(tmp_path, Qwen2Config(vocab_size=corpus.build.vocabulary, **WIDE))  # DeepSpeed spreads it over ranks
    common = ["recipe.draft.anchors=off", "recipe.states.source=offline", "recipe.states.dtype=float32"]
    one = Job(tmp_path / "one", target, corpus.packed, common, PLAIN)
    two = Job(tmp_path / "two", target, corpus.packed, [*common, "runtime.target=partitioned"], torchrun(2))
    process = start(build(two), two.out)
    two.wait_until((two.out / "0-of-9").exists, process)
    kill_rank(process, 1)
    assert finish(process)[1] != 0
    assert not (two.out / "0-of-9/shard.json").exists()
    for job in (one, two):
        text, code = finish(start(build(job), job.out))
        assert code == 0, text[-6000:]
    files = [{path.name: path.read_bytes() for path in (job.out / "0-of-9").glob("rows-*")} for job in (one, two)]
    assert len(files[0]) > 2
    assert files[0] == files[1]
