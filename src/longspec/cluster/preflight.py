"""Check in minutes, on an allocated node or several, what has stopped jobs of days: GPUs, versions, all-reduce, memory, disk.

Every rank of a launcher runs it; without one it is the only rank. Ranks exchange what they find through a key-value store,
which works where a collective does not. Rank 0 judges and prints it; with 1 it ends when a check failed.
"""

import argparse
import json
import os
import shutil
import socket
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from longspec.atomic_files import write_json
from longspec.config import Recipe, Runtime, load, plain, processes_of
from longspec.distributed import Ranks, end_at_once, find_ranks, share_global_batch
from longspec.models.target import resolve_dtype
from longspec.process_group import join, own_device
from longspec.shown import one_line
from longspec.slurm import own_job
from longspec.train.estimate.memory import Setup, estimate, gib, memory_of, out_of_memory, peak, setup_of
from longspec.train.estimate.plan import disk_bytes, read_target
from longspec.train.stage_folder import is_trained
from longspec.train.trackers import is_installed

OK, WARN, FAIL = "ok", "warn", "fail"
VERSIONS_OF = ("longspec", "torch", "transformers", "deepspeed", "tokenizers", "numpy", "flash-attn")
NETWORK = "NCCL_DEBUG=INFO tells the way that is taken; name the network with NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
EXACT = 1000  # elements whose sum is checked
BYTES = {"cuda": 256 * 2**20, "cpu": 4 * 2**20}  # of the measured all-reduce


@dataclass(frozen=True)
class Finding:
    """Hold the result of one check, and how to fix what is wrong."""

    level: str
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Facts:
    """Hold a rank's facts, which all others get; memory in bytes."""

    host: str
    versions: dict[str, str]
    gpus: int = 0  # GPUs that it sees
    gpu: str = ""  # the name of its own GPU
    memory: int = 0
    host_memory: int = 0


def own_facts(ranks: Ranks, node_mem: int) -> Facts:
    """Return this rank's facts. node_mem: MB of a node that a Slurm job may take."""
    versions = {name: version(name) if is_installed(name) else "not installed" for name in VERSIONS_OF}
    versions["python"] = sys.version.split()[0]
    gpus, gpu, memory = torch.cuda.device_count() if torch.cuda.is_available() else 0, "", 0
    if ranks.local_rank < gpus:
        gpu, memory = torch.cuda.get_device_name(ranks.local_rank), memory_of(own_device(ranks))
    return Facts(socket.gethostname(), versions, gpus, gpu, memory, host_memory(node_mem))


def host_memory(node_mem: int) -> int:
    """Return the bytes of main memory that this job may take on its node: node_mem MB at most under Slurm, else all of it.

    The executor removes Slurm's own variables.
    """
    everything = memory_of(torch.device("cpu"))
    return min(node_mem * 2**20, everything) if own_job() else everything


def exchange(store: Any, key: str, ranks: Ranks, content: Any) -> list[Any]:
    """Return what every rank sets under a key. Raises ValueError that names the first rank that sets nothing in time."""
    store.set(f"preflight/{key}/{ranks.rank}", json.dumps(content))
    found = []
    for rank in range(ranks.world_size):
        try:
            found.append(json.loads(store.get(f"preflight/{key}/{rank}")))
        except dist.DistStoreError:
            raise ValueError(f"rank {rank} of {ranks.world_size} has told no {key} in time; see its own log") from None
    return found


