"""Uploading what trackers wrote offline; stand-ins for wandb and swanlab note how they were called."""

import json
import os
import sys
from pathlib import Path

import pytest

from longspec.cluster import sync
from longspec.lease import LEASE

STAGE = "results/demo/base/long"
WANDB, SWANLAB = "offline-run-20261121_221331-3c65", "run-20261121_221332-50-86"


class Commands:
    """A folder that is first on the PATH, and a project's folder with what trackers wrote."""

    def __init__(self, root: Path) -> None:
        self.root, self.bin = root, root / "bin"
        self.bin.mkdir()

    def runs(self, name: str, shell: str) -> None:
        path = self.bin / name
        path.write_text(f'#!/bin/sh\nprintf "%s\\n" "{name} $*" >> {self.root}/asked\n{shell}\n')
        path.chmod(0o755)

    def asked(self) -> list[str]:
        path = self.root / "asked"
        return path.read_text().splitlines() if path.exists() else []

    def wrote(self, stage: str = STAGE, wandb: str = WANDB, swanlab: str = SWANLAB) -> tuple[Path, Path]:
        folders = self.root / stage / "trackers/wandb" / wandb, self.root / stage / "trackers/swanlab" / swanlab
        for folder, data in zip(folders, ("run-3c65.wandb", "run-50-86.swanlab"), strict=True):
            folder.mkdir(parents=True)
            (folder / data).touch()
        return folders


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Both commands, which succeed."""
    made = Commands(tmp_path)
    made.runs("wandb", 'for folder; do :; done; for file in "$folder"/*.wandb; do touch "$file.synced"; done')
    made.runs("swanlab", "exit 0")
    monkeypatch.setenv("PATH", f"{made.bin}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.chdir(tmp_path)
    return made


def test_each_folder_by_its_own_command_and_once(commands: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    wandb, swanlab = (folder.relative_to(commands.root) for folder in commands.wrote())
    assert sync.main([]) == 0
    assert commands.asked() == [f"wandb sync {wandb}", f"swanlab sync --id 50-86 {swanlab}"]
    out = capsys.readouterr().out
    assert out.splitlines() == [f"wandb {wandb}: uploaded", f"swanlab {swanlab}: uploaded"]
    assert sync.main([]) == 0
    assert len(commands.asked()) == 2
    assert "nothing to upload below results" in capsys.readouterr().out


def test_a_failure_does_not_end_it(commands: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    commands.wrote("results/a/b/c")
    commands.wrote("results/experiment")
    commands.runs("wandb", "echo starting; echo 'Error: No API key configured.' >&2; exit 1")
    assert sync.main([]) == 1
    assert [line.split()[0] for line in commands.asked()] == ["wandb", "swanlab"] * 2
    told = capsys.readouterr().out
    assert (told.count("uploaded"), told.count("error:")) == (2, 2)
    assert f"wandb results/a/b/c/trackers/wandb/{WANDB}: error: Error: No API key configured. (exit code 1)\n" in told


@pytest.mark.parametrize(
    ("name", "shell"),
    [("wandb", "echo Not authenticated."), ("swanlab", "echo 'swanlab: Confirm sync finish failed: 500'"), ("wandb", "exit 0")],
)
def test_an_exit_code_of_zero_is_not_believed(commands: Commands, name: str, shell: str) -> None:
    commands.wrote()
    commands.runs(name, shell)
    assert sync.main([]) == 1
    commands.runs(name, "exit 0")
    sync.main([])
    assert sum(line.startswith(name) for line in commands.asked()) == 2


def test_a_server_out_of_reach(commands: Commands, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    commands.wrote()
    commands.runs("wandb", "sleep 5 & exec sleep 5")  # a helper that outlives it
    monkeypatch.setattr(sync, "SECONDS", 0.3)
    assert sync.main([]) == 1
    assert "timed out after 0." in capsys.readouterr().out


def test_a_command_that_is_missing(
    commands: Commands, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands.wrote()
    (commands.bin / "wandb").unlink()
    monkeypatch.setattr(sys, "executable", str(commands.bin / "python"))
    assert sync.main([]) == 1
    assert "there is no command wandb: pip install -c constraints.txt -e '.[track]'" in capsys.readouterr().out


def test_a_running_jobs_folders_are_left_alone(commands: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    commands.wrote()
    path = commands.root / STAGE / LEASE
    path.write_text(json.dumps({"holder": "h", "job": None, "released": False}))
    assert sync.main([]) == 0
    assert commands.asked() == []
    assert "nothing to upload below results, running jobs aside" in capsys.readouterr().out
    os.utime(path, (1000, 1000))
    assert sync.main([]) == 0
    assert len(commands.asked()) == 2
