"""How training jobs end before their last step: on request, by their deadline, by a hang, by numbers gone bad.

tests/cluster/test_launch.py has ranks that fail or are killed.
"""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from longspec.answers import __main__ as answers
from longspec.atomic_files import write_json
from longspec.data.pack.arrow_shards import PackedRows
from longspec.distributed import ALONE
from longspec.train import __main__ as program
from tests.corpus import Corpus
from tests.jobs import PLAIN, MakeJob, children_of, deepspeed, finish, ranks_of, start
from tests.train.test_job import assert_same

pytestmark = pytest.mark.slow


def test_requests_and_a_deadline_stop_between_two_whole_steps(make_job: MakeJob) -> None:
    """In slices: gradients of stopped steps must not leak into the steps after the restart. Signals come mid-step."""
    margin = 15
    options = ["recipe.global_batch=8", "recipe.steps=48", f"runtime.stop_margin_seconds={margin}"]
    whole, sliced = make_job("whole", options), make_job("sliced", options)
    whole.run()
    for step, number in ((2, signal.SIGHUP), (6, signal.SIGTERM)):
        before_this = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup a job would not hear it
        process = sliced.start()
        signal.signal(signal.SIGHUP, before_this)
        sliced.wait_for(step, process)
        time.sleep(0.004 * step)
        process.send_signal(number)
        text, code = finish(process)
        assert code != 0, text
        found = sliced.status()
        assert (found["state"], found["reason"], found["steps"]) == ("stopped", f"signal {number.name}", 48)
    plain, before = sliced.launcher, found["step"]
    sliced.launcher = [sys.executable, "-m", "tests.train.lifetime.troubled", "timed", str(3 * 8), str(margin + 0.1)]
    text, code = finish(sliced.start())
    assert time.time() < float(re.findall(r"^deadline (\S+)$", text, re.MULTILINE)[0]), text
    found = sliced.status()
    assert (code != 0, found["state"], found["reason"]) == (True, "stopped", "deadline"), text
    sliced.launcher = plain
    assert before < found["step"] < 48
    assert f"starting at step {found['step']}" in sliced.run()
    assert_same(whole, sliced)


def test_steps_that_are_not_finite_are_skipped_and_their_rows_named(
    make_job: MakeJob, tmp_path: Path, target: Path, corpus: Corpus
) -> None:
    """Under ZeRO-0, which has a way of its own; test_elastic.py has such a step under every sharding."""
    packed, holders = PackedRows(corpus.packed), dict[int, set[int]]()
    for row in range(len(packed)):
        for token in set(packed[row].input_ids_S.tolist()):
            holders.setdefault(token, set()).add(row)
    token = min(holders, key=lambda token: len(holders[token]))  # which the target answers with NaN
    manifest = json.loads(target.read_text())
    model = AutoModelForCausalLM.from_pretrained(manifest["path"])
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = float("nan")
    model.save_pretrained(tmp_path / "poisoned")
    write_json(tmp_path / "poisoned.json", manifest | {"path": str(tmp_path / "poisoned"), "files": {}})
    job = make_job("job", ["runtime.max_skipped_in_a_row=40", "deepspeed=zero0", "recipe.seed=3"])
    job.target = tmp_path / "poisoned.json"
    job.run()
    skipped = [json.loads(line) for line in (job.out / "checkpoints/skipped.jsonl").read_text().splitlines()]
    named = {row for entry in skipped for row in entry["rows"]}
    assert named
    assert named <= holders[token]
    rows = job.rows()
    without_loss = {row["step"] for row in rows if row["loss"] is None}
    assert without_loss == {entry["step"] for entry in skipped}
    assert rows[-1]["skipped"] == len(skipped) < len(rows)
    losses = [row["loss"] for row in rows if row["loss"] is not None]
    assert losses[-1] < losses[0]


def test_after_too_many_skipped_steps_the_advice_trains(make_job: MakeJob) -> None:
    """The job has checkpoints of its own when it fails for good. A lower rate trains after what its words say."""
    job = make_job("job", ["recipe.steps=12", "runtime.save_every=3", "runtime.max_skipped_in_a_row=1"])
    job.launcher = [sys.executable, "-m", "tests.train.lifetime.troubled", "diverging"]
    assert "step 6: 2 steps in a row skipped" in job.refusal()
    assert not job.status()["deterministic"], "once it may be a sick GPU"
    text = job.refusal()
    assert "step 6: 2 steps in a row skipped" in text
    assert (job.status()["state"], job.status()["deterministic"]) == ("failed", True)
    subprocess.run(["sh", "-e", "-c", re.findall(r"rm -r \S+", text)[-1]], check=True)
    job.overrides.append("recipe.optimizer.lr=1e-3")
    assert "starting at step 0" in job.run()
    assert job.rows()[-1]["skipped"] == 0


def test_a_stage_saves_by_the_clock_too(make_job: MakeJob) -> None:
    """Its steps may take minutes: it saves once more, before its last one."""
    job = make_job("job", ["recipe.steps=6", "runtime.save_every=100"])
    job.launcher = [sys.executable, "-m", "tests.train.lifetime.troubled", "overdue", "4"]
    first, last = re.findall(r"saved step (\d+),", job.run())
    assert 0 < int(first) < int(last) == 6


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
    two.freeze()
    launcher = [sys.executable, "-m", "longspec.cluster", "launch", "--ranks=2", f"--log={two.out / 'train.log'}"]
    module = ["tests.train.lifetime.troubled", "hanging", "1", "data", "-m", "longspec.train"]
    both = start([*launcher, "--", *module, *two.command()[len(two.launcher) + 2 :]], two.out)
    texts = [finish(alone)[0], finish(both)[0] + (two.out / "train.log").read_text().rstrip()]
    assert alone.returncode != 0
    assert both.returncode == 1
    for job, text, ranks in ((one, texts[0], 1), (two, texts[1], 2)):
        assert len(re.findall(r"^Timeout \(0:00:0[89]\)!$", text, re.MULTILINE)) == ranks, text
        assert re.search(r'troubled\.py", line \d+ in wrapped', text)  # where it hangs
        assert job.status()["state"] == "running"  # nobody was left to write


@pytest.mark.parametrize(
    ("module", "fails", "words", "other"),
    [
        (program, "read_job", ["train"], OSError(errno.EIO, "torn", "checkpoints/metrics.jsonl")),
        (answers, "run", ["answers", "merge", "a.json", "--raw=b.json", "--out=c.json"], RuntimeError("ours")),
    ],
    ids=["train", "answers"],
)
def test_a_full_disk_is_one_line_and_another_fault_keeps_its_frames(
    module: Any, fails: str, words: list[str], other: Exception, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The job ends, whatever requests to a server wait."""
    codes, full = list[int](), OSError(errno.ENOSPC, "full", "checkpoints/metrics.jsonl")
    monkeypatch.setattr(program, "find_ranks", lambda: ALONE)
    monkeypatch.setattr(module, "end_at_once", codes.append)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", words)
    for fault in (full, other):
        monkeypatch.setattr(module, fails, Mock(side_effect=fault))
        module.main()
        text = capsys.readouterr().err
        assert ("Traceback" in text, "free some space" in text) == (fault is other, fault is full)
    assert codes == [1, 1]
