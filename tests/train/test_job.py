"""The trainer as a job: killed, resumed, shared between ranks, refused. Compared with the undisturbed job."""

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from longspec.config import Recipe, load
from longspec.data.pack.arrow_shards import PackedRows, count_labels
from longspec.data.schedule import TrainedRows
from longspec.distributed import Ranks
from longspec.train.checkpoint.save_load import draft_state_dict
from longspec.train.micro_batches import StepBatches
from tests.corpus import Corpus, questions, sentences
from tests.jobs import Job, MakeJob, finish, kill_rank, torchrun
from tests.train.test_held_out_estimate import make_packed

pytestmark = pytest.mark.slow
ZERO3 = ["deepspeed=zero3-offload"]


def weights(job: Job) -> dict[str, torch.Tensor]:
    checkpoint = json.loads((job.out / "checkpoint.json").read_text())
    return draft_state_dict(job.out / checkpoint["slot"])


def assert_same(left: Job, right: Job) -> None:
    """Bit-equal weights and losses, and nothing was compiled on the way."""
    torch.testing.assert_close(weights(right), weights(left), rtol=0, atol=0)
    assert [row["loss"] for row in left.rows()] == [row["loss"] for row in right.rows()]
    assert [row["step"] for row in right.rows()] == list(range(1, len(left.rows()) + 1))
    assert not list((right.out / "extensions").iterdir())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, target: Path, corpus: Corpus) -> Job:
    """ZeRO-1 in one plain process, undisturbed."""
    job = Job(tmp_path_factory.mktemp("whole") / "whole", target, corpus.packed)
    job.run()
    return job


def test_an_unfinished_stage_refuses_an_edit_and_goes_on_bit_by_bit(
    whole: Job, make_job: MakeJob, tmp_path: Path, corpus: Corpus
) -> None:
    """Half a training is not thrown away; what the refusal advises trains anew. A finished stage needs nothing deleted."""
    job = make_job("job")
    process = job.start()
    job.wait_for(6, process)
    process.send_signal(signal.SIGSTOP)  # it holds the folder and does not go on
    assert "another job is writing here" in job.refusal()
    assert job.status()["state"] == "running"
    process.kill()
    finish(process)
    assert job.step() < 24
    assert not (job.out / "checkpoint.json").exists()
    job.overrides = ["recipe.data.collation=longcot"]
    assert "collation: packed with base, recipe.data.collation is longcot" in job.refusal()
    job.overrides = ["recipe.optimizer.lr=2e-2"]
    packed, job.data = job.data, make_packed(tmp_path / "other", corpus, "base", sentences(200), [])
    before, after = (PackedRows(path).data_hash for path in (packed, job.data))
    text = job.refusal()
    assert f"data: {before} -> {after}" in text
    assert "recipe.optimizer.lr: 0.01 -> 0.02" in text
    job.overrides, job.data = [], packed
    damaged, anew = make_job("damaged"), make_job("anew")
    for copy in (damaged, anew):
        shutil.copytree(job.out, copy.out)
    for slot in (damaged.out / "checkpoints").glob("last*"):
        (slot / "rank_00000.safetensors").write_bytes(b"")
    assert "every checkpoint slot is damaged" in damaged.refusal()
    assert (damaged.status()["state"], damaged.status()["deterministic"]) == ("failed", False)
    anew.overrides = ["recipe.optimizer.lr=2e-2"]
    advice = re.findall(r"rm -r \S+", anew.refusal())[-1]
    assert anew.status()["deterministic"]
    subprocess.run(["sh", "-e", "-c", advice], check=True)
    assert "starting at step 0" in anew.run()
    assert re.search(r"starting at step (4|8|12|16|20)\b", job.run())
    assert_same(whole, job)
    first, job.overrides = weights(job), anew.overrides
    log = job.run()
    assert "training anew; those of other settings (recipe.optimizer.lr: 0.01 -> 0.02)" in log
    (kept,) = (path for path in job.out.glob("checkpoints.*") if path.is_dir())
    assert all(torch.equal(first[name], tensor) for name, tensor in draft_state_dict(kept / "last").items())
    assert_same(anew, job)
    job.overrides = []  # the edit is undone: what was trained is there
    log = job.run()
    assert (f"which {kept} has kept, are taken back; those" in log, "is trained already, 24 steps" in log) == (True, True)
    assert_same(whole, job)


