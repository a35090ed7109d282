"""Check the runs of config/: their stages and variants, that their files compose, and that their targets fit.

Raises ValueError.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longspec import methods
from longspec.config import compose_stage, differences, plain, yaml_files
from longspec.config.checks import BUILT
from longspec.config.faults import did_you_mean, faults_in
from longspec.config.names import checked_name
from longspec.config.run_file import Run, numbers_of, path_of, read_run, source_of, variants_of
from longspec.config.schema import mix_of
from longspec.config.typed import OF_STAGE
from longspec.decode.levels import levels_of, shape_of
from longspec.measure.tasks import check_room
from longspec.workflow.choices import Choices, Stage
from longspec.workflow.settings import targets
from longspec.workflow.settings.evaluations import RunEvaluation

OR_SOURCE = " Or give hf:<owner>/<repository>, a folder, seen from here, or a .gguf file."
LENDER = "run '{}', variant '{}': recipe.method.vocabulary_from"


def check_choice(key: str, name: object, group: str, config_dir: Path, otherwise: str = "") -> None:
    """Raise ValueError if config/{group}/ has no file of this name. otherwise: what else may be given."""
    checked_name(str(name), key=key)
    known = [path.stem for path in (config_dir / group).glob("*.yaml")]
    if name not in known:
        raise ValueError(f"{key}: there is no config/{group}/{name}.yaml; {did_you_mean(str(name), known)}{otherwise}")


def run_of(path: Path, config_dir: Path) -> Run:
    """Return the run of a file. Raises ValueError if it names a file that does not exist."""
    found = read_run(str(path), [config_dir])
    says, source = found.says, source_of(found, [config_dir])
    with faults_in(found.file):
        if not says.stages:
            raise ValueError("stages: must name at least one stage")
        if says.target is None and "source" not in says.recipe.get("model", {}):
            raise ValueError("target: missing; give hf:<owner>/<repository>, a folder, a .gguf file, or one of config/model/")
        if source is not None and not targets.may_be_source(source):
            check_choice("target", source, "model", config_dir, OR_SOURCE)
        if says.method is not None and says.method not in methods.names():
            raise ValueError(f"method: {says.method!r} is unknown; {did_you_mean(says.method, methods.names())}")
        if says.deepspeed is not None:
            check_choice("deepspeed", says.deepspeed, "deepspeed", config_dir)
        if source is not None:
            targets.learn(found, source)
        for name, stage in says.stages.items():
            key = f"stages{f'.{name}.like' if stage.like else ''}"
            check_choice(key, numbers_of(found, name, [config_dir]), "stage", config_dir)
        for name in says.variants:
            check_choice("variants", name, "variant", config_dir)
    return found


def check_models(configs: Mapping[Stage, Any]) -> None:
    """Raise ValueError if a run has two targets, one name means two, or a built target has no phase of training."""
    known: dict[str, Any] = {}
    used: dict[str, str] = {}
    for (run, _, stage), config in configs.items():
        model = config.recipe.model
        key = f"run '{run}', stage '{stage}': recipe.model.name"
        if used.setdefault(run, model.name) != model.name:
            raise ValueError(f"{key}: '{model.name}', but another stage of the run trains for '{used[run]}'; choose one target")
        target = (model.source, model.sha256, config.build if model.source == BUILT else None)
        if known.setdefault(model.name, target) != target:
            raise ValueError(f"{key}: '{model.name}' stands for two targets (source, sha256 or build); give each its own name")
        if model.source == BUILT and not config.build.mixture:
            raise ValueError(f"config/model/{model.name}.yaml: build.mixture: is empty; name a phase of the target's training")


def check_methods(configs: Mapping[Stage, Any], file: str) -> None:
    """Raise ValueError, with the key, if stages of one run and variant train different drafts, or begin with different ones.

    file: the run's.
    """
    (run, variant, first), *_ = configs
    section, names = methods.settings_of(configs[run, variant, first].recipe.method.name).SAME
    key = section.removeprefix("recipe.")
    drafts = {
        stage: {key: {name: recipe[key].get(name) for name in names}, "init": recipe.init, "method": plain(recipe.method)}
        for (_, _, stage), recipe in ((each, config.recipe) for each, config in configs.items())
    }
    for stage, draft in drafts.items():
        if changed := differences(drafts[first], draft, "recipe."):
            raise ValueError(
                f"run '{run}', variant '{variant}', stage '{stage}': {'; '.join(changed)} since stage '{first}': all stages "
                f"train one draft; say it once, for all stages, in {file}"
            )


def check_targets(configs: Mapping[Stage, Any], evaluations: Mapping[str, RunEvaluation]) -> None:
    """Raise ValueError if an existing target cannot be used, has too few positions for the rows and the prompts, or does not
    have the layers or tokens that the draft needs; and if the draft's tokens are too few for a round.

    evaluations: of the chosen runs; a run that only lends its draft vocabulary has none.
    """
    for (run, _, stage), config in configs.items():
        named, recipe, evaluation = f"run '{run}', stage '{stage}'", config.recipe, evaluations.get(run)
        length = recipe.data.sequence_length
        targets.check_target(f"{named}: recipe.model", recipe)
        layers, tokens, positions = targets.sizes_of(config)
        if positions is not None and length > positions:
            raise ValueError(
                f"{named}: recipe.data.sequence_length: {length} tokens are more than the target's {positions} positions; "
                "lower it"
            )
        if layers is not None and tokens is not None:
            with faults_in(named):
                methods.settings_of(recipe.method.name).fits(recipe, layers, tokens)
        if evaluation is not None:
            if positions is not None:
                with faults_in(evaluation.file_of("tasks")):
                    for name, task in evaluation.tasks.items():
                        check_room(name, task, positions)
            _check_levels(named, recipe, tokens, evaluation)


def _check_levels(key: str, recipe: Any, tokens: int | None, evaluation: RunEvaluation) -> None:
    """Check that the vocabulary for decoding is smaller than the target's, and fills every level of each shape.

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
            levels_of(shape_of(shape), tokens, proposed)
        except ValueError as error:
            named = "recipe.method.vocabulary" if own else "evaluation.draft_vocabulary"
            told = "" if proposed is None else f" ({named} of {key})"
            raise ValueError(f"{evaluation.file_of('shapes')}: evaluation.shapes: {error}{told}") from None


