"""The table of stages, held against numbers computed by hand; torn and missing files give a row and a remark."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from longspec.atomic_files import write_json
from longspec.cluster import stages, status
from longspec.lease import LEASE, acquire
from longspec.slurm import NoAnswerError, my_jobs
from longspec.train.checkpoint import checkpoint_dir
from longspec.train.metrics import Metrics
from longspec.train.stage_folder import Status
from tests.cluster.queue import Queue, queued

NAME = "demo/sinkpi-slicing/{}"
COMMENT = "rule_train_wildcards_demo_sinkpi-slicing_{}"


class Made:
    """A stage's folder, made by the trainer's own writers."""

    def __init__(self, root: Path, stage: str) -> None:
        self.name = NAME.format(stage)
        self.folder, self.logs = root / "results" / self.name, root / "logs/train" / self.name
        self.folder.mkdir(parents=True)
        (self.folder / "recipe.yaml").write_text("stage: x\n")

    def told(self, state: str, step: int, steps: int, reason: str = "", *, hopeless: bool = False) -> "Made":
        writer = Status(self.folder, lambda: None)
        writer.step, writer.steps = step, steps
        writer.write(state, reason, hopeless)
        return self

    def trained(self, last: int) -> "Made":
        """Step n takes n seconds, and has 100 n tokens in each."""
        (self.folder / "checkpoints").mkdir(exist_ok=True)
        metrics = Metrics(self.folder / "checkpoints/metrics.jsonl", 0)
        for step in range(1, last + 1):
            metrics.append({"step": step, "seconds": float(step), "tokens_per_second": 100.0 * step, "phases": {"data": 0.1}})
        metrics.handle.close()
        return self

    def saved(self, step: int, steps: int, ago: float = 0, slot: str = "last") -> "Made":
        path = self.folder / "checkpoints" / slot / checkpoint_dir.MANIFEST
        write_json(path, checkpoint_dir.seal({"step": step, "steps": steps, "files": {}, "identity": {}}))
        os.utime(path, (time.time() - ago,) * 2)
        return self

    def held(self, job: str | None, ago: float = 0, *, released: bool = False) -> "Made":
        content = {"holder": "h", "job": job, "host": "n1", "boot": "", "pid": 42, "since": "", "released": released}
        write_json(self.folder / LEASE, content)
        os.utime(self.folder / LEASE, (time.time() - ago,) * 2)
        return self

    def tried(self, *names: str) -> "Made":
        self.logs.mkdir(parents=True)
        for name in names:
            (self.logs / name).touch()
        return self


@pytest.fixture
def project(tmp_path: Path, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workflow's folder, the working one; nothing is queued."""
    queue.holds()
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


def table(capsys: pytest.CaptureFixture[str]) -> str:
    assert status.main([]) == 0
    return capsys.readouterr().out