@pytest.mark.parametrize("zero", ["zero0", "zero1", "zero3-offload"])
def test_a_stage_in_bfloat16_begins_with_float32_weights(whole: Job, make_job: MakeJob, tmp_path: Path, zero: str) -> None:
    """A rate that moves no float32 weight leaves them as they were; rounded to bfloat16 they would differ."""
    save_file(weights(whole), tmp_path / "draft.safetensors")
    job = make_job("job", ["recipe.precision=bf16", "recipe.optimizer.lr=1e-30", "recipe.steps=1", f"deepspeed={zero}"])
    job.init_weights = tmp_path / "draft.safetensors"
    job.run()
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in weights(whole).values())
    torch.testing.assert_close(weights(job), weights(whole), rtol=0, atol=1e-29)


def test_a_killed_rank_ends_the_job_and_it_resumes(make_job: MakeJob) -> None:
    """On two ranks with ZeRO-3 from the slot before a damaged one, bit by bit."""
    undisturbed, killed = (make_job(name, ZERO3, torchrun(2)) for name in ("undisturbed", "killed"))
    undisturbed.run()
    process = killed.start()
    killed.wait_for(9, process)
    kill_rank(process, 1)
    _, code = finish(process)
    assert code != 0
    assert killed.step() < 24
    shard = killed.out / "checkpoints/last/rank_00001.safetensors"
    os.truncate(shard, shard.stat().st_size // 2)
    log = killed.run()
    assert "checkpoint slot last is damaged" in log
    assert re.search(r"starting at step (4|8|12|16|20)\b", log)
    assert_same(undisturbed, killed)


def test_ranks_and_micro_batches_do_not_change_the_training(make_job: MakeJob, tmp_path: Path, corpus: Corpus) -> None:
    """Ranks, micro batches, accumulation, random lags and offsets; many rows, in a long problem's middle, have no label."""
    long = {"problem": "the cat meets the fox. " * 60, "qwq": "the fox meets the cat. "}  # some rows, and an answer at the end
    data = make_packed(tmp_path / "sparse", corpus, "longcot", [*questions(200), *[long] * 20], [])
    answers = ["recipe.data.collation=longcot"]
    jobs = [
        make_job("a", ["runtime.micro_batch=4", *answers]),
        make_job("d", ["runtime.micro_batch=1", *answers, *ZERO3], torchrun(2)),
        make_job("e", ["runtime.micro_batch=1", *answers], torchrun(4)),
    ]
    shapes = ["1 processes x 1 micro batches of 4", "2 processes x 2 micro batches of 1", "4 processes x 1 micro batches of 1"]
    for job, shape in zip(jobs, shapes, strict=True):
        job.data = data
        assert shape in job.run()
    losses = [torch.tensor([row["loss"] for row in job.rows()]) for job in jobs]
    labels = torch.tensor([row["labels"] for row in jobs[0].rows()])
    first, last = ((losses[0][part] * labels[part]).sum() / labels[part].sum() for part in (slice(0, 8), slice(-8, None)))
    assert last < first - 0.2
    rows = PackedRows(data)
    recipe = load(jobs[0].out / "recipe.yaml", Recipe)
    for ranks in (2, 4):
        batches = [StepBatches(TrainedRows(rows), recipe, 1, Ranks(rank, rank, ranks), 400) for rank in range(ranks)]
        shares = [
            [sum(count_labels(rows.find, numbers) for numbers in one.micro_batches(step)) for one in batches]
            for step in range(recipe.steps or 0)
        ]
        assert sum(min(counts) == 0 < max(counts) for counts in shares) > 5, "a rank without labels beside one with labels"
        assert any(max(counts) == 0 for counts in shares), "a step without labels"
    for other in losses[1:]:
        torch.testing.assert_close(other, losses[0], rtol=2e-4, atol=2e-4)


def test_the_target_is_not_in_a_checkpoint(whole: Job) -> None:
    """Float32 weights and two moments of the draft alone, and little else."""
    slot = whole.out / "checkpoints/last"
    keys = set(load_file(slot / "rank_00000.safetensors"))
    assert {key.split("|")[1] for key in keys} == {f"draft_model.{name}" for name in weights(whole)}
    state = 3 * 4 * sum(tensor.numel() for tensor in weights(whole).values())
    assert state < sum(path.stat().st_size for path in slot.rglob("*")) < state + 60_000