def check_replays(choices: Choices) -> None:
    """Raise ValueError, with the key, if a replayed stage is no earlier one of the run, or has no such data set."""
    for (run, variant, stage), config in choices.configs.items():
        earlier = choices.stages[run][: choices.stages[run].index(stage)]
        for name in config.recipe.data.replay:
            key = f"run '{run}', variant '{variant}', stage '{stage}': recipe.data.replay.{name}"
            replayed, *of = name.split(OF_STAGE)
            if replayed not in earlier:
                raise ValueError(f"{key}: is no earlier stage of the run; {did_you_mean(replayed, earlier)}")
            mix = mix_of(choices.configs[run, variant, replayed].recipe.data.name)
            if of and of[0] not in mix:
                raise ValueError(f"{key}: stage '{replayed}' trains on no such data set; {did_you_mean(of[0], mix)}")


def check_own_data(choices: Choices) -> None:
    """Raise ValueError if a chosen run's file has a data set that is neither trained on nor measured."""
    for run, measured in choices.evaluation_of.items():
        file, bench = choices.files[run], measured.section.get("bench") or {}
        tasks = [*measured.section["tasks"].values(), *bench.get("tasks", {}).values()]
        used = choices.datasets_trained_on().union(task.get("data") for task in tasks if task is not None)
        for name in yaml_files.read(file.path).get("data", ()):
            if name not in used:
                key = f"stages.{next(iter(file.says.stages))}.data"
                raise ValueError(f"{file.file}: data.{name}: no stage trains on it; set {key} to it or to a mix, or remove it")


def with_lenders(
    chosen: list[str], variants: list[str], config_dir: Path
) -> tuple[dict[str, Run], dict[str, list[str]], dict[Stage, object]]:
    """Return files, variants and configurations of the chosen runs and of those that lend them a draft vocabulary.

    variants: for runs that name none.
    """
    files: dict[str, Run] = {}
    variants_in: dict[str, list[str]] = {}
    configs: dict[Stage, object] = {}
    todo: list[tuple[str, str, Path | None]] = [("runs", run, None) for run in chosen]
    while todo:
        key, given, beside = todo.pop(0)
        try:
            path = path_of(given, [config_dir], beside)
        except ValueError as error:
            if given in files:  # a chosen run, in another folder
                continue
            raise ValueError(f"{key}: {error}") from None
        run = run_of(path, config_dir)
        if run.name in files:
            if not path.samefile(files[run.name].path):
                raise ValueError(f"{key}: {given}: another run has this name, {files[run.name].file}; rename one of the files")
            continue
        files[run.name], variants_in[run.name] = run, variants_of(run) or variants
        for variant in variants_in[run.name]:
            own: dict[Stage, Any] = {}
            for stage in run.says.stages:
                with faults_in(f"run '{run.name}', variant '{variant}', stage '{stage}'"):
                    own[run.name, variant, stage] = compose_stage(str(run.path), variant, stage, config_dir)
            check_methods(own, run.file)
            if run.says.build and next(iter(own.values())).recipe.model.source != BUILT:
                raise ValueError(f"{run.file}: build: is for targets trained here; remove `build` from this file or its base")
            configs |= own
            lender = methods.vocabulary_lender(next(iter(own.values())).recipe)
            if lender is not None:
                todo.append((LENDER.format(run.name, variant), lender, run.path.parent))
    return files, variants_in, configs


def check_lenders(choices: Choices) -> None:
    """Raise ValueError, with the key, if the lender of a vocabulary has another target, or takes its own from another run."""
    for run in choices.files:
        for variant in choices.variants[run]:
            if (lent := choices.lender(run, variant)) is not None:
                own, other = choices.model_of(run), choices.model_of(lent[0])
                if own != other:
                    raise ValueError(
                        f"{LENDER.format(run, variant)}: '{lent[0]}' trains for the target '{other}', this run for '{own}', "
                        "whose tokens are others; name a run with the same target, or null"
                    )
                if (borrowed := methods.vocabulary_lender(choices.first_recipe(*lent))) is not None:
                    raise ValueError(
                        f"{LENDER.format(run, variant)}: '{lent[0]}' takes its own of '{borrowed}'; name a run that counts its "
                        "tokens itself, or null"
                    )
