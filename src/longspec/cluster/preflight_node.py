"""Preflight checks of the nodes: whether all ranks came and are alike, their limits, GPUs, and sums over all of them."""

import importlib
import os
import resource
import shutil
import time
from pathlib import Path
from threading import Thread

import torch
import torch.distributed as dist

from longspec.cluster.preflight_ranks import FAIL, OK, WARN, Finding, Place
from longspec.train.estimate.memory import GIB
from longspec.train.estimate.memory_check import gib

SKEW = 5.0  # seconds between two clocks, the ranks' ways to their answers included
FILES, SHARED_MEMORY = 4096, GIB
EXACT = 1000  # elements whose sum is checked
BYTES_GPU, BYTES_CPU = 256 * 2**20, 4 * 2**20  # of the measured all-reduce
REPEATS = 3


def ranks(place: Place) -> Finding | None:
    """Did all ranks come?"""
    if not place.ranks.is_main:
        return None
    if place.missing:
        found = f"{place.names(place.missing)} of {place.ranks.world_size} did not come within {place.seconds:.0f} s"
        fix = "see that rank's own log; came: " + place.names(place.facts)
        return Finding(FAIL, found, fix)
    hosts = list(dict.fromkeys(facts.host for facts in place.facts.values()))
    return Finding(OK, f"all {place.ranks.world_size} came, on {', '.join(hosts)}")


def _by_value(place: Place, values: dict[int, str]) -> str:
    """Which ranks have which value."""
    return "; ".join(
        f"{value or 'none'} on {place.names(rank for rank in values if values[rank] == value)}"
        for value in dict.fromkeys(values.values())
    )


def versions(place: Place) -> Finding | None:
    """Do all ranks run the same packages?"""
    if not place.ranks.is_main:
        return None
    own = place.facts[0].versions
    wrong = []
    for package in own:
        of_ranks = {rank: facts.versions[package] for rank, facts in place.facts.items()}
        if len(set(of_ranks.values())) > 1:
            wrong.append(f"{package} {_by_value(place, of_ranks)}")
    if wrong:
        return Finding(FAIL, "; ".join(wrong), "use one environment, on a file system that all nodes see")
    return Finding(OK, ", ".join(f"{package} {version}" for package, version in own.items()))


def clock(place: Place) -> Finding | None:
    """Do the nodes' clocks agree? Files made on one are compared by time with those of another."""
    if not place.ranks.is_main:
        return None
    apart = {rank: facts.time - place.facts[0].time for rank, facts in place.facts.items()}
    wrong = [rank for rank in apart if abs(apart[rank]) > SKEW]
    if wrong:
        found = f"up to {max(map(abs, apart.values())):.0f} s from rank 0's: {place.names(wrong)}"
        return Finding(WARN, found, "have chrony or ntpd set the clocks")
    return Finding(OK, f"{time.strftime('%Y-%m-%d %H:%M:%S %z')}, nodes within {SKEW:.0f} s")


def limits(place: Place) -> Finding | None:
    """Does this node allow enough open files and shared memory? HF_HUB_OFFLINE is shown too."""
    if not place.is_first_of_node:
        return None
    found, fixes = [], []
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    found.append(f"{files} open files")
    if 0 <= files < FILES:
        fixes.append(f"`ulimit -n 65536` before the job (workers and NCCL take over {FILES})")
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared)
        found.append(f"/dev/shm {gib(size.free)} free of {gib(size.total)}")
        if size.free < SHARED_MEMORY and len(place.neighbours) > 1:
            fixes.append(f"a /dev/shm of {gib(SHARED_MEMORY)} or more, in a container --shm-size (NCCL takes it between GPUs)")
    found.append(f"HF_HUB_OFFLINE {os.environ.get('HF_HUB_OFFLINE', 'not set')}")
    return Finding(WARN if fixes else OK, ", ".join(found), "; ".join(fixes))


