"""Preflight checks of computing on this node: the optimizer, bfloat16, attention, the loss."""

import importlib
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from longspec import methods
from longspec.cluster.preflight_ranks import FAIL, OK, WARN, Finding, Place
from longspec.models.attention import backends, flash
from longspec.models.attention.visibility import Visibility
from longspec.models.losses import fused_loss, linear_cross_entropy
from longspec.models.precision import resolve_dtype
from longspec.models.target import head_width

TRAIN = "pip install -c constraints.txt -e '.[train]'"
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}


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


def bf16(place: Place) -> Finding:
    """Does bfloat16 compute, where a stage needs it?"""
    needed = [recipe.stage for recipe in place.recipes if resolve_dtype(recipe.precision) == torch.bfloat16]
    torch.manual_seed(0)
    left, right = torch.randn(2, 256, 256, device=place.device)
    exact = left @ right
    off = float(((left.bfloat16() @ right.bfloat16()).float() - exact).norm() / exact.norm())
    supported = place.device.type == "cpu" or torch.cuda.is_bf16_supported()
    used = f"used by {', '.join(needed)}" if needed else "used by no stage"
    if off < TOLERANCE[torch.bfloat16] and supported:
        return Finding(OK, f"a product of matrices is off by {off:.1e}; {used}")
    found = f"a product of matrices is off by {off:.1e}" if supported else "this GPU has no bfloat16"
    return Finding(FAIL if needed else WARN, f"{found}; {used}", "set recipe.precision: fp32, or take other GPUs")


def _choice(wanted: str, device: torch.device, dtype: torch.dtype, width: int) -> tuple[str, str]:
    """The backend, and what the choice says of its reason."""
    words: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            words.append(record.getMessage())

    log, kept = logging.getLogger(backends.__name__), Kept()
    before = log.level
    log.addHandler(kept)
    log.setLevel(logging.INFO)
    backends.fastest.cache_clear()
    try:
        backend = backends.choose(wanted, device, dtype, width)
    finally:
        log.removeHandler(kept)
        log.setLevel(before)
    return backend, words[0].removeprefix("attention: ") if words else f"{wanted} as asked for"


def _result(backend: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Attention by a backend, and its gradients."""
    q_BNSD, k_BKTD, v_BKTD = leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    result = backends.attend(q_BNSD, k_BKTD, v_BKTD, Visibility(window=100), q_BNSD.shape[-1] ** -0.5, backend)
    return [result.detach(), *torch.autograd.grad(result.float().square().sum(), leaves)]


def attention_backend(place: Place, wanted: str, dtype: torch.dtype) -> Finding:
    """Checks which backend a setting resolves to, and that its output is that of sdpa."""
    width = head_width(place.config)
    backend, why = _choice(wanted, place.device, dtype, width)
    if backend not in (backends.FLASH, backends.FLEX):
        return Finding(OK, why)
    torch.manual_seed(0)
    tensors = [torch.randn(1, heads, 256, width, device=place.device, dtype=dtype) for heads in (4, 2, 2)]
    pairs = zip(_result(backend, tensors), _result(backends.SDPA, tensors), strict=True)
    off = max(float((own - other).float().norm() / other.float().norm()) for own, other in pairs)
    if off > TOLERANCE[dtype]:
        fix = f"set runtime.attention: sdpa, or install flash-attn anew: {flash.INSTALL}"
        return Finding(FAIL, f"{why}; it differs from sdpa by {off:.1e}", fix)
    return Finding(OK, f"{why}; forward and backward as sdpa's to {off:.1e}")


def attention_of(place: Place) -> Finding:
    """Which backend each stage's attention takes, and whether it computes."""
    kinds = dict.fromkeys((runtime.attention, resolve_dtype(recipe.precision)) for recipe, runtime in place.stages)
    findings = [attention_backend(place, *kind) for kind in kinds]
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
