"""Set up a training job before its first step: rows, stored states, steps, target and draft, and their identity."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longspec.atomic_files import named_folder, sha256_file, sha256_json
from longspec.config import OFFLINE, plain
from longspec.config.schema import mix_of, mix_told, shares_of
from longspec.data.pack.arrow_shards import PackedRows, Row
from longspec.data.schedule import TrainedRows, open_alike
from longspec.draft_vocabulary import DraftVocabulary
from longspec.methods import method_of, vocabulary_for
from longspec.methods.draft_files import draft_weights_file
from longspec.models.target_config import read_target_config, target_hash
from longspec.states.declaration import RowSource, checked_config, declare
from longspec.states.load import Place, find_rows, load_states
from longspec.train.arguments import Job


@dataclass(frozen=True)
class Declared:
    """Hold the declarations of the stored states that a job reads, whether or not these exist.

    trained: for each data set, then for each replayed stage; measured: for the held-out rows of each data set.
    """

    trained: list[dict[str, Any]]
    measured: list[dict[str, Any]]

    def find(self, paths: Sequence[Path]) -> list[Place]:
        """Find all rows among shards, in StoredStates' order. Raises ValueError as find_rows does."""
        return find_rows(self.trained, paths) + find_rows(self.measured, paths)[::-1]


def identity_of(
    job: Job, rows: TrainedRows, dtype: torch.dtype, vocabulary: DraftVocabulary | None, stored: Declared | None = None
) -> dict[str, Any]:
    """Return the identity of a training job: it can resume only from a checkpoint with the same one.

    Stored states are identified by their declaration, so states that are built again from the same inputs are the same.
    """
    found = {
        "recipe": plain(job.recipe),
        "data": rows.of_own([each.data_hash for each in rows.own]),
        "target": target_hash(job.target),
        "init_weights": None if job.init_weights is None else sha256_file(draft_weights_file(job.init_weights)),
        "dtype": str(dtype),
    }
    if vocabulary is not None:
        found["vocabulary"] = vocabulary.hash
    if rows.replayed:
        found["replayed"] = {name: each.data_hash for name, each in rows.replayed.items()}
    if stored is not None:
        hashes = [{"declaration": sha256_json(each), "left_out": {}} for each in stored.trained]
        found["states"] = rows.of_own(hashes[: len(rows.own)])
        if rows.replayed:
            found["replayed_states"] = dict(zip(rows.replayed, hashes[len(rows.own) :], strict=True))
    return found


def read_vocabulary(job: Job, rows: TrainedRows) -> DraftVocabulary | None:
    """Return the job's draft vocabulary; None if its draft proposes all tokens.

    Raises ValueError for a file that is missing, unwanted, torn, of another size, or of another tokenizer or target.
    """
    vocabulary, target = vocabulary_for(job.recipe, job.vocabulary), named_folder(job.target)
    if vocabulary is not None:
        tokens, tokenizer = read_target_config(target).vocab_size, rows.own[0].manifest["tokenizer"]
        vocabulary.check_tokens(job.vocabulary, tokens, target, tokenizer)
    return vocabulary


def declared_states(
    job: Job, rows: TrainedRows, held_out: list[list[Row]], dtype: torch.dtype, vocabulary: DraftVocabulary | None
) -> Declared | None:
    """Return declarations of the states that the job reads; None if it trains online. Raises ValueError for wrong --states."""
    if job.recipe.states.source != OFFLINE:
        if job.states:
            raise ValueError(f"--states: recipe.states.source is {job.recipe.states.source}; set it to {OFFLINE}")
        return None
    if not job.states:
        raise ValueError("--states: missing; recipe.states.source is offline: give the shard.json of all its stored states")
    config = read_target_config(named_folder(job.target))

    def declared(sources: Iterable[RowSource]) -> list[dict[str, Any]]:
        return [declare(job.recipe, config, job.target, source, dtype, vocabulary) for source in sources]

    measured = declared(map(RowSource, rows.own, held_out)) if held_out else []
    return Declared(declared(map(RowSource, [*rows.own, *rows.replayed.values()])), measured)


def build_trainer(
    recipe: Any,
    runtime: Any,
    target_path: str,
    init_weights: Path | None,
    device: torch.device,
    dtype: torch.dtype,
    vocabulary: DraftVocabulary | None = None,
    stored: list[Place] | None = None,
) -> Any:
    """Make a DraftTrainer: the frozen target, or its stored states, and a draft, fresh (seeded) or from the given weights.

    Raises ValueError if the target is not supported, not of the recipe's family or too small for the draft, and if the
    attention backend cannot train here.
    """
    config = checked_config(target_path, recipe)
    states = load_states(target_path, config, runtime, device, dtype, stored)
    method, settings = method_of(recipe, vocabulary)
    torch.manual_seed(recipe.seed)
    return method.trainer(states, settings, init_weights).to(device)


def open_rows(job: Job) -> TrainedRows:
    """Open the packed rows, and the replayed ones. Raises ValueError if they are packed differently from the recipe."""
    first = PackedRows(job.data[0])
    for name in ("sequence_length", "collation", "overlong"):
        packed, wanted = first.manifest[name], job.recipe.data[name]
        if packed != wanted:
            raise ValueError(f"{job.data[0]}: {name}: packed with {packed}, recipe.data.{name} is {wanted}; pack again")
    own, mix = [first, *open_alike(job.data[1:], first)], mix_of(job.recipe.data.name)
    held = [str(rows.manifest.get("dataset")) for rows in own]
    if len(own) != len(mix) or (len(mix) > 1 and held != list(mix)):
        raise ValueError(
            f"--data: rows of {', '.join(held)}; recipe.data.name is {mix_told(job.recipe.data.name)}: give the manifest.json "
            f"of each, in this order: {', '.join(mix)}"
        )
    if job.recipe.data.replay.keys() != job.replay.keys():
        named, there = (", ".join(sorted(names)) or "nothing" for names in (job.recipe.data.replay, job.replay))
        raise ValueError(
            f"--replay: recipe.data.replay names {named}, given is {there}; give --replay STAGE=PATH for each, "
            "the manifest.json of its rows, packed like the stage's own"
        )
    return TrainedRows(*own, replayed=dict(zip(job.replay, open_alike(job.replay.values(), first), strict=True)))


def total_steps(job: Job, rows: TrainedRows) -> int:
    """Return the number of optimizer steps of the stage. Raises ValueError if the data does not fill one global batch."""
    recipe = job.recipe
    schedule = rows.schedule(shares_of(recipe.data), recipe.global_batch, recipe.seed)
    return recipe.steps or schedule.steps(recipe.epochs)
