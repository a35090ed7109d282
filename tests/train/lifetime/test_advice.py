"""An error's advice works when it is followed to the letter: what a refused job prints is run by a shell."""

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.corpus import Corpus
from tests.jobs import Job, MakeJob, finish

pytestmark = pytest.mark.slow
SHORT = ["recipe.steps=12", "runtime.save_every=3"]
CHANGED = [*SHORT, "recipe.optimizer.lr=2e-2"]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, target: Path, corpus: Corpus) -> Job:
    """A stage that was stopped halfway, with checkpoints."""
    job = Job(tmp_path_factory.mktemp("stopped") / "job", target, corpus.packed, ["recipe.steps=400", "runtime.save_every=3"])
    process = job.start()
    job.wait_for(4, process)
    process.send_signal(signal.SIGTERM)
    finish(process)
    assert job.status()["state"] == "stopped"
    return job


@pytest.fixture
def job(stopped: Job, make_job: MakeJob) -> Job:
    """A copy of it."""
    copy = make_job("job", stopped.overrides)
    shutil.copytree(stopped.out, copy.out)
    return copy


def follow(text: str, advice: str) -> None:
    """Run the command that a log gives."""
    commands = re.findall(rf"{advice}\S+", text)
    assert commands, text
    subprocess.run(["sh", "-e", "-c", commands[-1].rstrip(")")], check=True)


def test_after_the_removal_of_the_checkpoints_a_changed_recipe_trains(job: Job) -> None:
    job.overrides = CHANGED
    refused = job.refusal()
    assert "were made with other settings: recipe.optimizer.lr: 0.01 -> 0.02" in refused
    follow(refused, "rm -r ")
    assert "starting at step 0" in job.run()
    assert job.status()["state"] == "done"


@pytest.fixture
def diverging(make_job: MakeJob) -> Job:
    """A job that has checkpoints of its own when it fails for good, and none when it begins."""
    job = make_job("job", [*SHORT, "runtime.max_skipped_in_a_row=1"])
    job.launcher = [sys.executable, "-m", "tests.train.lifetime.diverging"]
    assert "step 6: 2 steps in a row skipped" in job.refusal()
    assert (job.status()["state"], job.status()["deterministic"]) == ("failed", True)
    return job


def test_a_lower_learning_rate_trains_after_the_removal_of_the_checkpoints(diverging: Job) -> None:
    text = diverging.refusal()
    follow(text, "rm -r ")
    diverging.overrides[-1] = "recipe.optimizer.lr=1e-3"
    assert "starting at step 0" in diverging.run()
    assert diverging.rows()[-1]["skipped"] == 0
