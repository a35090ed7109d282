"""The short version of `make chaos`: three chained tiny stages on two ranks, disturbed at seeded random moments."""

import random
from pathlib import Path

import pytest

from tests.corpus import Corpus
from tests.train.chaos import KINDS, chain, plan, small_disk
from tests.train.jobs import Job, torchrun

pytestmark = pytest.mark.slow
SEED = 7
STEPS = 40


def test_disturbed_stages_end_in_the_same_draft(tmp_path: Path, target: Path, corpus: Corpus) -> None:
    def jobs(name: str) -> list[Job]:
        overrides = {"base": [], "long": ["deepspeed=zero3-offload"], "longcot": ["recipe.seed=5"]}
        return [
            Job(tmp_path / name / stage, target, corpus.packed, options, torchrun(2)) for stage, options in overrides.items()
        ]

    expected = chain(jobs("whole"), [], SEED)
    with small_disk(tmp_path / "disturbed") as small:
        kinds = list(KINDS if small else KINDS[:3])
        disturbed = jobs("disturbed")
        moments = [
            moment
            for number, job in enumerate(disturbed)
            for moment in plan(job.out.name, STEPS, 2, kinds[2 * (number % 2) :][:2], random.Random(SEED + number))
        ]
        assert chain(disturbed, moments, SEED) == expected
    assert sum(moment.exit_code != 0 for moment in moments) >= 4, moments
