# What can be wrong with the configuration is found here, before the graph is built: an error inside an input function
# goes unseen whenever the output already exists. Each message names the key and the fix. Functions only.

import sys
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from snakemake.logging import logger

from longspec.config import CONFIG_DIR, compose_stage, stages_of
from longspec.config.explain import did_you_mean
from longspec.config.names import check_name
from longspec.data import presets
from longspec.data.hub import names
from longspec.data.read import source_files
from longspec.data.raw import complete, is_hub
from longspec.evaluate import tasks
from longspec.workflow import targets
from longspec.workflow.files import check_fields, check_paths
from longspec.workflow.settings import check_text, check_values

HEADER = "# @package _global_"
GENERATED = ("stdlib", "puzzles")  # sources made on this machine


@contextmanager
def told_in_one_line():
    """End the command with what is wrong. Of an exception Snakemake would print its own frames and those of rules/ too."""
    try:
        yield
    except ValueError as error:
        logger.error(str(error))
        sys.exit(1)


def with_presets(entries, kind):
    """Entries with their presets laid out; what is no mapping is left to the schema."""
    if not isinstance(entries, dict):
        return entries
    try:
        return {
            name: (
                presets.expand(name, entry, kind) if isinstance(entry, dict) else entry
            )
            for name, entry in entries.items()
        }
    except ValueError as error:
        raise ValueError(f"config/workflow.yaml: {error}") from None


def check_schema(settings):
    """Hold config/workflow.yaml (with --config and --configfile on top) against its schema."""
    try:
        check_values(settings)
    except ValueError as error:
        raise ValueError(f"config/workflow.yaml: {error}") from None


def check_choice(key, name, group):
    """A name that must be a file of one group of config/."""
    check_name(key, name)
    known = [path.stem for path in (CONFIG_DIR / group).glob("*.yaml")]
    if name not in known:
        raise ValueError(
            f"{key}: there is no config/{group}/{name}.yaml; {did_you_mean(name, known)}"
        )


def composed(run, variant, stage):
    """One composed configuration; what is refused is reported with the choices that lead to it."""
    try:
        return compose_stage(run, variant, stage)
    except ValueError as error:
        raise ValueError(
            f"run '{run}', variant '{variant}', stage '{stage}': {error}"
        ) from None


def check_header(path):
    """A run's file sets keys of the whole configuration, which Hydra must be told in its first line."""
    if not path.read_bytes().startswith(HEADER.encode()):
        raise ValueError(f"{path}: its first line must be '{HEADER}'")


def run_stages(run):
    """The stages of a run, in order."""
    check_choice("runs", run, "run")
    numbers = sorted((CONFIG_DIR / "run_stage").glob(f"{run}_*.yaml"))
    for path in [CONFIG_DIR / f"run/{run}.yaml", *numbers]:
        check_header(path)
    try:
        stages = stages_of(run)
    except ValueError as error:
        raise ValueError(f"config/run/{run}.yaml: {error}") from None
    if not stages or len(stages) != len(set(stages)):
        raise ValueError(
            f"config/run/{run}.yaml: stages: must name at least one stage, each once; is {stages}"
        )
    for stage in stages:
        check_choice(f"config/run/{run}.yaml: stages", stage, "stage")
    for path in numbers:
        if path.stem.removeprefix(f"{run}_") not in stages:
            raise ValueError(
                f"{path}: run '{run}' has no such stage; rename or remove the file; {did_you_mean(path.stem, [f'{run}_{s}' for s in stages])}"
            )
    return stages


def check_models(configs):
    """All stages of a run share one target, and one name means one target in all chosen runs."""
    known, used = {}, {}
    for (run, variant, stage), config in configs.items():
        model = config.recipe.model
        key = f"run '{run}', stage '{stage}': recipe.model.name"
        if used.setdefault(run, model.name) != model.name:
            raise ValueError(
                f"{key}: '{model.name}', but another stage of the run trains for '{used[run]}'; choose one target"
            )
        target = (model.source, config.build if model.source == "build" else None)
        if known.setdefault(model.name, target) != target:
            raise ValueError(
                f"{key}: '{model.name}' stands for two different targets (source or build); give each its own name"
            )


def fetched_folder(name):
    """Where a target of the hub lies when it has been fetched."""
    return Path(TARGET.format(model=name)).parent / "target"


def check_targets(configs, parsed):
    """Every target that can be looked at has a class for it, and positions for the rows and the prompts."""
    for (run, _, stage), cfg in configs.items():
        key, model = f"run '{run}', stage '{stage}': recipe", cfg.recipe.model
        fetched = fetched_folder(model.name)
        targets.check_target(f"{key}.model", cfg.recipe, fetched)
        positions = targets.positions_of(model.source, cfg.build.max_position, fetched)
        if positions is not None:
            targets.check_length(key, cfg.recipe.data.sequence_length, positions)
            check_rooms(parsed, positions)