def gpus(place: Place) -> Finding:
    """Is there a GPU for each rank of the node?"""
    seen, names = place.facts[place.ranks.rank].gpus, {rank: facts.gpu for rank, facts in place.facts.items()}
    devices = f"CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}"
    fix = f"{devices}: ask Slurm for the GPUs (gres: gpu:N for N ranks a node)"
    if not seen and not any(names.values()):
        if place.gpus_expected:
            driver = f"nvidia-smi {'is' if shutil.which('nvidia-smi') else 'is not'} there, torch is {torch.__version__}"
            return Finding(FAIL, f"no GPU, {place.gpus_expected} expected", f"{fix}; {driver}, for CUDA {torch.version.cuda}")
        return Finding(WARN, "no GPU: gloo on CPUs", f"nothing where that is meant; else {fix}")
    wanted = max(len(place.neighbours), place.gpus_expected)
    if seen < wanted:
        return Finding(FAIL, f"{seen} GPUs seen, {wanted} needed", fix)
    if len(set(names.values())) > 1:
        return Finding(WARN, _by_value(place, names), "the slowest sets the pace: ask for one model (gres: gpu:MODEL:N)")
    return Finding(OK, f"{seen} x {names[place.ranks.rank]}, {gib(place.facts[place.ranks.rank].memory)} each")


def collective(place: Place) -> Finding:
    """Do all ranks add up as they will when they train? Names those that do not."""
    if place.missing:
        return Finding(WARN, "not run: ranks are missing")
    ended: list[Finding] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            ended.append(_all_reduce(place))
        except Exception as error:
            errors.append(error)

    until = time.monotonic() + place.seconds
    place.tell("begun", True)
    behind = set(place.facts) - place.hear("begun", place.facts, place.seconds).keys()
    if behind:
        return Finding(FAIL, f"{place.names(sorted(behind))} did not begin it within {place.seconds:.0f} s", "see its log")
    thread = Thread(target=run, daemon=True)  # NCCL waits without an end for a rank that does not answer
    thread.start()
    thread.join(max(place.seconds / 4, until - time.monotonic()))
    if ended:
        place.tell("summed", True)
        return ended[0]
    behind = set(place.facts) - place.hear("summed", place.facts, 0).keys() - ({place.ranks.rank} if errors else set())
    fix = "NCCL_DEBUG=INFO tells the way that is taken; name the network with NCCL_SOCKET_IFNAME (GLOO_SOCKET_IFNAME on CPUs)"
    if errors:
        return Finding(FAIL, f"{type(errors[0]).__name__}: {errors[0]}", fix)
    return Finding(FAIL, f"not done after {place.seconds:.0f} s by {place.names(sorted(behind))}", fix)


def _all_reduce(place: Place) -> Finding:
    """A sum that is known, and the speed of a large one."""
    engine = importlib.import_module("longspec.train.engine")
    device, _ = engine.boot(place.ranks, place.runtimes[0].timeout_minutes)
    world_size = place.ranks.world_size
    vector = torch.arange(EXACT, device=device) * (place.ranks.rank + 1)
    dist.all_reduce(vector)
    expected = torch.arange(EXACT, device=device) * (world_size * (world_size + 1) // 2)
    if not torch.equal(vector, expected):
        wrong = int((vector != expected).sum())
        return Finding(FAIL, f"{wrong} of {EXACT} sums over all ranks are wrong", "take the node out, and tell its keepers")
    size = BYTES_GPU if device.type == "cuda" else BYTES_CPU
    large = torch.zeros(size // 4, device=device)
    dist.all_reduce(large)
    synchronize = torch.cuda.synchronize if device.type == "cuda" else dist.barrier
    synchronize()
    began = time.perf_counter()
    for _ in range(REPEATS):
        dist.all_reduce(large)
    synchronize()
    seconds = (time.perf_counter() - began) / REPEATS
    moved = 2 * (world_size - 1) / world_size * size / seconds / 1e9
    speed = f"{size >> 20} MiB in {seconds * 1e3:.1f} ms" + (f", bus {moved:.2f} GB/s" if world_size > 1 else "")
    return Finding(OK, f"{dist.get_backend()} over {world_size} ranks, sums exact; {speed}")
