"""A job that failed or was killed runs again, although what an earlier call had made of its outputs is still there."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SNAKEFILE = """
include: "{rules}"
rule all:
    input: "draft"
rule train:
    input: "rows"
    output: "draft"
    shell: "cp {{input}} {{output}}"
rule pack:
    input: "records"
    output: "rows"
    params: words=config.get("words", "old")
    shell: "{{command}}"
"""
WELL = "cat {input} > {output}; echo {params.words} >> {output}"
FAILURES = [("records", "false"), ("words", f"{WELL}; false"), ("words", "true")]  # at once; at its end; leaves nothing


class Place:
    """A folder with this workflow, and calls of Snakemake in it."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder, self.rules = folder, root / "rules/unfinished.smk"
        (folder / "records").write_text("old\n")

    def popen(self, command: str, words: str) -> "subprocess.Popen[str]":
        """Snakemake with one command in the middle rule and one param of it."""
        text = SNAKEFILE.format(rules=self.rules).replace("{command}", command)
        (self.folder / "Snakefile").write_text(text)
        options = ["-c1", "--rerun-incomplete", "--rerun-triggers", "mtime", "params", "input", "--latency-wait", "0"]
        words_given = ["--config", f"words={words}"]
        return subprocess.Popen(
            [sys.executable, "-m", "snakemake", "all", *options, *words_given],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def call(self, command: str = WELL, words: str = "old", code: int = 0) -> str:
        """What a whole call says."""
        process = self.popen(command, words)
        said = process.communicate(timeout=120)[0]
        assert process.returncode == code, said
        return said

    @property
    def draft(self) -> str:
        """What the last rule has made."""
        return (self.folder / "draft").read_text()


@pytest.fixture
def place(tmp_path: Path, root: Path) -> Place:
    """A folder in which a call has ended well."""
    made = Place(tmp_path, root)
    made.call()
    assert made.draft == "old\nold\n"
    return made


@pytest.mark.slow
@pytest.mark.parametrize(("change", "command"), FAILURES)
def test_a_failed_job_runs_again_and_what_follows_too(place: Place, change: str, command: str) -> None:
    words, expected = "old", "new\nold\n"
    if change == "records":
        (place.folder / "records").write_text("new\n")
    else:
        words, expected = "new", "old\nnew\n"
    place.call(command, words, code=1)
    assert not (place.folder / "rows").exists()
    assert place.draft == "old\nold\n"
    place.call(words=words)
    assert place.draft == expected
    assert "Nothing to be done" in place.call(words=words)


@pytest.mark.slow
def test_a_killed_call_runs_its_job_again(place: Place) -> None:
    (place.folder / "records").write_text("new\n")
    process = place.popen("touch begun; sleep 60", "old")
    while not (place.folder / "begun").exists():
        assert process.poll() is None
        time.sleep(0.05)
    assert not (place.folder / "rows").exists()
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    subprocess.run([sys.executable, "-m", "snakemake", "--unlock"], cwd=place.folder, check=True, capture_output=True)
    place.call()
    assert place.draft == "new\nold\n"
    assert "Nothing to be done" in place.call()


@pytest.mark.slow
def test_an_intermediate_that_a_person_removed_is_not_made_again(place: Place) -> None:
    """Disks are tidied; only what a job has begun is missed."""
    (place.folder / "rows").unlink()
    assert "Nothing to be done" in place.call()