def check_rooms(parsed, positions):
    """Every task's prompts and answers find room in a target's positions."""
    for name, task in parsed.items():
        try:
            tasks.check_room(name, task, positions)
        except ValueError as error:
            raise ValueError(f"config/workflow.yaml: {error}") from None


def check_prompts(parsed):
    """The prompts of every task have the fields that its template asks for."""
    for name, task in parsed.items():
        if isinstance(task, tasks.Benchmark):
            key = f"config/workflow.yaml: evaluation.tasks.{name}"
            check_fields(key, task, prompt_files(name, task))


def check_mixture(model, phases):
    """A built target names what it is trained on."""
    if not phases:
        raise ValueError(
            f"config/model/{model}.yaml: build.mixture: a target that is built needs at least one phase of training"
        )


def origins(source):
    """What a source's records come from: the files themselves, or a repository of the hub as a whole."""
    if source in GENERATED:
        return [source]
    if is_hub(source):
        return [names.parse(source).repository]
    files = source_files.files_of(source)
    check_paths(files)
    return [str(path.resolve()) for path in files]


def check_held_out(names, data):
    """One origin has one share of held-out records: else a dataset trains on what another holds out."""
    first = {}
    for name in names:
        share = complete(name, data[name])["held_out"]
        told = f"data.{name}.held_out: {share}"
        told += "" if "held_out" in data[name] else " (the default)"
        for origin in origins(data[name]["source"]):
            wanted, other = first.setdefault(origin, (share, told))
            if share != wanted:
                raise ValueError(
                    f"config/workflow.yaml: {told}, but {other}, and both are made from '{origin}': a record held out in one"
                    f" would be trained on in the other; give both the same held_out"
                )


def check_evaluation(section):
    """The parsed evaluation section, of which every file of prompts is there."""
    try:
        parsed = tasks.parse(section)
        for name, task in parsed.tasks.items():
            if isinstance(task, tasks.Benchmark):
                prompt_files(name, task)
    except ValueError as error:
        raise ValueError(f"config/workflow.yaml: {error}") from None
    return parsed


def prompt_files(name, task):
    """The files of a task's prompts. Raises ValueError when one is not there."""
    try:
        files = source_files.files_of(task.source)
        check_paths(files)
    except ValueError as error:
        raise ValueError(
            f"evaluation.tasks.{name}.source: {error} (seen from {Path.cwd()})"
        ) from None
    return files


def check_task_files(parsed, trained, data):
    """No file of a task's prompts is trained on: what it measured would be no new text."""
    trained_on = {
        origin: name for name in trained for origin in origins(data[name]["source"])
    }
    for name, task in parsed.items():
        if isinstance(task, tasks.Benchmark):
            for path in prompt_files(name, task):
                dataset = trained_on.get(str(path.resolve()))
                if dataset is not None:
                    raise ValueError(
                        f"config/workflow.yaml: evaluation.tasks.{name}.source: {path} is trained on, as data.{dataset};"
                        f" give other prompts, or its held-out records: {name}: {{data: {dataset}, context: [64, 1024]}}"
                    )


def check_data(datasets, data):
    """Every dataset in use is declared, its settings are right, and its files are there. `datasets`: name -> the key that names it."""
    for name, key in datasets.items():
        if name not in data:
            raise ValueError(
                f"{key}: there is no dataset '{name}' under `data` in config/workflow.yaml; add it there"
                f" ({name}: {{source: <file>.jsonl, shards: <number>}}, or {{preset: <file of config/data/>}}) or name another; {did_you_mean(name, data)}"
            )
        try:
            complete(name, data[name])
        except ValueError as error:
            raise ValueError(f"config/workflow.yaml: {error}") from None
        try:
            origins(data[name]["source"])
        except ValueError as error:
            raise ValueError(
                f"config/workflow.yaml: data.{name}.source: {error} (seen from {Path.cwd()})"
            ) from None
    check_held_out(datasets, data)


def warn_of_unseen_forgetting(data_by_run, measured):
    """Tell which datasets a later stage may forget without a task to show it: days of training end in a gate that judges
    nothing. `data_by_run`: the datasets of each run's stages, in order; `measured`: those of tasks.
    """
    unseen = {
        before: None
        for stages in data_by_run
        for before, after in pairwise(stages)
        if before != after and before not in measured
    }
    if unseen:
        logger.warning(
            f"gates.forgetting cannot judge what is forgotten of {', '.join(unseen)}: no task measures it. Add one for each "
            f"to evaluation.tasks in config/workflow.yaml, such as own: {{data: {next(iter(unseen))}, context: [64, 448]}}, "
            "or set gates.forgetting to null"
        )
