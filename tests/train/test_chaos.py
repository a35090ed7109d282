"""The short version of `make chaos-stages`: two chained tiny stages on two ranks, disturbed at seeded random moments."""

import random
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from longspec.config import compose_stage, stages_of, to_yaml
from tests.corpus import Corpus
from tests.jobs import Job, torchrun
from tests.train.chaos import FULL_DISK, KINDS, STEPS, chain, demo_jobs, plan, small_disk, steps_of
from tests.workflow.planning import copy_to

SEED = 7


@pytest.mark.long  # each kind of kill has a test of its own in tests/train and tests/slurm
@pytest.mark.slow
def test_disturbed_stages_end_in_the_same_draft(tmp_path: Path, target: Path, corpus: Corpus) -> None:
    """One moment of each kind; what each must do to its job and to the next start is checked on the way."""

    def jobs(folder: Path) -> list[Job]:
        overrides = {"base": [], "long": ["deepspeed=zero3-offload", "recipe.seed=5"]}
        return [Job(folder / stage, target, corpus.packed, options, torchrun(2)) for stage, options in overrides.items()]

    expected = chain(jobs(tmp_path / "whole"), [], SEED)
    with small_disk(tmp_path / "disturbed") as disk:
        disturbed = jobs(disk or tmp_path / "disturbed")
        kinds = [kind for kind in KINDS if disk or kind != FULL_DISK]
        moments = plan(steps_of(disturbed), len(KINDS), kinds, random.Random(SEED))
        assert chain(disturbed, moments, SEED) == expected
    assert {moment.kind for moment in moments} == set(kinds)
    assert all(moment.effect and moment.resumed_at is not None for moment in moments)


def test_the_long_version_trains_what_the_workflow_trains(tmp_path: Path, root: Path) -> None:
    planned = copy_to(tmp_path, root).plan()
    jobs = demo_jobs(tmp_path, 2)
    assert [job.out.name for job in jobs] == list(STEPS) == stages_of("demo")
    for job in jobs:
        command = planned[f"results/demo/sinkpi-slicing/{job.out.name}/checkpoint.json"]["command"]
        assert f" --target {job.target} --data {job.data} " in command
        job.freeze()
        recipe = compose_stage("demo", "sinkpi-slicing", job.out.name).recipe
        assert STEPS[job.out.name] <= recipe.steps
        expected = OmegaConf.merge(recipe, {"steps": STEPS[job.out.name]})
        assert (job.out / "recipe.yaml").read_text() == to_yaml(expected)
