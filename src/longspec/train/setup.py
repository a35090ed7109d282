"""Sets up a training job before its first step: rows, stored states, steps, target and draft, and the identity of these."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longspec.atomic_files import read_json, sha256_file
from longspec.config import OFFLINE, plain
from longspec.data.pack.arrow_shards import PackedRows
from longspec.data.replay import TrainedRows, open_replayed
from longspec.draft_vocabulary import DraftVocabulary
from longspec.methods import method_of, vocabulary_for
from longspec.methods.draft_files import draft_weights_file
from longspec.models.attention.backends import choose
from longspec.models.target import head_width
from longspec.models.target_config import read_target_config
from longspec.states.declaration import HeldOutSource, RowSource, TrainingRows, checked_config, declare, target_hash
from longspec.states.load import load_states
from longspec.states.stored_states import StoredRows, StoredStates
from longspec.train.arguments import Job


@dataclass(frozen=True)
class StoredInputs:
    """The stored states that a job reads: of its own rows, of replayed ones by their stages, and of held-out ones."""

    own: StoredRows
    replayed: dict[str, StoredRows]
    held_out: StoredRows | None  # None where nothing is measured on them

    @property
    def rows(self) -> StoredRows:
        """All trained rows' states, numbered as TrainedRows numbers these."""
        return StoredRows([shard for each in (self.own, *self.replayed.values()) for shard in each.shards])


def identity_of(
    job: Job, rows: TrainedRows, dtype: torch.dtype, vocabulary: DraftVocabulary | None, stored: StoredInputs | None = None
) -> dict[str, Any]:
    """Return the identity of a training job: a checkpoint must have the same one to be resumed from.

    Stored states are what they were made of, and the rows that are left out; made again from the same they are the same.
    """
    found = {
        "recipe": plain(job.recipe),
        "data": rows.own.data_hash,
        "target": target_hash(job.target),
        "init_weights": None if job.init_weights is None else sha256_file(draft_weights_file(job.init_weights)),
        "dtype": str(dtype),
    }
    if vocabulary is not None:
        found["vocabulary"] = vocabulary.hash
    if rows.replayed:
        found["replayed"] = {name: each.data_hash for name, each in rows.replayed.items()}
    if stored is not None:
        found["states"] = _identity_of_states(stored.own)
        if stored.replayed:
            found["replayed_states"] = {name: _identity_of_states(each) for name, each in stored.replayed.items()}
    return found


def _identity_of_states(stored: StoredRows) -> dict[str, Any]:
    return {"declaration": stored.declaration.hash, "left_out": {str(row): why for row, why in stored.left_out.items()}}


def read_vocabulary(job: Job, rows: TrainedRows) -> DraftVocabulary | None:
    """Return the job's draft vocabulary; None where its draft proposes all tokens.

    Raises ValueError for a file that is missing, unwanted, torn, of another size, or of another tokenizer or target.
    """
    vocabulary = vocabulary_for(job.recipe, job.vocabulary)
    if vocabulary is not None:
        assert job.vocabulary is not None
        vocabulary.check_tokenizer(job.vocabulary, rows.own.manifest["tokenizer"], job.data)
        target = read_json(job.target)["path"]
        vocabulary.check_tokens(job.vocabulary, read_target_config(target).vocab_size, target)
    return vocabulary


def open_stored(
    job: Job, rows: TrainedRows, held_out: list[Any], dtype: torch.dtype, vocabulary: DraftVocabulary | None
) -> StoredInputs | None:
    """Open the stored states that the job trains on, and those of its held-out rows; None where it trains online.

    Raises ValueError for files that are missing, unwanted, damaged, or hold other states than this job would compute.
    """
    if job.recipe.states.source != OFFLINE:
        if job.states or job.held_out_states or job.replay_states:
            raise ValueError(f"--states: recipe.states.source is {job.recipe.states.source}; set it to {OFFLINE}")
        return None
    if job.states is None:
        raise ValueError("--states: missing; recipe.states.source is offline: give the manifest.json of its stored states")
    config = read_target_config(read_json(job.target)["path"])

    def opened(path: Path, source: RowSource) -> StoredRows:
        stored = StoredRows.open(path)
        stored.check_same(declare(job.recipe, config, job.target, source, dtype, vocabulary))
        return stored

    check_replay(job, job.replay_states, "--replay-states", "the manifest.json of its stored states")
    own = opened(job.states, TrainingRows(rows.own))
    replayed = {name: opened(job.replay_states[name], TrainingRows(each)) for name, each in rows.replayed.items()}
    if not held_out:
        return StoredInputs(own, replayed, None)
    if job.held_out_states is None:
        raise ValueError(
            "--held-out-states: missing; runtime.held_out_every measures on held-out rows: give the shard.json of python -m "
            "longspec.states build --held-out, or set it to 0"
        )
    return StoredInputs(own, replayed, opened(job.held_out_states, HeldOutSource(rows.own, held_out)))


def build_trainer(
    recipe: Any,
    runtime: Any,
    target_path: str,
    init_weights: Path | None,
    device: torch.device,
    dtype: torch.dtype,
    vocabulary: DraftVocabulary | None = None,
    stored: StoredInputs | None = None,
) -> Any:
    """Make a DraftTrainer: the frozen target, or its stored states, and a draft, fresh (seeded) or from the given weights.

    Raises ValueError for a target that is not supported, not of the family that the recipe names or too small for the draft,
    and for an attention backend that cannot train here.
    """
    config = checked_config(target_path, recipe)
    states: Any
    if stored is None:
        states = load_states(target_path, config, runtime, device, dtype)
    else:
        attention = choose(runtime.attention, device, dtype, head_width(config))
        states = StoredStates(target_path, config, dtype, attention, stored.rows, stored.held_out)
    method, settings = method_of(recipe, vocabulary)
    torch.manual_seed(recipe.seed)
    return method.trainer(states, settings, init_weights).to(device)


def open_rows(job: Job) -> TrainedRows:
    """Open the packed rows, with those that are replayed. Raises ValueError for some that the recipe wants packed otherwise."""
    rows = PackedRows(job.data)
    for name in ("sequence_length", "collation", "overlong"):
        packed, wanted = rows.manifest[name], job.recipe.data[name]
        if packed != wanted:
            raise ValueError(f"{job.data}: {name}: packed with {packed}, recipe.data.{name} is {wanted}; pack the data again")
    check_replay(job, job.replay, "--replay", "the manifest.json of its rows, packed like the stage's own")
    return TrainedRows(rows, open_replayed(job.replay, rows))


def check_replay(job: Job, given: Mapping[str, Path], option: str, what: str) -> None:
    """Raise ValueError unless files are given for each stage that recipe.data.replay names, and for no other."""
    wanted = job.recipe.data.replay
    for name in wanted:
        if name not in given:
            raise ValueError(f"{option}: recipe.data.replay names {name}; give {option} {name}=PATH, {what}")
    for name, path in given.items():
        if name not in wanted:
            raise ValueError(f"{option}: {name}={path}: recipe.data.replay does not name {name}; leave it out")


def total_steps(job: Job, rows: TrainedRows) -> int:
    """Count optimizer steps of the whole stage. Raises ValueError when the data does not fill one global batch."""
    recipe = job.recipe
    schedule = rows.schedule(recipe.data.replay, recipe.global_batch, recipe.seed)
    return recipe.steps or schedule.steps(recipe.epochs)
