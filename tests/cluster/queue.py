"""A squeue of the tests' own: a script that prints what it is told to, and notes how it was called."""

import os
from pathlib import Path

from longspec.slurm import FIELD, RECORD


def queued(
    job: str,
    state: str,
    *,
    comment: str = "",
    workdir: str = "/work",
    reason: str = "None",
    elapsed: str = "1:00",
    name: str = "uuid",
) -> str:
    """One job, as a real squeue prints it."""
    return RECORD + FIELD.join((job, state, name, comment, workdir, reason, elapsed, "4:00:00")) + "\n"


class Queue:
    """A folder that is first on the PATH, and squeue in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def runs(self, shell: str) -> None:
        """Have squeue note its arguments and run this."""
        path = self.folder / "squeue"
        path.write_text(
            f'#!/bin/sh\nprintf "%s\\n" "$*" >> {self.folder}/asked\nenv | grep ^SQUEUE_ > {self.folder}/env\n{shell}\n'
        )
        path.chmod(0o755)

    def says(self, text: str) -> None:
        """Have squeue print this."""
        (self.folder / "answer").write_text(text)
        self.runs(f"cat {self.folder}/answer")

    def holds(self, *jobs: str) -> None:
        """Have squeue list these jobs of `queued`."""
        self.says("".join(jobs))

    def fails(self, words: str) -> None:
        """Have squeue say this and end with 1."""
        self.runs(f"echo '{words}' >&2; exit 1")

    def asked(self) -> list[str]:
        """The arguments of each call."""
        return (self.folder / "asked").read_text().split("\n")[:-1]

    def environment(self) -> list[str]:
        """What the last call was told by SQUEUE_ variables."""
        return (self.folder / "env").read_text().splitlines()

    def path(self) -> str:
        """The PATH with this squeue first."""
        return f"{self.folder}{os.pathsep}/usr/bin{os.pathsep}/bin"
