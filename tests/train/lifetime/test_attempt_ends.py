"""How the log of a job of two ranks ends; tests/cluster/test_launch.py has ranks that fail or are killed."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from tests.jobs import PLAIN, Job, MakeJob, children_of, deepspeed, finish, ranks_of, start

pytestmark = pytest.mark.slow


def launch(job: Job, *module: str) -> "subprocess.Popen[str]":
    """As the rule starts a stage on a machine with two GPUs."""
    options = job.command()[len(job.launcher) + 2 :]
    launcher = [sys.executable, "-m", "longspec.cluster", "launch", "--ranks=2", f"--log={job.out / 'train.log'}"]
    job.freeze()
    return start([*launcher, "--", *module, *options], job.out)


def tell(pids: list[int], number: signal.Signals) -> None:
    """Send them a signal, as many as are still there: the first may take the others along."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def test_ctrl_c_under_the_deepspeed_command_saves_a_step(make_job: MakeJob) -> None:
    """It ends the command at once, and launch.py tells the ranks once more."""
    job = make_job("job", ["recipe.steps=2000"], deepspeed(2))
    process = job.start()
    job.wait_for(5, process)
    # A terminal tells all at the same moment; here the ranks come first, or the command might send them a SIGTERM before.
    tell([*ranks_of(process).values(), process.pid], signal.SIGINT)
    tell(children_of(process.pid), signal.SIGINT)
    text, _ = finish(process)
    assert (job.status()["state"], job.status()["reason"]) == ("stopped", "signal SIGINT")
    assert f"saved step {job.status()['step']}," in text


def test_a_hung_rank_ends_the_job_with_all_stacks(make_job: MakeJob) -> None:
    """In the thread that reads for it, while the other waits and ends like it; a single rank too, in a save."""
    one, two = (make_job(name, ["recipe.global_batch=2", "recipe.steps=400", "runtime.watchdog_seconds=8"]) for name in "12")
    one.freeze()
    alone = start([*PLAIN, "-m", "tests.train.lifetime.troubled", "hanging", "0", "write", *one.command()[1:]], one.out)
    both = launch(two, "tests.train.lifetime.troubled", "hanging", "1", "data", "-m", "longspec.train")
    texts = [finish(alone)[0], finish(both)[0] + (two.out / "train.log").read_text().rstrip()]
    assert alone.returncode != 0
    assert both.returncode == 1
    for job, text, ranks in ((one, texts[0], 1), (two, texts[1], 2)):
        assert len(re.findall(r"^Timeout \(0:00:0[89]\)!$", text, re.MULTILINE)) == ranks, text
        assert re.search(r'troubled\.py", line \d+ in wrapped', text)  # where it hangs
        assert job.status()["state"] == "running"  # nobody was left to write
