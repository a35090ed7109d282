"""What a training job is made of before its first step: rows, steps, target and draft, and what identifies them."""

import json
from typing import Any

import torch
from omegaconf import OmegaConf

from longspec.artefact import read_json, sha256_file, sha256_text
from longspec.config import PARTITIONED, Draft, dataclass_from, instantiate
from longspec.data.batches import steps_per_epoch
from longspec.data.shards import PackedRows
from longspec.train.arguments import Job
from longspec.train.models.attention import choose
from longspec.train.models.glide import Glide
from longspec.train.models.target import head_width
from longspec.train.models.target_config import read_target_config
from longspec.train.models.weights import draft_weights_file
from longspec.train.partition import load_partitioned


def identity_of(job: Job, rows: PackedRows, dtype: torch.dtype) -> dict[str, Any]:
    """What a checkpoint must share with the job that goes on from it."""
    weights = None if job.init_weights is None else sha256_file(draft_weights_file(job.init_weights))
    return {
        "recipe": OmegaConf.to_container(job.recipe, resolve=True),
        "data": rows.data_hash,
        # Its files alone: the manifest also says how long the target was trained.
        "target": sha256_text(json.dumps(read_json(job.target)["files"], sort_keys=True)),
        "init_weights": weights,
        "dtype": str(dtype),
    }


def build_glide(job: Job, device: torch.device, dtype: torch.dtype) -> Glide:
    """The frozen target and its draft, fresh (seeded) or from the given weights."""
    path = read_json(job.target)["path"]
    attention = choose(job.runtime.attention, device, dtype, head_width(read_target_config(path)))
    states = load_partitioned(path, dtype, attention) if job.runtime.target == PARTITIONED else None
    torch.manual_seed(job.recipe.seed)
    glide = instantiate(
        job.recipe.model,
        target_model_path=path,
        glide_path=None if job.init_weights is None else str(job.init_weights),
        dtype=dtype,
        draft=dataclass_from(Draft, job.recipe.draft),
        states=states,
        attention=attention,
    )
    glide.states.chunk = job.runtime.target_chunk
    return glide.to(device)


def open_rows(job: Job) -> PackedRows:
    """The packed rows. Raises ValueError when they were packed in another way than the recipe says."""
    rows = PackedRows(job.data)
    for name in ("sequence_length", "collation", "overlong"):
        packed, wanted = rows.manifest[name], job.recipe.data[name]
        if packed != wanted:
            raise ValueError(f"{job.data}: {name}: packed with {packed}, recipe.data.{name} is {wanted}; pack the data again")
    return rows


def total_steps(job: Job, rows: PackedRows) -> int:
    """Optimizer steps of the whole stage. Raises ValueError when the data does not fill one global batch."""
    per_epoch = steps_per_epoch(len(rows), job.recipe.global_batch)
    return job.recipe.steps or per_epoch * job.recipe.epochs
