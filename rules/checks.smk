# What can be wrong with the configuration is found here, before the graph is built: an error inside an input function
# goes unseen whenever the output already exists. Each message names the key and the fix. Functions only.

import difflib
from dataclasses import fields, is_dataclass
from itertools import pairwise
from pathlib import Path

import jsonschema
import yaml
from omegaconf.errors import ConfigKeyError
from snakemake.exceptions import WorkflowError
from snakemake.logging import logger

from longspec.config import CONFIG_DIR, compose
from longspec.data import presets
from longspec.data.hub import names
from longspec.data.read import source_files
from longspec.data.raw import complete, is_hub
from longspec.evaluate import tasks

HEADER = "# @package _global_"
GENERATED = ("stdlib", "puzzles")  # sources made on this machine


def did_you_mean(name, known):
    """The names that exist, the likeliest typo first."""
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"{hint}Known: {', '.join(sorted(known)) or 'none'}."


def schema_message(error):
    """One line of text for one violation of the schema."""
    where = ".".join(str(part) for part in error.absolute_path)
    if error.validator == "additionalProperties":
        known = list(error.schema["properties"])
        unknown = [key for key in error.instance if key not in known]
        return " ".join(
            f"{'.'.join(filter(None, [where, str(key)]))}: unknown key; {did_you_mean(str(key), known)}"
            for key in unknown
        )
    what = error.schema.get("description")
    return f"{where or 'top level'}: {error.message}" + (
        f"; it is {what}" if what else ""
    )


def missing_last(error):
    """A misspelt key is told before the missing one that it leaves."""
    return error.validator == "required", list(map(str, error.absolute_path))


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
        raise WorkflowError(f"config/workflow.yaml: {error}") from None


def check_schema(settings):
    """Hold config/workflow.yaml (with --config and --configfile on top) against its schema."""
    try:
        presets.refuse_secrets(settings)
    except ValueError as error:
        raise WorkflowError(f"config/workflow.yaml: {error}") from None
    schema = yaml.safe_load((CONFIG_DIR / "workflow.schema.yaml").read_text())
    errors = jsonschema.Draft202012Validator(schema).iter_errors(settings)
    lines = [schema_message(error) for error in sorted(errors, key=missing_last)]
    if lines:
        raise WorkflowError("config/workflow.yaml: " + "\n".join(lines))


def check_choice(key, name, group):
    """A name that must be a file of one group of config/."""
    known = [path.stem for path in (CONFIG_DIR / group).glob("*.yaml")]
    if name not in known:
        raise WorkflowError(
            f"{key}: there is no config/{group}/{name}.yaml; {did_you_mean(name, known)}"
        )


def known_keys(error):
    """For a key that the configuration does not know, those it knows; Hydra leaves it in the error's context."""
    while error is not None:
        if isinstance(error, ConfigKeyError) and is_dataclass(error.object_type):
            known = [field.name for field in fields(error.object_type)]
            return f"\n{did_you_mean(str(error.key), known)}"
        error = error.__context__
    return ""


def composed(**choices):
    """One composed configuration; what Hydra refuses is reported with the choices that lead to it."""
    overrides = [f"{group}={name}" for group, name in choices.items()]
    try:
        return compose("train", overrides)
    except Exception as error:
        raise WorkflowError(
            f"config/train.yaml with {' '.join(overrides)} does not compose: {error}{known_keys(error)}"
        ) from None


def check_header(path):
    """A run's file sets keys of the whole configuration, which Hydra must be told in its first line."""
    if not path.read_text().startswith(HEADER):
        raise WorkflowError(f"{path}: its first line must be '{HEADER}'")


def run_stages(run):
    """The stages of a run, in order."""
    check_choice("runs", run, "run")
    check_header(CONFIG_DIR / f"run/{run}.yaml")
    stages = list(composed(run=run).stages)
    if not stages or len(stages) != len(set(stages)):
        raise WorkflowError(
            f"config/run/{run}.yaml: stages: must name at least one stage, each once; is {stages}"
        )
    for stage in stages:
        check_choice(f"config/run/{run}.yaml: stages", stage, "stage")
    for path in (CONFIG_DIR / "run_stage").glob(f"{run}_*.yaml"):
        check_header(path)
        if path.stem.removeprefix(f"{run}_") not in stages:
            raise WorkflowError(
                f"{path}: run '{run}' has no such stage; rename or remove the file; {did_you_mean(path.stem, [f'{run}_{s}' for s in stages])}"
            )
    return stages


def check_models(configs):
    """All stages of a run share one target, and one name means one target in all chosen runs."""
    targets, used = {}, {}
    for (run, variant, stage), config in configs.items():
        model = config.recipe.model
        key = f"run '{run}', stage '{stage}': recipe.model.name"
        if used.setdefault(run, model.name) != model.name:
            raise WorkflowError(
                f"{key}: '{model.name}', but another stage of the run trains for '{used[run]}'; choose one target"
            )
        target = (model.source, config.build if model.source == "build" else None)
        if targets.setdefault(model.name, target) != target:
            raise WorkflowError(
                f"{key}: '{model.name}' stands for two different targets (source or build); give each its own name"
            )


def check_mixture(model, phases):
    """A built target names what it is trained on."""
    keys = {"dataset", "sequence_length", "rows", "steps"}
    key = f"config/model/{model}.yaml: build.mixture"
    if not phases:
        raise WorkflowError(
            f"{key}: a target that is built needs at least one phase of training"
        )
    for phase in phases:
        if set(phase) != keys:
            raise WorkflowError(
                f"{key}: each phase needs exactly {', '.join(sorted(keys))}; this one has {', '.join(sorted(phase))}"
            )


def origins(source):
    """What a source's records come from: the files themselves, or a repository of the hub as a whole."""
    if source in GENERATED:
        return [source]
    if is_hub(source):
        return [names.parse(source).repository]
    return [str(path.resolve()) for path in source_files.files_of(source)]


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
                raise WorkflowError(
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
        raise WorkflowError(f"config/workflow.yaml: {error}") from None
    return parsed


def prompt_files(name, task):
    """The files of a task's prompts. Raises ValueError when one is not there."""
    try:
        return source_files.files_of(task.source)
    except ValueError as error:
        raise ValueError(
            f"evaluation.tasks.{name}.source: {error} (seen from {Path.cwd()})"
        ) from None


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
                    raise WorkflowError(
                        f"config/workflow.yaml: evaluation.tasks.{name}.source: {path} is trained on, as data.{dataset};"
                        f" give other prompts, or its held-out records: {name}: {{data: {dataset}, context: [64, 1024]}}"
                    )


def check_data(datasets, data):
    """Every dataset in use is declared, its settings are right, and its files are there. `datasets`: name -> the key that names it."""
    for name, key in datasets.items():
        if name not in data:
            raise WorkflowError(
                f"{key}: there is no dataset '{name}' under `data` in config/workflow.yaml; add it there"
                f" ({name}: {{source: <file>.jsonl, shards: <number>}}, or {{preset: <file of config/data/>}}) or name another; {did_you_mean(name, data)}"
            )
        try:
            complete(name, data[name])
        except ValueError as error:
            raise WorkflowError(f"config/workflow.yaml: {error}") from None
        try:
            origins(data[name]["source"])
        except ValueError as error:
            raise WorkflowError(
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
