"""The resources that a stage's job asks a cluster for: processes that can share its batch; memory and minutes by the
estimate from its recipe, target and rows, as soon as these are there, within what the profile allows.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from longspec.config import OFFLINE, to_yaml
from longspec.distributed import sharing_ranks

ESTIMATE = [sys.executable, "-m", "longspec.train", "plan"]
# Type and number in Slurm's words: gpu, gpu:8, gpu:h100:8, gpu:h100:8(S:0-1); of several kinds with commas between them.
GPUS = re.compile(r"\bgpu(?::([^:,(]*[^:,(\d][^:,(]*))?(?::(\d+))?\b")


@dataclass(frozen=True)
class Limits:
    """Limits by the profile's set-resources of `train`; the defaults hold without a profile."""

    nodes: int = 1
    ranks: int = 1
    node_mem: int = 8000  # MB of each node
    longest_job: int = 240  # minutes
    tflops: int = 0  # that a GPU reaches; 0 for no estimate


def number_in(rule: str, block: Mapping[str, str], name: str) -> int:
    """A number of a profile's block of a rule, 0 where it has none. Raises ValueError for one that is no whole number."""
    text = block.get(name, "0")
    if not text.isdecimal():
        raise ValueError(
            f"set-resources: {rule}: {name}: {text} is no whole number; profiles/slurm/profile.yaml tells its unit"
        )
    return int(text)


def limits_of(block: Mapping[str, str]) -> Limits:
    """The limits in a profile's block. Raises ValueError for a number that is none, and for more ranks than GPUs."""
    limits = Limits(**{field.name: number_in("train", block, field.name) for field in fields(Limits) if field.name in block})
    check_ranks("train", limits.ranks, "train", block.get("gres", ""))
    return limits


def check_ranks(rule: str, ranks: int, of: str, gres: str) -> None:
    """Raise ValueError for more processes of a rule than a node has GPUs by `gres` of the block `of`, if it tells any."""
    gpus = gpus_in(gres)
    if 0 < gpus < ranks:
        raise ValueError(
            f"set-resources: {rule}: ranks: {ranks} processes, one a GPU, but gres of {of}: {gres} has {gpus}; lower ranks, or "
            "raise gres"
        )


def check_block(rule: str, block: Mapping[str, str]) -> None:
    """Raise ValueError for a profile's block whose place the command line has taken, with a GPU's job in it.

    A block of `train` always has ranks; the others may, and have more than a user would set by hand.
    """
    taken = "ranks" not in block if rule == "train" else block.keys() <= {"gres", "gpu_mem", "ranks"}
    if block and taken:
        raise ValueError(
            f"--set-resources {rule}:{next(iter(block))}=... takes the place of all that the profile sets for {rule}, GPUs "
            "included. Change profiles/slurm/profile.yaml instead, or give a folder with another one: --workflow-profile"
        )


def gpus_in(gres: str) -> int:
    """The GPUs of each node in what a job asks Slurm for."""
    asked = GPUS.search(gres)
    return int(asked[2] or 1) if asked else 0


def estimated(config: Any, target: str, rows: str, *options: object) -> subprocess.CompletedProcess[str]:
    """Run `longspec.train plan` for a recipe and a runtime, in a process of its own: torch is not loaded into this one."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*ESTIMATE, "--target", target, "--data", rows]
        for section in ("recipe", "runtime"):
            Path(folder, section).write_text(to_yaml(config[section]))
            command += [f"--{section}", f"{folder}/{section}"]
        return subprocess.run([*command, *map(str, options)], capture_output=True, text=True)


def with_gpus(gres: str, count: int) -> str:
    """Slurm's words for so many GPUs in the place of those that `gres` asks for."""
    return GPUS.sub(lambda found: ":".join(["gpu", *filter(None, [found[1]]), str(count)]), gres, count=1)