def all_reduce(ranks: Ranks, minutes: float) -> Finding:
    """Add up over all ranks, as they will when they train: a sum that is known, then a large one, whose speed is measured."""
    device = join(ranks, minutes)
    # A stage has such a group too, for what its ranks agree on.
    control = dist.new_group(backend="gloo", timeout=timedelta(minutes=minutes))
    dist.all_reduce(torch.ones(1), group=control)
    vector = torch.arange(EXACT, device=device) * (ranks.rank + 1)
    dist.all_reduce(vector)
    world_size = ranks.world_size
    wrong = int((vector != torch.arange(EXACT, device=device) * (world_size * (world_size + 1) // 2)).sum())
    if wrong:
        return Finding(FAIL, f"{wrong} of {EXACT} sums over all ranks are wrong", "take the node out, and tell its keepers")
    large = torch.zeros(BYTES[device.type] // 4, device=device)
    synchronize = torch.cuda.synchronize if device.type == "cuda" else dist.barrier
    for _ in range(2):  # the first one opens the connections
        synchronize()
        began = time.perf_counter()
        dist.all_reduce(large)
        synchronize()
    seconds = time.perf_counter() - began
    moved = 2 * (world_size - 1) / world_size * BYTES[device.type] / seconds / 1e9
    speed = f"{BYTES[device.type] >> 20} MiB in {seconds * 1e3:.1f} ms" + (f", bus {moved:.2f} GB/s" if world_size > 1 else "")
    return Finding(OK, f"{dist.get_backend()} over {world_size} ranks, sums exact; {speed}")


def tried_all_reduce(ranks: Ranks, seconds: float) -> Finding:
    """Return what the all-reduce finds, or that it fails, or does not end in so many seconds.

    It has a thread of its own and twice the time: NCCL kills a process at its timeout, and nobody would tell the cure.
    """
    try:
        return ThreadPoolExecutor(1).submit(all_reduce, ranks, seconds / 30).result(seconds)
    except (RuntimeError, TimeoutError) as error:
        return Finding(FAIL, f"{type(error).__name__}: {str(error) or f'it has not ended in {seconds:g} s'}", NETWORK)


def check_versions(facts: list[Facts]) -> Finding:
    """Fail if ranks run different packages."""
    of_ranks = {name: {each.host: each.versions[name] for each in facts} for name in facts[0].versions}
    wrong = [f"{name} {by_host}" for name, by_host in of_ranks.items() if len({*by_host.values()}) > 1]
    if wrong:
        return Finding(FAIL, "; ".join(wrong), "use one environment, on a file system that all nodes see")
    return Finding(OK, ", ".join(f"{name} {number}" for name, number in facts[0].versions.items()))


def check_gpus(facts: list[Facts], expected: int) -> Finding:
    """Fail if a node has too few GPUs; warn if there are none at all, or several models."""
    devices = f"CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')} on {facts[0].host}"
    fix = f"{devices}, torch {torch.__version__} is for CUDA {torch.version.cuda}; ask Slurm for the GPUs (gres: gpu:N)"
    if not expected and not any(each.gpus for each in facts):
        return Finding(WARN, "no GPU: gloo on CPUs", f"nothing where that is meant; else {fix}")
    ranks = Counter(each.host for each in facts)
    few = {each.host: each.gpus for each in facts if each.gpus < max(expected, ranks[each.host])}
    if few:
        seen = "; ".join(f"{gpus} GPUs seen on {host}, {max(expected, ranks[host])} needed" for host, gpus in few.items())
        return Finding(FAIL, seen, fix)
    models = {each.host: each.gpu for each in facts}
    if len({*models.values()}) > 1:
        return Finding(WARN, f"{models}", "the slowest sets the pace: ask for one model (gres: gpu:MODEL:N)")
    return Finding(OK, f"{facts[0].gpus} x {facts[0].gpu}, {gib(facts[0].memory)} each")


def check_needs(
    target: str, facts: list[Facts], stages: dict[str, tuple[Any, Any]], device: torch.device, out: Path
) -> dict[str, Finding]:
    """Check memory and disk against what all stages need. A target or global batch that no stage can have is a finding too.

    stages: recipe and runtime of each stage, by its folder in `out`.
    """
    nodes, needs, name = len({each.host for each in facts}), {}, ""
    try:
        config = read_target(target)
        for name, (recipe, runtime) in stages.items():
            taken, ranks = processes_of(recipe, runtime, nodes, len(facts) // nodes)
            micro_batch, _ = share_global_batch(recipe.global_batch, runtime.micro_batch, taken * ranks)
            dtype = resolve_dtype(recipe.precision)
            needs[name] = ranks, setup_of(config, recipe, runtime, micro_batch, taken * ranks, dtype, device)
    except ValueError as error:
        where = f"stage {name}: " if name else ""
        return {"memory": Finding(FAIL, f"{where}{error}"), "disk": check_disk(out, 0)}
    unfinished = [setup for name, (_, setup) in needs.items() if not is_trained(out / name, plain(stages[name][0]))]
    disk = check_disk(out, sum(map(disk_bytes, unfinished)))
    return {"memory": check_memory(facts, needs), "disk": disk}


def check_memory(facts: list[Facts], needs: dict[str, tuple[int, Setup]]) -> Finding:
    """Fail if a stage, by the project's own estimate, does not fit the GPUs or the main memory of the nodes.

    needs: for each stage its processes on a node, and its setup. Under Slurm a stage of fewer processes gets their share of the
    main memory, as the workflow's own jobs ask for it.
    """
    largest = len(facts) // len({each.host for each in facts})
    host_memory, told = min(each.host_memory for each in facts), []
    for stage, (ranks, setup) in needs.items():
        items, on_gpu = estimate(setup), setup.device.type == "cuda"
        host = host_memory * ranks // largest if own_job() else host_memory
        device = min(each.memory for each in facts) if on_gpu else host // ranks
        here, there = peak(items), peak(items, on_host=True) * ranks
        if here > device:
            return Finding(FAIL, f"stage {stage}: {out_of_memory(setup, device)}", "change one of these settings")
        if there + (0 if on_gpu else here * ranks) > host:
            found = f"stage {stage}: the ranks of a node take {gib(there)} of its main memory, of which the job has {gib(host)}"
            more = "raise node_mem in the profile" if own_job() else "set fewer runtime.ranks"  # a job of fewer has their share
            others = "runtime.target: partitioned or runtime.deepspeed.offload_optimizer: none"
            return Finding(FAIL, found, f"{more}, or set {others}")
        of_host = f", those of its node {gib(there)} of the host's {gib(host)}" if there else ""
        told.append(f"{stage} {gib(here)} of {gib(device)}{of_host}")
    return Finding(OK, f"each rank takes at most: {'; '.join(told)}")


def check_disk(out: Path, needed: int) -> Finding:
    """Fail if there is no room for the `needed` bytes that all unfinished stages leave."""
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


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog="python -m longspec.cluster preflight", description=__doc__)
    parser.add_argument("--recipe", type=Path, nargs="+", required=True, help="recipe.yaml of each stage")
    parser.add_argument("--runtime", type=Path, nargs="+", required=True, help="runtime.yaml of each stage")
    parser.add_argument("--target", required=True, help="target_manifest.json")
    parser.add_argument("--out", type=Path, required=True, help="the folder below which the stages will write")
    parser.add_argument("--gpus-expected", type=int, default=0, help="GPUs of each node")
    parser.add_argument("--node-mem", type=int, default=10**9, help="MB of a node that the Slurm job may take; default: all")
    parser.add_argument("--report", type=Path, help="the findings as JSON")
    parser.add_argument("--seconds", type=float, default=120, help="the longest wait for other ranks; default: %(default)g")
    return parser


def run(options: argparse.Namespace, ranks: Ranks) -> int:
    """Run this rank's checks; return the exit code. Rank 0 judges what they find: the others return 0.

    Raises ValueError if stages cannot be read, or if a rank does not come or falls silent.
    """
    files = zip(options.recipe, options.runtime, strict=True)
    stages = {"/".join(recipe.parent.parts[-2:]): (load(recipe, Recipe), load(runtime, Runtime)) for recipe, runtime in files}
    store, _, _ = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=options.seconds))))
    facts = [Facts(**each) for each in exchange(store, "facts", ranks, asdict(own_facts(ranks, options.node_mem)))]
    gpus = check_gpus(facts, options.gpus_expected)
    reduced = Finding(FAIL, "not run: GPUs are missing")
    if gpus.level != FAIL:
        reduced = tried_all_reduce(ranks, options.seconds / 2)  # the others wait twice as long for this rank
    told = [Finding(**each) for each in exchange(store, "findings", ranks, asdict(reduced))]
    if not ranks.is_main:
        return 0
    findings = {"versions": check_versions(facts), "gpus": gpus, "all-reduce": worst(told, facts)}
    device = own_device(ranks) if gpus.level != FAIL else torch.device("cpu")
    findings |= check_needs(options.target, facts, stages, device, options.out)
    if gpus.level == FAIL:
        findings["memory"] = Finding(WARN, "not run: GPUs are missing")
    return concluded(options.report, facts, findings)


def concluded(report: Path | None, facts: list[Facts], findings: dict[str, Finding]) -> int:
    """Print the findings and write the report; return the exit code. Raises OSError if the report cannot be written."""
    for name, finding in findings.items():
        print(f"{finding.level:4s}  {name:10s}  {finding.found}")
        if finding.fix:
            print(f"{'':4s}  {'':10s}  do: {finding.fix}")
    counts = Counter(finding.level for finding in findings.values())
    summary = f"preflight: {counts[OK]} ok, {counts[WARN]} warnings, {counts[FAIL]} failed"
    print(summary, flush=True)
    if report is not None:
        checks = [{"name": name} | asdict(finding) for name, finding in findings.items()]
        write_json(report, {"summary": summary, "checks": checks, "ranks": [asdict(each) for each in facts]})
    return int(counts[FAIL] > 0)


def main(argv: list[str]) -> int:
    """Run this rank and end the process at once: a broken process group must not keep it."""
    options, ranks = parser().parse_args(argv), find_ranks()
    try:
        code = run(options, ranks)
    except (ValueError, OSError, dist.DistError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        code = 1
    end_at_once(code)
