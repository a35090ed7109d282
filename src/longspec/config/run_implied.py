"""Fill in what a run's file leaves out: recipe.model from the target, variants from the method, numbers of the stages."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longspec import methods
from longspec.config import yaml_files
from longspec.config.explain import faults_in
from longspec.config.names import readable_name
from longspec.config.run_file import TRAIN, Run, default_method
from longspec.config.target_facts import NotKnownError, TargetFacts, facts_of

COLLATIONS = {"answers": "long", "all": "base"}


def source_of(run: Run, folders: Sequence[Path]) -> str | None:
    """Return where a run's target comes from; None where it is a file of config/model/, or none is named."""
    target = run.says.target
    is_file = any((folder / f"model/{target}.yaml").is_file() for folder in folders)
    return None if is_file else target


def target_of(run: Run, folders: Sequence[Path]) -> tuple[TargetFacts | None, dict[str, Any] | None]:
    """The facts of a run's target and its section recipe.model; None and None for a file of config/model/, or none named.

    Raises ValueError, with the run's file, for a target of which nothing is known and whose family the run does not say.
    """
    target = source_of(run, folders)
    if target is None:
        return None, None
    family = run.says.recipe.get("model", {}).get("family")
    with faults_in(run.file):
        try:
            facts = facts_of(target, run.path)
        except NotKnownError as error:
            if family is None:
                raise ValueError(f"{error}, or say its family: recipe: {{model: {{family: llama}}}}") from None
            facts = TargetFacts(target, family, None, None, None)
    return facts, {"name": readable_name(target), "source": target, "family": facts.family}


def variants_of(run: Run) -> list[str]:
    """The variants of a run: those that it names, or its method's own; none where config/workflow.yaml says them."""
    method = run.says.method
    return run.says.variants or ([] if method is None else list(methods.settings_of(method).VARIANTS))


def with_implied(run: Run, facts: TargetFacts | None, model: dict[str, Any] | None) -> dict[str, Any]:
    """The section recipe of a run, on top of what its target and its method imply."""
    implied: dict[str, Any] = {} if model is None else {"model": model}
    if facts is not None and facts.tokens is not None:
        implied |= {"method": methods.settings_of(run.says.method or default_method()).implied(facts.tokens)}
    own = {key: implied.get(key, {}) | value if isinstance(value, dict) else value for key, value in run.says.recipe.items()}
    return implied | own


def numbers_of(run: Run, stage: str, folders: Sequence[Path]) -> str:
    """The file of config/stage/ that a stage begins with: the one that it names, of its own name, or `train`."""
    own = any((folder / f"stage/{stage}.yaml").is_file() for folder in folders)
    says = run.says.stages[stage]
    return says.like or (stage if own or says.data is None else TRAIN)


def stage_of(run: Run, stage: str, facts: TargetFacts | None, folders: Sequence[Path]) -> dict[str, Any]:
    """The sections that a run sets of a stage; rows of `train` are no longer than the target's positions."""
    says = run.says.stages[stage]
    data: dict[str, Any] = {} if says.data is None else {"name": says.data}
    if says.train_on is not None:
        data["collation"] = COLLATIONS[says.train_on]
    is_said = "sequence_length" in run.says.recipe.get("data", {})
    if facts is not None and facts.positions is not None and numbers_of(run, stage, folders) == TRAIN and not is_said:
        files = (folder / f"stage/{TRAIN}.yaml" for folder in folders)
        numbers = yaml_files.read(next(path for path in files if path.is_file()))
        data["sequence_length"] = min(facts.positions, numbers["recipe"]["data"]["sequence_length"])
    own = {"stage": stage, **says.recipe}
    return {"recipe": own | {"data": data | says.recipe.get("data", {})}, "runtime": says.runtime}
