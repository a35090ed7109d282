"""Copies to edit: of the whole workflow, for Snakemake to plan, and of config/ alone; no verb is run."""

import compileall
import json
import os
import re
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory
from textwrap import dedent, indent
from typing import Any

from longspec.config import yaml_files
from longspec.engines import ENGINES
from longspec.workflow.checks import check_prompts, checked_plan
from longspec.workflow.plan import Plan
from longspec.workflow.settings.workflow_file import check_text
from tests.refusals import Fact, refused
from tests.workflow.warm import snakemake

FILE = Path("config/workflow.yaml")
SOURCES = "src"
STAGE_INDENT = 4 * " "  # of what stands below a stage's name in a run's file
PARTS = ("Snakefile", "rules", "config", "profiles", "slurm")


def of_stage(text: str, stage: str) -> tuple[str, str, str]:
    """What stands before a stage's own lines in a run's file, these lines without their indentation, and what comes after."""
    found = re.search(rf"^  {stage}:.*\n", text, re.MULTILINE)
    assert found, f"no stage {stage}"
    own = re.match(rf"(?:{STAGE_INDENT}.*\n|\n)*", text[found.end() :])
    end = found.end() + own.end()
    return text[: found.end()], dedent(own[0]), text[end:]


@dataclass
class Copied:
    """A copy of files of the repository in a folder of its own."""

    folder: Path

    def edit(self, path: str, pattern: str, new: str) -> None:
        """Replace every match of a pattern, of which there must be one and which must change the text.

        config/run/NAME.yaml:STAGE is what the run's file says of one stage, as if it stood at the top level.
        """
        name, _, stage = path.partition(":")
        before, text, after = of_stage((self.folder / name).read_text(), stage) if stage else ("", None, "")
        text = (self.folder / name).read_text() if text is None else text
        changed, count = re.subn(pattern, new, text, flags=re.MULTILINE)
        assert count, f"{path}: {pattern} does not match"
        assert changed != text, f"{path}: {pattern} already reads {new}"
        changed = indent(changed, STAGE_INDENT) if stage else changed
        (self.folder / name).write_text(before + changed + after)

    def add_benchmarks(self, root: Path) -> None:
        """The runs and variants of benchmarks/config/ beside those of config/."""
        shutil.copytree(root / "benchmarks/config", self.folder / "config", dirs_exist_ok=True)


class Settings(Copied):
    """A copy of config/ in the current folder."""

    def plan(self, **choices: Any) -> Plan:
        """The checked plan, as the Snakefile makes it."""
        check_text(FILE)
        plan = checked_plan(yaml_files.read(FILE) | choices, self.folder / "config")
        check_prompts(plan)
        return plan

    def refuses(self, place: str, *facts: Fact, **choices: Any) -> None:
        """Such a plan is refused at this place, with these facts."""
        with refused(place, *facts):
            self.plan(**choices)


class Workflow(Copied):
    """A copy of the workflow."""

    def call(self, *arguments: str, shown: bool = True) -> CompletedProcess[str]:
        """Snakemake as a user calls it, with the commands of jobs; the copy's own src/ comes before the installed package."""
        environment = os.environ | {"PYTHONPATH": str(self.folder / "src"), "COLUMNS": "200"}
        told = ["--printshellcmds"] if shown and "--quiet" not in arguments else []
        return snakemake([*arguments, *told], self.folder, environment)

    def output(self, *arguments: str) -> str:
        """All it prints; it must succeed."""
        done = self.call(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def plan(self, *arguments: str) -> dict[str, dict[str, str]]:
        """Each planned job's fields (rule, input, output, ..., command), by its first output."""
        jobs = {}
        for block in self.output("-n", "final_draft", *arguments).split("\n\n"):
            found = re.search(r"^(?:local)?rule (\w+):$", block, re.MULTILINE)
            fields = dict(re.findall(r"^    (\w+): (.*)$", block, re.MULTILINE))
            if found and "output" in fields:
                command = block.partition("Shell command: ")[2]
                jobs[fields["output"].split(", ")[0]] = fields | {"rule": found[1], "command": command}
        return jobs


def install(*engines: str) -> None:
    """Have engines look installed in the current folder."""
    for name in engines:
        python = Path(ENGINES[name].python)
        python.parent.mkdir(parents=True, exist_ok=True)
        python.touch(0o755)


@cache
def compiled(root: Path) -> "TemporaryDirectory[str]":
    """The package with its bytecode, which every process of every copy would make anew: `make` has none written."""
    place = TemporaryDirectory()
    shutil.copytree(root / SOURCES, Path(place.name, SOURCES), ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    compileall.compile_dir(place.name, quiet=2)
    return place


def copy_to(folder: Path, root: Path) -> Workflow:
    """The workflow without anything built."""
    for part in PARTS:
        if (root / part).is_symlink():
            (folder / part).symlink_to((root / part).readlink())
        elif (root / part).is_dir():
            shutil.copytree(root / part, folder / part)
        else:
            shutil.copy(root / part, folder / part)
    shutil.copytree(Path(compiled(root).name, SOURCES), folder / SOURCES)
    return Workflow(folder)


def built(path: Path) -> None:
    """Have a file as build_all does: as it is, else empty, or of no content where each call reads it."""
    path.touch()
    if path.name == "provenance.json" and not path.read_text():
        path.write_text("{}")


def build_all(workflow: Workflow) -> None:
    """Have every output there, recorded as built; no verb is run, and trainings, with much to import, fail at once."""
    for output in re.findall(r"^(\S+)\t", workflow.output("--summary"), re.MULTILINE)[1:]:
        path = workflow.folder / output
        path.parent.mkdir(parents=True, exist_ok=True)
        built(path)
    workflow.output("--touch", "--forceall", "--cores=1", "--quiet")
    for path in workflow.folder.glob("results/*/*/*/checkpoint.json"):  # now trained, by what they say
        times = path.stat()
        recipe = yaml_files.read(path.with_name("recipe.yaml"))
        path.write_text(json.dumps({"identity": {"recipe": recipe, "init_weights": None}}))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    (workflow.folder / "src/longspec/train/__main__.py").write_text("raise SystemExit('error: nothing is built')\n")
    (workflow.folder / "src/longspec/cluster/launch.py").write_text("def main(argv):\n    return 1\n")
