"""Which run counts which draft vocabulary, and who takes it over (recipe.method.vocabulary_from). Raises ValueError."""

from pathlib import Path
from typing import Any

from longspec import methods
from longspec.workflow.choices import Choices, Stage
from longspec.workflow.settings import runs

Names = dict[str, list[str]]  # by run


def with_lenders(chosen: list[str], variants: list[str], config_dir: Path) -> tuple[Names, Names, dict[Stage, object]]:
    """Stages, variants and configurations of the chosen runs, and of those whose draft vocabulary one of them takes over.

    variants: of runs that name none.
    """
    stages: Names = {}
    variants_of: Names = {}
    configs: dict[Stage, object] = {}
    todo = [("runs", run) for run in chosen]
    while todo:
        key, run = todo.pop(0)
        if run in stages:
            continue
        stages[run], variants_of[run] = runs.stages_and_variants_of(run, variants, config_dir, key)
        for variant in variants_of[run]:
            own = {(run, variant, stage): runs.composed(run, variant, stage, config_dir) for stage in stages[run]}
            runs.check_methods(own)
            configs |= own
            lender = methods.vocabulary_lender(own[run, variant, stages[run][0]].recipe)
            if lender is not None:
                todo.append((key_of(run, variant), lender))
    return stages, variants_of, configs


def key_of(run: str, variant: str) -> str:
    """The key that names a lender."""
    return f"run '{run}', variant '{variant}': recipe.method.vocabulary_from"


def check_lenders(choices: Choices) -> None:
    """Raise ValueError, with the key, for a run that takes its vocabulary of a run that has no such tokens, or its own."""
    for run in choices.known_runs:
        for variant in choices.variants[run]:
            passed, at = [run], (run, variant)
            while (lent := choices.lender(*at)) is not None:
                if lent[0] in passed:
                    told = " -> ".join([*passed, lent[0]])
                    raise ValueError(f"{key_of(run, variant)}: {told} leads back, so that no run counts; set it to null")
                _check_pair(key_of(*at), choices.first_recipe(*at), lent, choices.first_recipe(*lent))
                passed, at = [*passed, lent[0]], lent


def _check_pair(key: str, recipe: Any, lent: tuple[str, str], lender: Any) -> None:
    """A run and the one that lends it tokens: of one target, and of one number where the lender's draft is trained on some."""
    own, other = recipe.model.name, lender.model.name
    if own != other:
        raise ValueError(
            f"{key}: '{lent[0]}' trains for the target '{other}', this run for '{own}', whose tokens are others; name a run "
            "with the same target, or null"
        )
    size, theirs = methods.vocabulary_size(recipe), methods.vocabulary_size(lender)
    if methods.has_own_vocabulary(lender.method.name) and theirs != size:
        told = "null (all tokens)" if theirs is None else theirs
        raise ValueError(
            f"{key}: recipe.method.vocabulary is {size} in this run and {told} in run '{lent[0]}', variant '{lent[1]}', which "
            "has no such tokens to lend; give both the same number, or null to count on this run's own rows"
        )