def line_of(made: Made, text: str) -> str:
    """A stage's line, below that of its run and variant; spaces between columns do not count."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    above, stage = made.name.rsplit("/", 1)
    below = lines[lines.index(above) + 1 :]
    return next(line for line in below if line.startswith(f"{stage} "))


def found() -> dict[str, stages.Stage]:
    try:
        jobs = my_jobs()
    except NoAnswerError:
        jobs = None
    return {stage.name.split("/")[-1]: stage for stage in stages.find(Path("results"), jobs)}


def test_numbers_computed_by_hand(project: Path, queue: Queue, capsys: pytest.CaptureFixture[str]) -> None:
    made = Made(project, "base").told("running", 20, 100).trained(30).saved(20, 100, ago=240).held("11")
    made.tried("attempt-001-job-9.log", "attempt-002-job-11.log", "attempt-002-job-11.errors", "notes.txt")
    queue.holds(queued("11", "RUNNING", workdir=str(project), elapsed="1:02:03"))
    # The last 20 steps are 11 to 30: their medians are those of step 20.5; 70 steps are left.
    stage = found()["base"]
    assert (stage.state, stage.step, stage.total) == ("running", 30, 100)
    assert (stage.middle("tokens_per_second"), stage.seconds_left) == (2050.0, 70 * 20.5)
    assert (stage.saved, stage.saved_ago) == (20, pytest.approx(240, abs=5))
    assert (stage.attempts, str(stage.log)) == (2, f"logs/train/{made.name}/attempt-002-job-11.log")
    assert line_of(made, table(capsys)) == "base running 30/100 30% 2,050 24 min 20, 4 min ago 2 11 RUNNING 1:02:03 of 4:00:00"
    assert len(queue.asked()) == 2  # once for each table
    os.utime(project / f"logs/train/{made.name}/attempt-001-job-9.log", (1, 1))  # of the recipe before this one
    assert found()["base"].attempts == 1


def test_a_finished_stage_shows_its_published_metrics(project: Path) -> None:
    made = Made(project, "base").told("done", 30, 30).trained(30).saved(30, 30).held("11", 999, released=True)
    (made.folder / "checkpoints/metrics.jsonl").rename(made.folder / "metrics.jsonl")
    (made.folder / "checkpoint.json").write_text("{}")
    stage = found()["base"]
    assert (stage.state, stage.step, stage.seconds_left, stage.middle("tokens_per_second")) == ("done", 30, None, 2050.0)


QUEUED = queued("12", "PENDING", comment=COMMENT.format("base"), workdir="{root}", reason="Priority")
ALIVE, GONE = {"job": "11"}, {"job": "11", "ago": 300.0}


@pytest.mark.parametrize(
    ("told", "held", "jobs", "state"),
    [
        (None, None, "", "waiting"),
        (None, None, QUEUED, "queued"),
        (None, None, QUEUED.replace("{root}", "/elsewhere"), "waiting"),
        (None, None, QUEUED.replace("PENDING", "RUNNING"), "running"),
        ("stopped", {"job": "11", "released": True}, "", "stopped"),
        ("failed", {"job": "11", "released": True}, "", "failed"),
        ("failed", ALIVE, queued("11", "RUNNING"), "running"),  # the next attempt has begun and not written yet
        ("running", {"job": None}, "", "running"),
        ("running", {"job": None, "ago": 300.0}, "", "silent"),
        ("running", GONE, QUEUED, "queued"),
        ("running", GONE, queued("11", "RUNNING"), "silent"),  # hung, or a machine's clock is wrong
        ("running", ALIVE, None, "running"),
    ],
)
def test_states(
    project: Path, queue: Queue, told: str | None, held: dict[str, Any] | None, jobs: str | None, state: str
) -> None:
    made = Made(project, "base")
    if told:
        made.told(told, 3, 10)
    if held:
        made.held(**held)
    if jobs is None:
        queue.fails("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    else:
        queue.says(jobs.replace("{root}", str(project)))
    assert found()["base"].state == state


def test_the_trainers_own_lease(project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    made = Made(project, "base").told("running", 3, 10)
    lease = acquire(made.folder)
    assert found()["base"].state == "running"
    assert f"process {os.getpid()}" in table(capsys)
    lease.release()
    assert "base ended without a word or hangs after step 3 of 10" in table(capsys)


def test_what_a_job_did_after_its_checkpoint_does_not_count_once_it_is_gone(project: Path) -> None:
    Made(project, "base").told("running", 20, 100).trained(30).saved(20, 100).held(None, 300)
    Made(project, "long").told("stopped", 9, 10).trained(9)
    stages = found()
    assert (stages["base"].step, stages["base"].seconds_left) == (20, 80 * 20.5)
    assert stages["long"].step == 0


def test_why_a_stage_failed_and_where_its_log_is(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reason = f"first line [not markup]\n{'long ' * 60}end"
    made = (
        Made(project, "long")
        .told("failed", 12, 40, reason, hopeless=True)
        .saved(10, 40, ago=240)
        .held("11", 999, released=True)
    )
    made.tried("attempt-009.log", "attempt-010.log")
    text = table(capsys)
    assert f"{made.name} failed after step 12 of 40; settings, data and code must change before it is tried again:" in text
    assert reason in text
    assert f"log: logs/train/{made.name}/attempt-010.log" in text
    assert line_of(made, text) == "long failed 10/40 25% - - 10, 4 min ago 2 11 ended"


def test_files_that_are_written_at_this_moment_or_torn(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a long record the end is read; a damaged slot or status is passed over."""
    made = Made(project, "base").trained(3000).saved(5, 4000, slot="last_2").held(None, 300)
    metrics = made.folder / "checkpoints/metrics.jsonl"
    assert metrics.stat().st_size > 2 * stages.TAIL_BYTES
    lines = metrics.read_bytes().split(b"\n")
    metrics.write_bytes(b"\n".join([*lines[:-3], b"\0\xff{", *lines[-3:-1], b'{"st']))
    (made.folder / "checkpoints/last").mkdir()
    (made.folder / "checkpoints/last/manifest.json").write_text('{"step": 9, "steps": 100, "sha256": "0"}')
    stage = found()["base"]
    assert (stage.saved, stage.total, stage.state) == (5, 4000, "stopped")
    assert [row["step"] for row in stage.rows] == list(range(2981, 3001))
    (made.folder / "status.json").write_text('{"state": "run')
    (made.folder / LEASE).unlink()
    (made.folder / LEASE).mkdir()  # to open it is an OSError, as where this user may not read it
    assert line_of(made, table(capsys)).startswith("base stopped 5/4000")


def test_no_results_say_what_to_type(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "longspec train mine.yaml --profile slurm" in table(capsys)
