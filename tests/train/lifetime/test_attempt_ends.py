"""How the log of a job of two ranks ends: with the job's own words, and without torchrun's call stack and table."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.jobs import PLAIN, Job, MakeJob, finish, kill_rank, ranks_of, start

pytestmark = pytest.mark.slow
RAISING = """
import longspec.train.__main__ as program
from longspec.distributed import find_ranks

train_step, rank = program.train_step, find_ranks().rank

def broken(engine, batches, step, *rest):
    if (rank, step) == (1, 2):
        raise ZeroDivisionError("broken on purpose")
    return train_step(engine, batches, step, *rest)

program.train_step = broken
program.main()
"""


def launch(job: Job, *module: str) -> "subprocess.Popen[str]":
    """As the rule starts a stage on a machine with two GPUs."""
    options = job.command()[len(job.launcher) + 2 :]
    launcher = [sys.executable, "-m", "longspec.cluster", "launch", "--ranks=2", f"--log={job.out / 'train.log'}"]
    job.freeze()
    return start([*launcher, "--", *(module or ["longspec.train"]), *options], job.out)


def ended(job: Job, process: "subprocess.Popen[str]") -> str:
    """The whole log of a job that must not end well."""
    finish(process)
    assert process.returncode == 1
    text = (job.out / "train.log").read_text()
    assert not re.search(r"ChildFailedError|SignalException|Root Cause|torch/distributed/run\.py", text), text
    return text.rstrip()


def test_a_refused_jobs_log_ends_with_the_refusal(make_job: MakeJob) -> None:
    job = make_job("job", ["recipe.data.collation=longcot"])
    text = ended(job, launch(job))
    assert "Traceback" not in text
    refusal = r"rank [01] on \S+: error: .*collation: packed with base, recipe\.data\.collation is longcot.*"
    assert re.fullmatch(refusal, text.splitlines()[-1])


def test_a_signal_to_all_and_by_the_launcher_is_one_request(make_job: MakeJob) -> None:
    """As Ctrl-C on a terminal comes: to the launcher, which passes it on, and to each rank. The log ends with the reason."""
    job = make_job("job", ["recipe.steps=400"])
    process = launch(job)
    job.wait_for(2, process)
    for pid in [*ranks_of(process).values(), process.pid]:
        with suppress(ProcessLookupError):  # the first may take the others along
            os.kill(pid, signal.SIGTERM)
    text = ended(job, process)
    assert "Traceback" not in text
    assert f"saved step {job.status()['step']}," in text
    assert text.splitlines()[-1] == f"stopped at step {job.status()['step']} of 400: signal SIGTERM"
    assert (job.status()["state"], job.status()["reason"]) == ("stopped", "signal SIGTERM")


def test_a_crashed_jobs_log_ends_with_the_crashed_ranks_traceback(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raising.py").write_text(RAISING)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
    job = make_job("job")
    text = ended(job, launch(job, "raising"))
    end = text[text.index("This attempt ended:") :].splitlines()
    assert re.match(r"rank 1 on \S+: Traceback \(most recent call last\):", end[1])
    assert end[-1] == "ZeroDivisionError: broken on purpose"
    assert "raising.py" in "".join(end)
    assert (job.status()["state"], job.status()["deterministic"]) == ("failed", False)


def test_a_killed_ranks_job_names_it_in_the_last_line(make_job: MakeJob) -> None:
    job = make_job("job", ["recipe.steps=2000"])
    process = launch(job)
    job.wait_for(2, process)
    pid = kill_rank(process, 1)
    text = ended(job, process)
    assert re.fullmatch(rf"error: rank 1 on \S+ \(pid {pid}\) was killed by SIGKILL", text.splitlines()[-1])
    assert job.status()["state"] == "failed"
    assert job.status()["step"] >= 2


def test_a_hung_rank_ends_the_job_with_all_stacks_and_those_that_left_no_word_are_named(make_job: MakeJob) -> None:
    """In the thread that reads for it, while the other waits and ends like it; a single rank too, in a save."""
    one, two = (make_job(name, ["recipe.global_batch=2", "recipe.steps=400", "runtime.watchdog_seconds=8"]) for name in "12")
    one.freeze()
    alone = start([*PLAIN, "-m", "tests.train.lifetime.hanging", "0", "write", *one.command()[3:]], one.out)
    both = launch(two, "tests.train.lifetime.hanging", "1", "data")
    texts = [finish(alone)[0], finish(both)[0] + (two.out / "train.log").read_text().rstrip()]
    assert alone.returncode != 0
    assert both.returncode == 1
    for job, text, ranks in ((one, texts[0], 1), (two, texts[1], 2)):
        assert len(re.findall(r"^Timeout \(0:00:0[89]\)!$", text, re.MULTILINE)) == ranks, text
        assert re.search(r'hanging\.py", line \d+ in wrapped', text)  # where it hangs
        assert job.status()["state"] == "running"  # nobody was left to write
    named = [re.match(r"error: rank (\d) on \S+ \(pid \d+\) ended without a word", line) for line in texts[1].splitlines()[-2:]]
    assert [found and found[1] for found in named] == ["0", "1"]
