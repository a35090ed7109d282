"""Sets up a training job before its first step: rows, number of steps, target and draft, and the identity of all these."""

import json
from pathlib import Path
from typing import Any

import torch

from longspec.atomic_files import read_json, sha256_file, sha256_text
from longspec.config import PARTITIONED, plain
from longspec.data.batches import steps_per_epoch
from longspec.data.pack.arrow_shards import PackedRows
from longspec.draft_vocabulary import DraftVocabulary
from longspec.methods import check_family_named, method_of, settings_of, vocabulary_for
from longspec.methods.draft_files import draft_weights_file
from longspec.models.attention.backends import choose
from longspec.models.target import head_width, load_target
from longspec.models.target_config import read_target_config
from longspec.states.forward import STATES_ATTENTION, TargetStates
from longspec.states.partitioned import load_partitioned
from longspec.train.arguments import Job


def identity_of(job: Job, rows: PackedRows, dtype: torch.dtype, vocabulary: DraftVocabulary | None) -> dict[str, Any]:
    """The identity of a training job: a checkpoint must have the same one to be resumed from."""
    weights = None if job.init_weights is None else sha256_file(draft_weights_file(job.init_weights))
    return {
        "recipe": plain(job.recipe),
        "data": rows.data_hash,
        # Its files alone: the manifest also says how long the target was trained.
        "target": sha256_text(json.dumps(read_json(job.target)["files"], sort_keys=True)),
        "init_weights": weights,
        "dtype": str(dtype),
    } | ({} if vocabulary is None else {"vocabulary": vocabulary.hash})


def read_vocabulary(job: Job, rows: PackedRows) -> DraftVocabulary | None:
    """The job's draft vocabulary; None where its draft proposes all tokens.

    Raises ValueError for a file that is missing, unwanted, torn, of another size, or of another tokenizer or target.
    """
    vocabulary = vocabulary_for(job.recipe, job.vocabulary)
    if vocabulary is not None:
        assert job.vocabulary is not None
        vocabulary.check_tokenizer(job.vocabulary, rows.manifest["tokenizer"], job.data)
        target = read_json(job.target)["path"]
        vocabulary.check_tokens(job.vocabulary, read_target_config(target).vocab_size, target)
    return vocabulary


def build_trainer(
    recipe: Any,
    runtime: Any,
    target_path: str,
    init_weights: Path | None,
    device: torch.device,
    dtype: torch.dtype,
    vocabulary: DraftVocabulary | None = None,
) -> Any:
    """The frozen target and its draft, fresh (seeded) or from the given weights: the method's DraftTrainer.

    Raises ValueError for a target that is not supported, not of the family that the recipe names or too small for the draft,
    and for an attention backend that cannot train here.
    """
    config = read_target_config(target_path)
    check_family_named(recipe, config.model_type, target_path)
    settings_of(recipe.method.name).fits(recipe, config.num_hidden_layers, config.vocab_size)
    attention = choose(runtime.attention, device, dtype, head_width(config))
    if runtime.target == PARTITIONED:
        states = load_partitioned(target_path, dtype, attention, runtime.target_chunk)
    else:
        states = TargetStates(load_target(target_path, config, dtype, STATES_ATTENTION), runtime.target_chunk, attention)
    method, settings = method_of(recipe, vocabulary)
    torch.manual_seed(recipe.seed)
    return method.trainer(states, settings, init_weights).to(device)


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
