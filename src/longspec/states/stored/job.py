"""What a recipe and a runtime say of stored states: how they are declared, computed, and held against a training job."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longspec.atomic_files import checked_folder
from longspec.config import OFFLINE, differences
from longspec.distributed import Ranks
from longspec.draft_vocabulary import DraftVocabulary
from longspec.methods import check_family_named, method_of, settings_of, vocabulary_for
from longspec.models.target import read_target_config, resolve_dtype
from longspec.states.load import load_states
from longspec.states.stored.compute import Computation
from longspec.states.stored.declaration import Declaration, declare
from longspec.states.stored.reader import StoredRows
from longspec.states.stored.rows import RowSource


@dataclass(frozen=True)
class StatesJob:
    """The states of some rows, and how they are computed."""

    declaration: Declaration
    recipe: Any
    runtime: Any
    target_path: str
    config: Any  # of the target
    vocabulary: DraftVocabulary | None
    dtype: torch.dtype
    device: torch.device

    def computation(self, ranks: Ranks) -> Computation:
        """Load the target."""
        states = load_states(self.target_path, self.config, self.runtime, self.device, self.dtype)
        states.follow(self.device)
        method, settings = method_of(self.recipe, self.vocabulary)
        return Computation(states, self.declaration, method.learnt(settings), ranks, self.device)


def checked_config(target_path: str, recipe: Any) -> Any:
    """A target's configuration. Raises ValueError for one of another family than the recipe names, or too small for it."""
    config = read_target_config(target_path)
    check_family_named(recipe, config.model_type, target_path)
    settings_of(recipe.method.name).fits(recipe, config.num_hidden_layers, config.vocab_size)
    return config


def open_job(
    recipe: Any, runtime: Any, target: Path, source: RowSource, vocabulary_path: Path | None, device: torch.device
) -> StatesJob:
    """The job that builds the states of a recipe's rows. Raises ValueError for what does not fit, with the key."""
    if recipe.states.source != OFFLINE:
        raise ValueError(f"recipe.states.source: is {recipe.states.source}: this stage reads no stored states; set {OFFLINE}")
    path = checked_folder(target)
    config = checked_config(path, recipe)
    vocabulary = None
    if recipe.states.top_k is not None:
        vocabulary = vocabulary_for(recipe, vocabulary_path)
        if vocabulary is not None:
            vocabulary.check_tokens(vocabulary_path, config.vocab_size, path, source.tokenizer)
    dtype = resolve_dtype(recipe.precision)
    declaration = declare(recipe, config, target, source, dtype, vocabulary)
    return StatesJob(declaration, recipe, runtime, path, config, vocabulary, dtype, device)


def check_same(stored: StoredRows, wanted: Declaration) -> None:
    """Raise ValueError that names how stored states differ from those that a training job wants."""
    changed = differences(wanted.plain(), stored.declaration.plain())
    if changed:
        raise ValueError(
            f"{stored.manifest}: holds other states than this job reads: {'; '.join(changed)} (wanted -> stored); build them "
            "again, or give those of this recipe, target and data"
        )
