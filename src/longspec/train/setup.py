"""Sets up a training job before its first step: rows, stored states, steps, target and draft, and the identity of these."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longspec.atomic_files import read_json, sha256_file
from longspec.config import OFFLINE, plain
from longspec.config.schema import mix_of, mix_told, shares_of
from longspec.data.pack.arrow_shards import PackedRows
from longspec.data.pack.held_out_rows import HeldOutRow
from longspec.data.schedule import TrainedRows, open_alike
from longspec.draft_vocabulary import DraftVocabulary
from longspec.methods import method_of, vocabulary_for
from longspec.methods.draft_files import draft_weights_file
from longspec.models.attention.backends import choose
from longspec.models.target import head_width
from longspec.models.target_config import read_target_config
from longspec.states.declaration import RowSource, checked_config, declare, target_hash
from longspec.states.load import load_states
from longspec.states.stored_states import StoredRows, StoredStates
from longspec.train.arguments import Job


@dataclass(frozen=True)
class StoredInputs:
    """The stored states that a job reads: of its own rows, of replayed ones by their stages, and of held-out ones."""

    own: list[StoredRows]
    replayed: dict[str, StoredRows]
    held_out: StoredRows | None  # None where nothing is measured on them

    @property
    def rows(self) -> StoredRows:
        """All trained rows' states, numbered as TrainedRows numbers these."""
        return _joined([*self.own, *self.replayed.values()])


def _joined(stored: list[StoredRows]) -> StoredRows:
    return StoredRows([shard for each in stored for shard in each.shards])


def identity_of(
    job: Job, rows: TrainedRows, dtype: torch.dtype, vocabulary: DraftVocabulary | None, stored: StoredInputs | None = None
) -> dict[str, Any]:
    """Return the identity of a training job: a checkpoint must have the same one to be resumed from.

    Stored states are what they were made of; made again from the same they are the same.
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
        found["states"] = rows.of_own([_identity_of_states(each) for each in stored.own])
        if stored.replayed:
            found["replayed_states"] = {name: _identity_of_states(each) for name, each in stored.replayed.items()}
    return found


def _identity_of_states(stored: StoredRows) -> dict[str, Any]:
    return {"declaration": stored.declaration.hash, "left_out": {}}


def read_vocabulary(job: Job, rows: TrainedRows) -> DraftVocabulary | None:
    """Return the job's draft vocabulary; None where its draft proposes all tokens.

    Raises ValueError for a file that is missing, unwanted, torn, of another size, or of another tokenizer or target.
    """
    vocabulary = vocabulary_for(job.recipe, job.vocabulary)
    if vocabulary is not None:
        assert job.vocabulary is not None
        vocabulary.check_tokenizer(job.vocabulary, rows.own[0].manifest["tokenizer"], job.data[0])
        target = read_json(job.target)["path"]
        vocabulary.check_tokens(job.vocabulary, read_target_config(target).vocab_size, target)
    return vocabulary


def open_stored(
    job: Job, rows: TrainedRows, held_out: list[list[HeldOutRow]], dtype: torch.dtype, vocabulary: DraftVocabulary | None
) -> StoredInputs | None:
    """Open the stored states that the job trains on, and those of its held-out rows; None where it trains online.

    Raises ValueError for files that are missing, unwanted, damaged, or hold other states than this job would compute.
    """
    if job.recipe.states.source != OFFLINE:
        if job.states or job.held_out_states or job.replay_states:
            raise ValueError(f"--states: recipe.states.source is {job.recipe.states.source}; set it to {OFFLINE}")
        return None
    check_each(job.states, rows, "--states", "recipe.states.source is offline: give the manifest.json of its stored states")
    config = read_target_config(read_json(job.target)["path"])

    def opened(path: Path, source: RowSource) -> StoredRows:
        stored = StoredRows.open(path)
        stored.check_same(declare(job.recipe, config, job.target, source, dtype, vocabulary))
        return stored

    check_replay(job, job.replay_states, "--replay-states", "the manifest.json of its stored states")
    own = [opened(path, RowSource(each)) for path, each in zip(job.states, rows.own, strict=True)]
    replayed = {name: opened(job.replay_states[name], RowSource(each)) for name, each in rows.replayed.items()}
    if not held_out:
        return StoredInputs(own, replayed, None)
    advice = (
        "runtime.held_out_every measures on held-out rows: give the shard.json of python -m longspec.states build --held-out, "
        "or set it to 0"
    )
    check_each(job.held_out_states, rows, "--held-out-states", advice)
    sources = [RowSource(*each) for each in zip(rows.own, held_out, strict=True)]
    return StoredInputs(own, replayed, _joined(list(map(opened, job.held_out_states, sources))))


def check_each(given: Sequence[Path], rows: TrainedRows, option: str, advice: str) -> None:
    """Raise ValueError, with the advice, unless a file is given for each of the stage's own data sets."""
    if len(given) != len(rows.own):
        several = "" if len(rows.own) == 1 else ", one for each of --data, in the same order"
        raise ValueError(f"{option}: {f'{len(given)} given' if given else 'missing'}; {advice}{several}")


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
    first = PackedRows(job.data[0])
    for name in ("sequence_length", "collation", "overlong"):
        packed, wanted = first.manifest[name], job.recipe.data[name]
        if packed != wanted:
            raise ValueError(
                f"{job.data[0]}: {name}: packed with {packed}, recipe.data.{name} is {wanted}; pack the data again"
            )
    own, mix = [first, *open_alike(job.data[1:], first)], mix_of(job.recipe.data.name)
    held = [str(rows.manifest.get("dataset")) for rows in own]
    if len(own) != len(mix) or (len(mix) > 1 and held != list(mix)):
        raise ValueError(
            f"--data: rows of {', '.join(held)}; recipe.data.name is {mix_told(job.recipe.data.name)}: give the manifest.json "
            f"of each, in this order: {', '.join(mix)}"
        )
    check_replay(job, job.replay, "--replay", "the manifest.json of its rows, packed like the stage's own")
    return TrainedRows(*own, replayed=dict(zip(job.replay, open_alike(job.replay.values(), first), strict=True)))


def check_replay(job: Job, given: Mapping[str, Path], option: str, what: str) -> None:
    """Raise ValueError unless files are given for each stage that recipe.data.replay names, and for no other."""
    wanted = job.recipe.data.replay
    if wanted.keys() != given.keys():
        named, there = (", ".join(sorted(names)) or "nothing" for names in (wanted, given))
        raise ValueError(
            f"{option}: recipe.data.replay names {named}, given is {there}; give {option} STAGE=PATH for each, {what}"
        )


def total_steps(job: Job, rows: TrainedRows) -> int:
    """Count optimizer steps of the whole stage. Raises ValueError when the data does not fill one global batch."""
    recipe = job.recipe
    schedule = rows.schedule(shares_of(recipe.data), recipe.global_batch, recipe.seed)
    return recipe.steps or schedule.steps(recipe.epochs)
