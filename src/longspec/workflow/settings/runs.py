"""The runs of config/: which stages and variants they have, that their files compose, and that their targets fit.

Raises ValueError.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from longspec import methods
from longspec.config import CONFIG_DIR, compose, compose_stage, differences, plain, stages_and_variants
from longspec.config.checks import BUILT
from longspec.config.explain import UNKNOWN, did_you_mean, faults_in
from longspec.config.names import BASELINES, IMPORTED, WITH_LOOKUP, check_name
from longspec.decode.levels import levels_of
from longspec.evaluate.tasks import check_room
from longspec.workflow.choices import Choices, Stage
from longspec.workflow.paths import TARGET
from longspec.workflow.settings import targets
from longspec.workflow.settings.evaluations import RunEvaluation

Names = dict[str, list[str]]  # by run
HEADER = "# @package _global_"  # has Hydra set keys of the whole configuration
# Of a path a user names, and of the wildcards by which Snakemake names a job to the process that runs it.
PLACES = r"(?:^models|^data/(?:answers|tokens|packed))/{name}/|[:,]model={name}(?:,|$)"


def check_choice(key: str, name: object, group: str, config_dir: Path) -> None:
    """Raise ValueError for what is no name of a file of one group of config/."""
    check_name(key, name)
    known = [path.stem for path in (config_dir / group).glob("*.yaml")]
    if name not in known:
        raise ValueError(f"{key}: there is no config/{group}/{name}.yaml; {did_you_mean(str(name), known)}")


def stages_and_variants_of(run: str, otherwise: list[str], config_dir: Path, named: str) -> tuple[list[str], list[str]]:
    """The stages of a run, in order, and its variants: those that it names, or the others.

    named: the key that names the run. Raises ValueError for a run, a stage, a variant or a file of their numbers that is none.
    """
    check_choice(named, run, "run", config_dir)
    numbers = sorted((config_dir / "run_stage").glob(f"{run}_*.yaml"))
    for path in [config_dir / f"run/{run}.yaml", *numbers]:
        if not path.read_bytes().startswith(HEADER.encode()):
            raise ValueError(f"{path}: its first line must be '{HEADER}'")
    key = f"config/run/{run}.yaml"
    with faults_in(key):
        stages, variants = stages_and_variants(run, config_dir)
    if not stages or len(stages) != len(set(stages)):
        raise ValueError(f"{key}: stages: must name at least one stage, each once; is {stages}")
    if len(variants) != len(set(variants)):
        raise ValueError(f"{key}: variants: must name each variant once; is {variants}")
    if taken := [name for name in stages if name in (*BASELINES, IMPORTED, WITH_LOOKUP)]:
        told = f"{', '.join((*BASELINES, IMPORTED))} and {WITH_LOOKUP} are drafters that no stage trains"
        raise ValueError(f"{key}: stages: {', '.join(taken)}: {told}; give the stage another name")
    for group, names in (("stage", stages), ("variant", variants)):
        for name in names:
            check_choice(f"{key}: {group}s", name, group, config_dir)
    for path in numbers:
        if path.stem.removeprefix(f"{run}_") not in stages:
            told = did_you_mean(path.stem, [f"{run}_{stage}" for stage in stages])
            raise ValueError(f"{path}: run '{run}' has no such stage; rename or remove the file; {told}")
    return stages, variants or otherwise


def composed(run: str, variant: str, stage: str, config_dir: Path) -> DictConfig:
    """One composed configuration. Raises ValueError with the choices that lead to the one at fault."""
    try:
        return compose_stage(run, variant, stage, config_dir)
    except ValueError as error:
        of_variant = UNKNOWN in str(error) and f"(in variant/{variant}.yaml)" in str(error)
        fix = (
            f" config/variant/{variant}.yaml does not fit the run's method; name variants of that method: "
            f"config/run/{run}.yaml: variants: [...], which is for this run alone"
        )
        raise ValueError(f"run '{run}', variant '{variant}', stage '{stage}': {error}{fix if of_variant else ''}") from None


def check_models(configs: Mapping[Stage, Any]) -> None:
    """Raise ValueError when the stages of a run have two targets, or one name stands for two targets."""
    known: dict[str, Any] = {}
    used: dict[str, str] = {}
    for (run, _, stage), config in configs.items():
        model = config.recipe.model
        key = f"run '{run}', stage '{stage}': recipe.model.name"
        if used.setdefault(run, model.name) != model.name:
            raise ValueError(f"{key}: '{model.name}', but another stage of the run trains for '{used[run]}'; choose one target")
        target = (model.source, model.sha256, config.build if model.source == BUILT else None)
        if known.setdefault(model.name, target) != target:
            raise ValueError(
                f"{key}: '{model.name}' stands for two different targets (source, sha256 or build); give each its own name"
            )


def check_methods(configs: Mapping[Stage, Any]) -> None:
    """Raise ValueError, with the key, when the stages of a run and variant train two drafts, or begin with two."""
    first: dict[tuple[str, str], tuple[str, Any]] = {}
    for (run, variant, stage), config in configs.items():
        draft = {"init": config.recipe.init, "method": plain(config.recipe.method)}
        before, wanted = first.setdefault((run, variant), (stage, draft))
        if changed := differences(wanted, draft, "recipe."):
            raise ValueError(
                f"run '{run}', variant '{variant}', stage '{stage}': {'; '.join(changed)} since stage '{before}': all stages "
                f"train one draft; say it once, in config/run/{run}.yaml"
            )


def check_mixtures(configs: Mapping[Stage, Any]) -> None:
    """Raise ValueError for a target that is to be built and has no phase of training."""
    for config in configs.values():
        model = config.recipe.model
        if model.source == BUILT and not config.build.mixture:
            raise ValueError(
                f"config/model/{model.name}.yaml: build.mixture: a target that is built needs at least one phase of training"
            )


def check_targets(configs: Mapping[Stage, Any], evaluations: Mapping[str, RunEvaluation]) -> None:
    """Raise ValueError for a target that is there and cannot be used, has no positions for the rows and the prompts, or whose
    layers or tokens are not as the draft wants them; and for drafts of a round that the draft's tokens cannot fill.

    evaluations: of the chosen runs; one that only lends its draft vocabulary has none.
    """
    for (run, _, stage), config in configs.items():
        key, model, evaluation = f"run '{run}', stage '{stage}': recipe", config.recipe.model, evaluations.get(run)
        fetched = Path(TARGET.format(model=model.name)).parent / "target"
        targets.check_target(f"{key}.model", config.recipe, fetched)
        positions = targets.positions_of(model.source, config.build.max_position, fetched)
        if positions is not None:
            targets.check_length(key, config.recipe.data.sequence_length, positions)
        size, named = targets.size_of(model.source, config.build, fetched), f"run '{run}', stage '{stage}'"
        if size is not None:
            with faults_in(named):
                methods.settings_of(config.recipe.method.name).fits(config.recipe, *size)
        if evaluation is not None:
            if positions is not None:
                with faults_in(evaluation.file_of("tasks")):
                    for name, task in evaluation.tasks.items():
                        check_room(name, task, positions)
            _check_levels(named, config.recipe, None if size is None else size[1], evaluation)


def _check_levels(key: str, recipe: Any, tokens: int | None, evaluation: RunEvaluation) -> None:
    """The vocabulary that a draft is decoded with is smaller than the target's, and has tokens for every level of every shape.

    tokens: of the target; None: not known yet.
    """
    own, asked = methods.has_own_vocabulary(recipe.method.name), evaluation.section.get("draft_vocabulary")
    if tokens is not None and asked is not None and asked >= tokens and not own:
        raise ValueError(
            f"{evaluation.file_of('draft_vocabulary')}: evaluation.draft_vocabulary: {asked}: the target of {key} has {tokens} "
            "tokens; give fewer, or null for all of them"
        )
    proposed = methods.vocabulary_size(recipe) if own else asked
    tokens = tokens or proposed
    if tokens is None:
        return
    for shape in evaluation.section["shapes"]:
        try:
            levels_of(shape if isinstance(shape, int) else tuple(shape), tokens, proposed)
        except ValueError as error:
            named = "recipe.method.vocabulary" if own else "evaluation.draft_vocabulary"
            told = "" if proposed is None else f" ({named} of {key})"
            raise ValueError(f"{evaluation.file_of('shapes')}: evaluation.shapes: {error}{told}") from None


def check_replays(choices: Choices) -> None:
    """Raise ValueError, with the key, for a replayed stage that is none of the run, or no earlier one."""
    for (run, variant, stage), config in choices.configs.items():
        stages = choices.stages[run]
        earlier = stages[: stages.index(stage)]
        for name in config.recipe.data.replay:
            key = f"run '{run}', variant '{variant}', stage '{stage}': recipe.data.replay.{name}"
            if name not in stages:
                raise ValueError(f"{key}: the run has no such stage; name earlier ones; {did_you_mean(name, earlier)}")
            if name not in earlier:
                raise ValueError(f"{key}: comes later in the run; name earlier ones; {did_you_mean(name, earlier)}")


def asked_targets(arguments: Sequence[str], known: Collection[str], config_dir: Path = CONFIG_DIR) -> dict[str, Any]:
    """By the target's name a configuration in which it stands, for each file of config/model/ that the arguments name.

    known: the targets of the chosen runs, which are left out. Raises ValueError for a file that does not compose, and for one
    that has another name than its target.
    """
    found = {}
    for path in sorted((config_dir / "model").glob("*.yaml")):
        place = re.compile(PLACES.format(name=re.escape(path.stem)))
        if path.stem in known or not any(place.search(each) for each in arguments):
            continue
        config = compose("train", [f"model={path.stem}"], config_dir)
        if config.recipe.model.name != path.stem:
            raise ValueError(f"{path}: recipe.model.name: {config.recipe.model.name!r}; name the file as its target")
        found[path.stem] = config
    return found


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
        stages[run], variants_of[run] = stages_and_variants_of(run, variants, config_dir, key)
        for variant in variants_of[run]:
            own = {(run, variant, stage): composed(run, variant, stage, config_dir) for stage in stages[run]}
            check_methods(own)
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
                _check_lent(key_of(*at), choices.first_recipe(*at), lent, choices.first_recipe(*lent))
                passed, at = [*passed, lent[0]], lent


def _check_lent(key: str, recipe: Any, lent: tuple[str, str], lender: Any) -> None:
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
