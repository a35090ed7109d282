"""Preflight checks of the nodes: whether all ranks came and are alike, and what they can compute, each and together."""

import importlib
import os
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from longspec import methods
from longspec.cluster.preflight_ranks import FAIL, NETWORK, OK, WARN, Finding, Place
from longspec.models.attention import backends, flash
from longspec.models.attention.visibility import Visibility
from longspec.models.losses import fused_loss, linear_cross_entropy
from longspec.models.precision import resolve_dtype
from longspec.models.target import head_width
from longspec.train.estimate.memory import GIB
from longspec.train.estimate.memory_check import gib

SKEW = 5.0  # seconds between two clocks, the ranks' ways to their answers included
FILES, SHARED_MEMORY = 4096, GIB
EXACT = 1000  # elements whose sum is checked
BYTES_GPU, BYTES_CPU = 256 * 2**20, 4 * 2**20  # of the measured all-reduce
REPEATS = 3
TRAIN = "pip install -c constraints.txt -e '.[train]'"
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
    """Do all ranks add up as they will when they train? One that hangs is ended as every check is."""
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


def optimizer(place: Place) -> Finding:
    """Does DeepSpeed import, does the optimizer run where it will stand, and can be compiled what must be?"""
    try:
        engine = importlib.import_module("longspec.train.engine")
    except ImportError as error:
        return Finding(FAIL, f"DeepSpeed does not import: {error}", TRAIN)
    wishes = {runtime.deepspeed.offload_optimizer for runtime in place.runtimes}
    for device in {torch.device("cpu") if wish != "none" else place.device for wish in wishes}:
        weight = torch.ones(8, device=device, requires_grad=True)
        weight.grad = torch.ones_like(weight)
        torch.optim.AdamW([weight], lr=0.5, fused=True).step()  # the one that engine.deepspeed_config asks for
        assert bool((weight < 1).all()), f"torch's fused AdamW does nothing on a {device}"
    if "nvme" in wishes:
        return _nvme(place, engine)
    return Finding(OK, f"DeepSpeed, torch's fused AdamW (offload: {', '.join(sorted(wishes))}); nothing to compile")


def _nvme(place: Place, engine: Any) -> Finding:
    """Can DeepSpeed's operator for disks be compiled, and is the disk's folder there?"""
    lacks = [name for name in ("c++", "ninja") if shutil.which(os.environ.get("CXX", name) if name == "c++" else name) is None]
    if not engine.deepspeed.ops.__compatible_ops__.get("async_io", False):
        lacks.append("libaio with its headers")
    folders = [Path(runtime.deepspeed.nvme_path) for runtime in place.runtimes if runtime.deepspeed.nvme_path]
    lacks += [f"a folder {folder} that can be written" for folder in folders if not os.access(folder, os.W_OK)]
    if lacks:
        fix = "install or make it on the nodes, or set runtime.deepspeed.offload_optimizer: cpu"
        return Finding(FAIL, f"offload_optimizer: nvme lacks {', '.join(lacks)}", fix)
    return Finding(OK, f"DeepSpeed compiles its operator for {', '.join(map(str, folders))} when the job starts")


def _result(backend: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Attention by a backend, and its gradients."""
    q_BNSD, k_BKTD, v_BKTD = leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    result = backends.attend(q_BNSD, k_BKTD, v_BKTD, Visibility(window=100), q_BNSD.shape[-1] ** -0.5, backend)
    return [result.detach(), *torch.autograd.grad(result.float().square().sum(), leaves)]


def _attention_by(place: Place, wanted: str, precision: str) -> Finding:
    """Which backend a setting resolves to, and whether its output in the stage's dtype is sdpa's in float32."""
    dtype, width = resolve_dtype(precision), head_width(place.config)
    backend = backends.choose(wanted, place.device, dtype, width)
    torch.manual_seed(0)
    tensors = [torch.randn(1, heads, 256, width, device=place.device, dtype=dtype) for heads in (4, 2, 2)]
    pairs = zip(_result(backend, tensors), _result(backends.SDPA, [each.float() for each in tensors]), strict=True)
    off = max(float((own.float() - exact).norm() / exact.norm()) for own, exact in pairs)
    found = f"{wanted} is {backend}, off by {off:.1e} in {dtype}".replace("torch.", "")
    if off > TOLERANCE[dtype]:
        return Finding(FAIL, found, f"set runtime.attention: sdpa or recipe.precision: fp32; flash-attn anew: {flash.INSTALL}")
    return Finding(OK, found)


def attention(place: Place) -> Finding:
    """Which backend each stage's attention takes, and whether it computes in the stage's dtype."""
    kinds = dict.fromkeys((runtime.attention, recipe.precision) for recipe, runtime in place.stages)
    findings = [_attention_by(place, *kind) for kind in kinds]
    wrong = [finding for finding in findings if finding.level == FAIL]
    return wrong[0] if wrong else Finding(OK, "; ".join(dict.fromkeys(finding.found for finding in findings)))


def loss(place: Place) -> Finding:
    """Is Liger's fused loss there where it would be taken, and does it compute?"""
    hard = [recipe.stage for recipe in place.recipes if not methods.soft_labels(recipe)]
    if place.device.type != "cuda" or not hard:
        return Finding(OK, "chunked; Liger is for hard labels on GPUs")
    if fused_loss("cuda") is None:
        found = f"Liger is not installed; {', '.join(hard)} take the chunked loss, which is slower"
        return Finding(WARN, found, flash.INSTALL)
    torch.manual_seed(0)
    dtype = resolve_dtype(place.recipes[0].precision)
    hidden, weight = (torch.randn(rows, 64, device=place.device, dtype=dtype) for rows in (32, 128))
    labels = torch.arange(32, device=place.device)
    expected = torch.nn.functional.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum")
    off = float((linear_cross_entropy(hidden, None, weight, labels, "hard").draft - expected).abs() / expected)
    if off > TOLERANCE[torch.bfloat16]:
        return Finding(FAIL, f"Liger's loss is off by {off:.1e}", "pip uninstall liger-kernel: the chunked loss is taken then")
    return Finding(OK, f"Liger, off by {off:.1e}")
