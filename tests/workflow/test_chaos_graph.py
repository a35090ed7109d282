"""The short version of `make chaos`: a run of the whole graph through three moments."""

import random
from pathlib import Path

import pytest

from tests.workflow.chaos import Round, place_for, undisturbed

MOMENTS = 3


@pytest.mark.slow
def test_a_disturbed_run_ends_in_the_same_files(tmp_path: Path, root: Path) -> None:
    with place_for(tmp_path / "run", root) as place:
        expected, times = undisturbed(place)
        disturbed = Round(place, random.Random(0), times, 0)
        disturbed.run(MOMENTS)
        disturbed.check(expected)
    assert len(disturbed.moments) == MOMENTS
    assert all(moment.victim for moment in disturbed.moments)
