"""Preflight checks of the nodes: whether all ranks came and are alike, and what they can compute, each and together."""

import importlib
import os
import shutil
import time

import torch
import torch.distributed as dist

from longspec.cluster.preflight_ranks import FAIL, NETWORK, OK, WARN, Finding, Place
from longspec.models.attention import backends, flash
from longspec.models.attention.visibility import Visibility
from longspec.models.target import head_width, resolve_dtype
from longspec.train.estimate.memory_check import gib

EXACT = 1000  # elements whose sum is checked
BYTES = {"cuda": 256 * 2**20, "cpu": 4 * 2**20}  # of the measured all-reduce
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}


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
    of_ranks = {package: {rank: facts.versions[package] for rank, facts in place.facts.items()} for package in own}
    wrong = [f"{package} {_by_value(place, held)}" for package, held in of_ranks.items() if len(set(held.values())) > 1]
    if wrong:
        return Finding(FAIL, "; ".join(wrong), "use one environment, on a file system that all nodes see")
    return Finding(OK, ", ".join(f"{package} {version}" for package, version in own.items()))


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
    """Do all ranks add up as they will when they train, and how fast? One that hangs is ended as every check is."""
    if place.missing:
        return Finding(WARN, "not run: ranks are missing")
    try:
        return _all_reduce(place)
    except RuntimeError as error:
        return Finding(FAIL, f"{type(error).__name__}: {error}", NETWORK)


def _all_reduce(place: Place) -> Finding:
    """A sum that is known, and the speed of a large one."""
    engine = importlib.import_module("longspec.train.engine")
    device, _ = engine.boot(place.ranks, place.runtimes[0].timeout_minutes)
    world_size = place.ranks.world_size
    vector = torch.arange(EXACT, device=device) * (place.ranks.rank + 1)
    dist.all_reduce(vector)
    wrong = int((vector != torch.arange(EXACT, device=device) * (world_size * (world_size + 1) // 2)).sum())
    if wrong:
        return Finding(FAIL, f"{wrong} of {EXACT} sums over all ranks are wrong", "take the node out, and tell its keepers")
    large = torch.zeros(BYTES[device.type] // 4, device=device)
    synchronize = torch.cuda.synchronize if device.type == "cuda" else dist.barrier
    for _ in range(2):  # the first opens the connections
        synchronize()
        began = time.perf_counter()
        dist.all_reduce(large)
        synchronize()
    seconds = time.perf_counter() - began
    moved = 2 * (world_size - 1) / world_size * BYTES[device.type] / seconds / 1e9
    speed = f"{BYTES[device.type] >> 20} MiB in {seconds * 1e3:.1f} ms" + (f", bus {moved:.2f} GB/s" if world_size > 1 else "")
    return Finding(OK, f"{dist.get_backend()} over {world_size} ranks, sums exact; {speed}")


def _result(backend: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Attention by a backend, and its gradients."""
    q_BNSD, k_BKTD, v_BKTD = leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    result = backends.attend(q_BNSD, k_BKTD, v_BKTD, Visibility(window=100), q_BNSD.shape[-1] ** -0.5, backend)
    return [result.detach(), *torch.autograd.grad(result.float().square().sum(), leaves)]


def attention(place: Place) -> Finding:
    """Which backend each stage's attention takes, and whether its output in the stage's dtype is sdpa's in float32."""
    found, width = [], head_width(place.config)
    for wanted, precision in dict.fromkeys((runtime.attention, recipe.precision) for recipe, runtime in place.stages):
        dtype = resolve_dtype(precision)
        backend = backends.choose(wanted, place.device, dtype, width)
        torch.manual_seed(0)
        tensors = [torch.randn(1, heads, 256, width, device=place.device, dtype=dtype) for heads in (4, 2, 2)]
        pairs = zip(_result(backend, tensors), _result(backends.SDPA, [each.float() for each in tensors]), strict=True)
        off = max(float((own.float() - exact).norm() / exact.norm()) for own, exact in pairs)
        found.append(f"{wanted} is {backend}, off by {off:.1e} in {dtype}".replace("torch.", ""))
        if off > TOLERANCE[dtype]:
            fix = f"set runtime.attention: sdpa or recipe.precision: fp32; flash-attn anew: {flash.INSTALL}"
            return Finding(FAIL, found[-1], fix)
    return Finding(OK, "; ".join(found))
