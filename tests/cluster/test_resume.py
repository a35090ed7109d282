"""Going on after the controlling Snakemake was killed: who still controls, which jobs are meant, what is refused."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from longspec.cluster import resume
from longspec.cluster.resume import GO_ON, NOTE, SNAKEMAKE, last_note, living_controller, main, note_controller, workflow_jobs
from tests.cluster.queue import Queue, queued
from tests.workflow.calls import begun

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


def living(folder: Path) -> str:
    return living_controller(folder, last_note(folder))


def test_a_living_controller_is_let_alone(folder: Path, queue: Queue, capsys: pytest.CaptureFixture[str]) -> None:
    assert living(folder) == ""
    note_controller(folder, slurm=True)
    assert f"process {os.getpid()}" in refused(capsys)
    assert not (queue.folder / "asked").exists()


def test_a_dead_one_is_known_by_more_than_its_number(folder: Path) -> None:
    """Another process may have got it since."""
    note_controller(folder, slurm=True)
    note = json.loads((folder / NOTE).read_text())
    (folder / NOTE).write_text(json.dumps(note | {"began": note["began"] + "1"}))
    assert living(folder) == ""
    code = "from longspec.cluster.resume import *; note_controller(Path.cwd(), slurm=True)"
    with subprocess.Popen([sys.executable, "-c", code], cwd=folder) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        assert str(process.pid) in (folder / NOTE).read_text()
        assert living(folder) == ""


def test_without_proc_a_process_of_its_number_is_taken_for_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "_began", lambda pid: "")
    note_controller(folder, slurm=False)
    assert f"process {os.getpid()}" in living(folder)
    with subprocess.Popen(["true"]) as process:
        process.wait()
    (folder / NOTE).write_text(json.dumps(last_note(folder) | {"pid": process.pid}))
    assert living(folder) == ""


def test_one_on_another_machine_is_asked_for(folder: Path, queue: Queue, capsys: pytest.CaptureFixture[str]) -> None:
    note_controller(folder, slurm=True)
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


WORKFLOW = """
from pathlib import Path
from longspec.cluster.resume import note_controller
onstart:
    note_controller(Path.cwd(), slurm=False)
rule final_draft:
    output: config["run"] + ".txt"
    shell: "test -e killed || {{ touch begun; sleep 60; }}; touch {output:q}"
"""


@pytest.mark.slow
def test_without_slurm_the_killed_ones_arguments_are_gone_on_with(folder: Path, queue: Queue) -> None:
    assert last_note(folder)["arguments"] == GO_ON
    (folder / "Snakefile").write_text(WORKFLOW)
    command = [*SNAKEMAKE, "--cores", "1", "final_draft", "--config", "run=a run"]
    with begun(command, folder) as process:
        os.killpg(process.pid, signal.SIGKILL)
    (folder / "killed").touch()
    assert subprocess.run(command).returncode, "it is locked"
    done = subprocess.run([sys.executable, "-m", "longspec.cluster", "resume"], capture_output=True, text=True)
    assert (done.returncode, (folder / "a run.txt").exists()) == (0, True), done.stderr
    assert "going on: snakemake --cores 1 final_draft --config 'run=a run'\n" in done.stdout
