"""Compute the resources that a stage's job asks a cluster for: processes that can share its batch, and their part of a node."""

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod
from pathlib import Path
from typing import Any

from longspec.config import processes_of
from longspec.workflow.choices import Stage

# gres that the executor accepts; for GPUs with model and number: gpu, gpu:8, gpu:h100:8.
TAKEN = re.compile(r"[a-zA-Z0-9_]+(:[a-zA-Z0-9_.]+)?(:\d+[TGM]?)?")
GPUS = re.compile(r"gpu(?::(?!\d+$)([\w.]+))?(?::(\d+))?")
STAGE_THREADS = 2  # most cores of a stage's job, shared by its processes


@dataclass(frozen=True)
class Limits:
    """Hold the limits from the profile's set-resources of `train`; the defaults apply without a profile."""

    nodes: int = 1
    ranks: int = 1
    node_mem: int = 8000  # MB of each node
    longest_job: int = 240  # minutes


def limits_of(block: Mapping[str, str]) -> Limits:
    """Return the limits in a profile's block. Raises ValueError for an invalid number, and for more ranks than GPUs."""
    given = {field.name: block[field.name] for field in fields(Limits) if field.name in block}
    for name, text in given.items():
        if not text.isdecimal() or not int(text):
            raise ValueError(
                f"set-resources: train: {name}: {text} is no whole number above 0; profiles/slurm/profile.yaml tells its unit"
            )
    limits, gres = Limits(**{name: int(text) for name, text in given.items()}), block.get("gres", "").strip("'\"")
    if 0 < gpus_in(gres) < limits.ranks:
        raise ValueError(
            f"set-resources: train: ranks: {limits.ranks} processes, one a GPU, but gres of train: {gres} has {gpus_in(gres)}; "
            "lower ranks, or raise gres"
        )
    return limits


def check_call(words: Sequence[str], given: Mapping[str, Collection[str]], *, policy: bool, slurm: bool) -> None:
    """Raise ValueError for a call whose options replace what no call may lose of a profile.

    given: rule -> names of resources set for it; policy: whether any rerun-triggers are set; without any, Snakemake uses all.
    """
    options = {word.partition("=")[0] for word in words}
    if not policy and "--rerun-triggers" not in options:
        raise ValueError(
            "rerun-triggers: those of profiles/default are missing: a changed line of code would train finished stages again. "
            "--workflow-profile takes their place; give your own folder as --profile instead"
        )
    if slurm and "--set-resources" in options:
        raise ValueError(
            "--set-resources takes the place of all that a profile sets for any rule, GPUs included. Change "
            "profiles/slurm/profile.yaml instead, or a copy of its folder, and give that: --profile COPY"
        )
    if slurm and given and "ranks" not in given.get("train", ()):
        raise ValueError(
            "set-resources: has no ranks for train. That of a second profile takes the place of the first one's whole section, "
            "GPUs included: write all of it there, as profiles/slurm/profile.yaml has it; one process is ranks: 1"
        )


def gpus_in(gres: str) -> int:
    """Return the number of GPUs of each node in `gres`, as a job asks Slurm for them."""
    asked = GPUS.fullmatch(gres)
    return int(asked[2] or 1) if asked else 0


def check_gres(rule: str, gres: str) -> None:
    """Raise ValueError for a gres that the executor accepts for no job. gres: a profile's value, perhaps in quotes."""
    text = gres.strip("'\"")
    if text and not TAKEN.fullmatch(text):
        raise ValueError(
            f"set-resources: {rule}: gres: {text}: give gpu:8 or gpu:h100:8; name a model with a hyphen, or "
            "other hardware, by `constraint`"
        )


def with_gpus(gres: str, count: int) -> str:
    """Return `gres` with this number of GPUs."""
    return GPUS.sub(lambda found: ":".join(["gpu", *filter(None, [found[1]]), str(count)]), gres)


def gpus_here(devices: Path = Path("/dev"), environment: Mapping[str, str] = os.environ) -> int:
    """Count the NVIDIA GPUs that jobs on this machine may use."""
    there, chosen = len(list(devices.glob("nvidia[0-9]*"))), environment.get("CUDA_VISIBLE_DEVICES")
    return there if chosen is None else min(there, len([name for name in chosen.split(",") if name.strip()]))


def ranks_for(configs: Iterable[Any], gpus: int) -> int:
    """Return the largest number of processes, one per GPU, that can share the batches of all these stages equally."""
    stages, tried = list(configs), range(max(1, gpus), 0, -1)
    shares = ([processes_of(each.recipe, each.runtime, 1, ranks)[1] for each in stages] for ranks in tried)
    return next(
        max(share)
        for share in shares
        if not any(each.recipe.global_batch % ranks for each, ranks in zip(stages, share, strict=True))
    )


class StageNeeds:
    """Compute what stages' jobs ask for: their processes' part of the profile's `train`."""

    SHARED = ("nodes", "ranks", "tasks_per_node", "gres")  # resources of `train` of which a stage may need only a part

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def processes(self, config: Any) -> tuple[int, int]:
        """Return a stage's nodes, and its processes on each."""
        return processes_of(config.recipe, config.runtime, self.limits.nodes, self.limits.ranks)

    def share(self, name: str, given: str, config: Any) -> int | str:
        """Return a resource of SHARED: `given`, the profile's, or less if the stage starts fewer processes on a node.

        At least two tasks: only then does the executor let a job start its processes with srun.
        """
        nodes, ranks = self.processes(config)
        if name in ("nodes", "ranks"):
            return {"nodes": nodes, "ranks": ranks}[name]
        if name == "tasks_per_node":
            return int(given) if ranks == self.limits.ranks else max(2, ranks)
        return given.strip("'\"") if ranks == self.limits.ranks else with_gpus(given.strip("'\""), ranks)

    def memory(self, config: Any) -> int:
        """Return MB of each node: its processes' part."""
        return self.limits.node_mem * self.processes(config)[1] // self.limits.ranks

    def missing(self, configs: Mapping[Stage, Any]) -> list[str]:
        """Return a line for each run that has fewer processes than its runtime.ranks."""
        most = self.limits.nodes * self.limits.ranks
        wanted: dict[str, int] = {}
        for (run, _, _), config in configs.items():
            wanted[run] = max(wanted.get(run, 0), config.runtime.ranks or 0)
        return [
            f"{run}: runtime.ranks: {ranks}, but a stage has at most {most} here; more on one machine: --set-resources "
            f"train:ranks={ranks}; on Slurm: nodes of train in profiles/slurm/profile.yaml, or ranks and gres of larger nodes"
            for run, ranks in wanted.items()
            if ranks > most
        ]

    def check_shares(self, configs: Mapping[Stage, Any]) -> None:
        """Raise ValueError for a stage whose processes cannot share the rows of a step equally."""
        for stage, config in configs.items():
            rows, processes = config.recipe.global_batch, prod(self.processes(config))
            if rows % processes:
                fewer = max(few for few in range(1, self.limits.ranks + 1) if rows % few == 0)
                raise ValueError(
                    f"{'/'.join(stage)}: recipe.global_batch: {rows} rows cannot be shared equally by {processes} processes; "
                    f"set it to {rows + -rows % processes}, or runtime.ranks to {fewer}"
                )
