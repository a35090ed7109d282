"""Going on after the controlling Snakemake was killed: who still controls, which jobs are meant, what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from longspec.cluster.resume import NOTE, living_controller, main, note_controller, workflow_jobs
from tests.cluster.queue import Queue, queued

RUN = "0b1c2d3e-4f50-6172-8394-a5b6c7d8e9f0"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a workflow."""
    (tmp_path / "workflow").mkdir()
    (tmp_path / "workflow/Snakefile").touch()
    monkeypatch.chdir(tmp_path / "workflow")
    return tmp_path / "workflow"


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments, "--poll", "0"]) == 1
    return capsys.readouterr().err


def test_a_living_controller_is_let_alone(folder: Path, queue: Queue, capsys: pytest.CaptureFixture[str]) -> None:
    assert living_controller(folder) == ""
    note_controller(folder)
    assert f"process {os.getpid()}" in refused(capsys)
    assert not (queue.folder / "asked").exists()


def test_a_dead_one_is_known_by_more_than_its_number(folder: Path) -> None:
    """Another process may have got it since."""
    note_controller(folder)
    note = json.loads((folder / NOTE).read_text())
    (folder / NOTE).write_text(json.dumps(note | {"began": note["began"] + "1"}))
    assert living_controller(folder) == ""
    code = "from pathlib import Path; from longspec.cluster.resume import note_controller; note_controller(Path.cwd())"
    with subprocess.Popen([sys.executable, "-c", code], cwd=folder) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        assert str(process.pid) in (folder / NOTE).read_text()
        assert living_controller(folder) == ""


def test_one_on_another_machine_is_asked_for(folder: Path, queue: Queue, capsys: pytest.CaptureFixture[str]) -> None:
    note_controller(folder)
    note = json.loads((folder / NOTE).read_text())
    (folder / NOTE).write_text(json.dumps(note | {"host": "login2"}))
    told = refused(capsys)
    assert "ssh login2" in told
    assert "--gone" in told


def test_slurm_without_an_answer_unlocks_nothing(folder: Path, queue: Queue, capsys: pytest.CaptureFixture[str]) -> None:
    queue.fails("slurm_load_jobs error: Unable to contact slurm controller")
    (folder / ".snakemake/locks").mkdir(parents=True)
    assert "Unable to contact slurm controller" in refused(capsys)
    assert (folder / ".snakemake/locks").is_dir()


def test_it_is_the_workflows_jobs_that_are_meant(folder: Path, queue: Queue) -> None:
    here = str(folder)
    queue.holds(
        queued("1", "RUNNING", workdir=here, comment="rule_train_wildcards_demo_base_long", name=RUN),
        queued("2", "RUNNING", workdir=here, comment="", name="interactive"),
        queued("3", "PENDING", workdir=here, comment="accounting note", name=f"prefix_{RUN}"),
        queued("5", "RUNNING", workdir="/elsewhere", comment="rule_train", name=RUN),
    )
    assert [job.id for job in workflow_jobs(folder)] == ["1", "3"]