class StageNeeds:
    """What stages' jobs ask for; memory and minutes are estimated once for each state of their files. warn: is called with
    warnings.
    """

    SHARED = ("nodes", "ranks", "tasks_per_node", "gres")  # resources of `train` of which a stage may want a share

    def __init__(self, limits: Limits, estimating: bool, warn: Callable[[str], None]) -> None:
        self.limits = limits
        self.estimating = estimating and limits.tflops > 0
        self.warn = warn
        self.estimates: dict[tuple[Any, ...], dict[str, int] | None] = {}

    def processes(self, config: Any) -> tuple[int, int]:
        """Nodes, and processes on each: runtime.ranks in all, which without the target is one."""
        offline = config.recipe.states.source == OFFLINE
        wanted = config.runtime.ranks or (1 if offline else self.limits.nodes * self.limits.ranks)
        nodes = min(self.limits.nodes, -(-wanted // self.limits.ranks))
        return nodes, sharing_ranks(config.recipe.global_batch, nodes, min(self.limits.ranks, wanted // nodes))

    def share(self, name: str, given: str, config: Any) -> int | str:
        """A resource of SHARED: the profile's, given, or a smaller one where the stage starts fewer processes on a node.

        Two tasks at least, with which alone the executor lets a job start its processes by srun.
        """
        nodes, ranks = self.processes(config)
        if name in ("nodes", "ranks"):
            return {"nodes": nodes, "ranks": ranks}[name]
        if name == "tasks_per_node":
            return int(given) if ranks == self.limits.ranks else max(2, ranks)
        return given.strip("'\"") if ranks == self.limits.ranks else with_gpus(given.strip("'\""), ranks)

    def memory(self, name: str, config: Any, target: str, rows: str, replay: list[str], attempt: int) -> int:
        """MB of each node; more in each try. replay: the plan's options that name the rows that a stage replays."""
        needs = self._estimate(name, config, target, rows, replay)
        return self.limits.node_mem if needs is None else min(self.limits.node_mem, needs["memory_mb"] * attempt)

    def minutes(self, name: str, config: Any, target: str, rows: str, replay: list[str], attempt: int) -> int:
        """Minutes of one job, more in each try; a longer stage goes on in the next."""
        needs = self._estimate(name, config, target, rows, replay)
        return self.limits.longest_job if needs is None else min(self.limits.longest_job, needs["minutes"] * attempt)

    def _estimate(self, name: str, config: Any, target: str, rows: str, replay: list[str]) -> dict[str, int] | None:
        """None where no estimate is wanted, there is nothing to estimate from yet, or it fails: then the limits stand."""
        replayed = [option.partition("=")[2] for option in replay[1:]]
        files = [Path(path) for path in (target, rows, *replayed)]
        if not self.estimating or not all(path.is_file() for path in files):
            return None
        key = (name, *(path.stat().st_mtime_ns for path in files))
        if key not in self.estimates:
            self.estimates[key] = self._fresh_estimate(name, config, target, rows, replay)
        return self.estimates[key]

    def _fresh_estimate(self, name: str, config: Any, target: str, rows: str, replay: list[str]) -> dict[str, int] | None:
        limits, (nodes, ranks) = self.limits, self.processes(config)
        options = ["--ranks", nodes * ranks, "--node-gpus", ranks]
        options += ["--longest-job", limits.longest_job, "--flops", limits.tflops * 1e12]
        done = estimated(config, target, rows, "--json", *replay, *options)
        try:
            needs = json.loads(done.stdout)[0]
        except ValueError:
            said = (done.stderr.strip() or "it says nothing").splitlines()[-1]
            self.warn(f"{name}: its job asks for node_mem and longest_job, an estimate failed: {said}")
            return None
        if needs["memory_mb"] > limits.node_mem:
            self.warn(
                f"{name} needs {needs['memory_mb']} MB of each node by its estimate, the profile has "
                f"node_mem: {limits.node_mem}, which its job asks for. If it is killed: more nodes, or less on the host "
                "(runtime.deepspeed)"
            )
        return needs
