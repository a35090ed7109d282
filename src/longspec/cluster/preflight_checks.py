"""Judge on rank 0, by the facts of all ranks and the stages' estimates, what a preflight finds."""

import os
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longspec.distributed import share_global_batch, sharing_ranks
from longspec.models.target import resolve_dtype
from longspec.train.estimate.memory import GPU_OVERHEAD, Setup, estimate, gib, out_of_memory, peak, setup_of
from longspec.train.estimate.plan import disk_bytes, read_target

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class Finding:
    """The result of one check, and how to fix what is wrong."""

    level: str
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Facts:
    """Facts about a rank that all others get; memory in bytes."""

    host: str
    versions: dict[str, str]
    gpus: int = 0  # that it sees
    gpu: str = ""  # the name of its own
    memory: int = 0
    free: int = 0
    host_memory: int = 0


def by_value(facts: list[Facts], values: list[str]) -> str:
    """Say which hosts have which of the ranks' values."""
    hosts: dict[str, list[str]] = {}
    for each, value in zip(facts, values, strict=True):
        hosts.setdefault(value, []).append(each.host)
    return "; ".join(f"{value or 'none'} on {', '.join(dict.fromkeys(names))}" for value, names in hosts.items())


def check_versions(facts: list[Facts]) -> Finding:
    """Fail where ranks run other packages."""
    own = facts[0].versions
    of_ranks = {name: [each.versions[name] for each in facts] for name in own}
    wrong = [f"{name} {by_value(facts, numbers)}" for name, numbers in of_ranks.items() if len(set(numbers)) > 1]
    if wrong:
        return Finding(FAIL, "; ".join(wrong), "use one environment, on a file system that all nodes see")
    return Finding(OK, ", ".join(f"{name} {number}" for name, number in own.items()))


def check_gpus(facts: list[Facts], expected: int) -> Finding:
    """Fail where a node has too few GPUs; warn where there are none at all, and of several models."""
    devices = f"CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')} on {facts[0].host}"
    fix = f"{devices}, torch {torch.__version__} is for CUDA {torch.version.cuda}; ask Slurm for the GPUs (gres: gpu:N)"
    if not expected and not any(each.gpus for each in facts):
        return Finding(WARN, "no GPU: gloo on CPUs", f"nothing where that is meant; else {fix}")
    ranks = Counter(each.host for each in facts)
    few = {each.host: each.gpus for each in facts if each.gpus < max(expected, ranks[each.host])}
    if few:
        seen = "; ".join(f"{gpus} GPUs seen on {host}, {max(expected, ranks[host])} needed" for host, gpus in few.items())
        return Finding(FAIL, seen, fix)
    models = [each.gpu for each in facts]
    if len(set(models)) > 1:
        return Finding(WARN, by_value(facts, models), "the slowest sets the pace: ask for one model (gres: gpu:MODEL:N)")
    return Finding(OK, f"{facts[0].gpus} x {facts[0].gpu}, {gib(facts[0].memory)} each")


def check_needs(
    target: str, facts: list[Facts], stages: list[tuple[Any, Any]], device: torch.device, out: Path
) -> dict[str, Finding]:
    """Hold what all stages need against memory and disk. A target or global batch that no stage can have is a finding too."""
    nodes, setups = len({each.host for each in facts}), {}
    try:
        config = read_target(target)
        for recipe, runtime in stages:
            world_size = nodes * sharing_ranks(recipe.global_batch, nodes, len(facts) // nodes)
            micro_batch, _ = share_global_batch(recipe.global_batch, runtime.micro_batch, world_size)
            dtype = resolve_dtype(recipe.precision)
            setups[recipe.stage] = setup_of(config, recipe, runtime, micro_batch, world_size, dtype, device)
    except ValueError as error:
        return {"memory": Finding(FAIL, str(error)), "disk": check_disk(out, 0)}
    return {"memory": check_memory(facts, setups), "disk": check_disk(out, sum(map(disk_bytes, setups.values())))}


def check_memory(facts: list[Facts], setups: dict[str, Setup]) -> Finding:
    """Fail where a stage, by the project's own estimate, does not fit the GPUs or the main memory of the nodes."""
    nodes, host, needs = len({each.host for each in facts}), min(each.host_memory for each in facts), []
    for stage, setup in setups.items():
        items, ranks, on_gpu = estimate(setup), setup.world_size // nodes, setup.device.type == "cuda"
        device = min(each.memory for each in facts) if on_gpu else host // ranks
        here, there = peak(items), peak(items, on_host=True) * ranks
        if here > device:
            return Finding(FAIL, f"stage {stage}: {out_of_memory(setup, device)}", "change one of these settings")
        if there + (0 if on_gpu else here * ranks) > host:
            found = f"stage {stage}: the ranks of a node take {gib(there)} of its main memory, of which the job has {gib(host)}"
            return Finding(FAIL, found, "ask for more (mem_mb), or set runtime.deepspeed.offload_optimizer: none")
        needs.append(f"{stage} {gib(here)}" + (f" and on the host {gib(there)}" if there else ""))
    found = f"{'; '.join(needs)}; a rank has {gib(device)}, its node {gib(host)}"
    taken = [f"{rank} ({each.host})" for rank, each in enumerate(facts) if each.memory - each.free > GPU_OVERHEAD]
    if taken:
        found += f"; others hold a part of the GPU of rank {', '.join(taken)}"
        return Finding(WARN, found, "nvidia-smi shows whom to end")
    return Finding(OK, found)


def check_disk(out: Path, needed: int) -> Finding:
    """Fail where there is no room for what all stages leave."""
    place = next(path for path in (out, *out.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(place).free
    found = f"{gib(free)} free at {out}, the stages leave up to {gib(needed)}"
    if free < needed:
        return Finding(FAIL, found, f"give the run a folder with room (quota, df -h {out})")
    return Finding(OK, found)


def worst(findings: list[Finding], facts: list[Facts]) -> Finding:
    """Return the first failure among the ranks' findings, with its rank; else rank 0's."""
    failed = [(rank, finding) for rank, finding in enumerate(findings) if finding.level == FAIL]
    if not failed:
        return findings[0]
    rank, finding = failed[0]
    return Finding(FAIL, f"rank {rank} ({facts[rank].host}): {finding.found}", finding.fix)
