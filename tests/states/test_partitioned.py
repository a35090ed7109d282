"""A target partitioned over two ranks: the losses of one process, checkpoints of the draft alone, the same stored states."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config

from longspec.train.checkpoint.save_load import draft_state_dict
from tests.corpus import Corpus
from tests.jobs import PLAIN, Job, finish, kill_rank, start, torchrun
from tests.states.conftest import SHAPE
from tests.states.stored import save_target

# Above the size up to which DeepSpeed leaves parameters whole on every rank, but for norms and biases.
WIDE = SHAPE | {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2, "initializer_range": 0.05}
PARTITIONED = "runtime.target=partitioned"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> Path:
    return save_target(tmp_path_factory.mktemp("wide"), Qwen2Config(vocab_size=corpus.build.vocabulary, **WIDE))


@pytest.mark.slow
def test_jobs_with_a_partitioned_target(target: Path, tmp_path: Path, corpus: Corpus) -> None:
    """Same training, also with chunks and ZeRO-3 for the draft."""
    common = ["recipe.steps=6", "recipe.optimizer.lr=1e-3"]
    zero3 = [PARTITIONED, "runtime.target_chunk=20", "deepspeed=zero3-offload"]
    jobs = [
        Job(tmp_path / "whole", target, corpus.packed, common, PLAIN),
        Job(tmp_path / "zero3", target, corpus.packed, [*common, *zero3], torchrun(2)),
    ]
    for job in jobs:
        job.run()
    losses = [torch.tensor([[row["loss"], row["llm_loss"]] for row in job.rows()]) for job in jobs]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
    states = [draft_state_dict(job.out / "checkpoints/last") for job in jobs]
    torch.testing.assert_close(states[1], states[0], rtol=1e-3, atol=1e-4)
    sizes = [sum(file.stat().st_size for file in (job.out / "checkpoints/last").rglob("*.*")) for job in jobs]
    assert sizes[1] < 1.1 * sizes[0], "a checkpoint holds the draft alone"


@pytest.mark.slow
def test_ranks_share_a_shard_of_stored_states(target: Path, tmp_path: Path, corpus: Corpus) -> None:
    """A rank killed on the way, the files of one process beside the whole target, bit by bit.

    Forwards of one row each are the same whoever makes them; of more rows the last bits hang on which ones are together.
    """
    common, files = ["recipe.draft.anchors=off", "recipe.states.source=offline", "recipe.states.dtype=float32"], []
    for more, launcher in (([], PLAIN), ([PARTITIONED], torchrun(2))):
        job = Job(tmp_path / str(len(files)), target, corpus.packed, [*common, *more], launcher)
        job.freeze()
        named = {"recipe": job.out / "recipe.yaml", "runtime": job.out / "runtime.yaml", "target": target, "data": job.data}
        options = [f"--{name}={path}" for name, path in (named | {"out": job.out / "0-of-9"}).items()]
        command = [*launcher, "-m", "tests.states.small_parts", "build", *options]
        if more:
            process = start(command, job.out)
            job.wait_until((job.out / "0-of-9").exists, process)
            kill_rank(process, 1)
            assert finish(process)[1] != 0
            assert not (job.out / "0-of-9/shard.json").exists()
        text, code = finish(start(command, job.out))
        assert code == 0, text[-6000:]
        files.append({path.name: path.read_bytes() for path in (job.out / "0-of-9").glob("rows-*")})
    assert len(files[0]) > 2
    assert files[0] == files[1]
