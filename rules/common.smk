# What the rules share: the path scheme and the composed configurations. No rules here.
# Three owners: the rules own files and edges, config/ owns numbers, profiles/ owns machines.

import json
import os
import re
import sys
from pathlib import Path

from longspec.config import CHOICES, to_yaml

# Jobs run the interpreter that runs Snakemake, also when its environment is not activated.
BIN = str(Path(sys.executable).parent)
os.environ.update(PATH=os.pathsep.join([BIN, *os.get_exec_path()]))

# Jobs read what lies here; compute nodes often have no way to the internet, and a question to the hub would hang. Only the
# rules that fetch, which are local, ask as the user's own environment says.
user = {"HF_HUB_OFFLINE": "0"} | os.environ
os.environ.setdefault("FETCH_OFFLINE", user["HF_HUB_OFFLINE"])
os.environ.update(HF_HUB_OFFLINE="1")

HUB = "data/hub/{dataset}/manifest.json"
RAW = "data/raw/{dataset}/manifest.json"
TOKENS = "data/tokens/{model}/{dataset}/{shard}.json"
PACKED = "data/packed/{model}/{dataset}-{collation}-{length}-{overlong}/manifest.json"
TOKENIZER = "models/{model}/tokenizer_manifest.json"
TARGET = "models/{model}/target_manifest.json"
STAGE = "results/{run}/{variant}/{stage}"
EVALUATED = "results/{run}/{variant}/evaluation/{drafter}.jsonl"
FINAL_DRAFT = "results/{run}/{variant}/final_draft"
COMPARED = "results/compare/{first}_{second}"  # no run's name has an underscore
DRAFT_FILES = [
    "model.safetensors",
    "draft_model_weights.pth",
    "config.json",
    "custom_generate/generate.py",
]
BASELINES = ["untrained", "lookup"]  # drafters that no stage trains

with told_in_one_line():
    if "data" in config:
        config["data"] = with_presets(config["data"], presets.DATA)
    if isinstance(config.get("evaluation"), dict) and "tasks" in config["evaluation"]:
        config["evaluation"]["tasks"] = with_presets(
            config["evaluation"]["tasks"], presets.TASK
        )
    check_schema(config)
    for name in config["variants"]:
        check_choice("variants", name, "variant")

    RUNS = config["runs"]
    ENVMODULES = config.get("envmodules", [])
    STAGES = {run: run_stages(run) for run in RUNS}
    STAGE_NAMES = list(
        dict.fromkeys(stage for stages in STAGES.values() for stage in stages)
    )
    CONFIGS = {
        (run, variant, stage): composed(run=run, variant=variant, stage=stage)
        for run in RUNS
        for variant in config["variants"]
        for stage in STAGES[run]
    }
    check_models(CONFIGS)
    MODELS = {cfg.recipe.model.name: cfg for cfg in CONFIGS.values()}
    BUILT = [name for name, cfg in MODELS.items() if cfg.recipe.model.source == "build"]
    EVALUATION = json.dumps(config["evaluation"], sort_keys=True)
    TASKS = check_evaluation(config["evaluation"]).tasks
    EVALUATION_DATA = sorted(
        {task.data for task in TASKS.values() if isinstance(task, tasks.HeldOut)}
    )
    GATES = json.dumps(config["gates"], sort_keys=True)
    check_targets(CONFIGS, TASKS)


FROM_HUB = [name for name, entry in config["data"].items() if is_hub(entry["source"])]


def one_of(names):
    """A wildcard's pattern; it matches nothing when there is no name."""
    return "|".join(map(re.escape, names)) or "(?!)"


wildcard_constraints:
    run=one_of(RUNS),
    variant=one_of(config["variants"]),
    stage=one_of(STAGE_NAMES),
    section="recipe|runtime",
    drafter=one_of(dict.fromkeys([*BASELINES, *STAGE_NAMES])),
    model=one_of(MODELS),
    dataset=one_of(config["data"]),
    shard=r"\d{3}",
    collation=one_of(CHOICES["data.collation"]),
    length=r"\d+",
    overlong=one_of(CHOICES["data.overlong"]),


def job_threads(wildcards, threads):
    """The cores of a job's processes. Commands read them from this resource, because `threads` is cut to the cores of
    the machine that plans; a profile for a cluster sets its own."""
    return threads


def shard_threads(wildcards):
    """The cores of one shard's job on this machine: those of all shards together, shared."""
    shards = config["data"][wildcards.dataset]["shards"]
    return max(1, (workflow.resource_settings.cores or 1) // shards)


def mixture(model):
    """The training phases of a built target; none of a fetched one."""
    return MODELS[model].build.mixture if model in BUILT else []


with told_in_one_line():
    for name in BUILT:
        check_mixture(name, mixture(name))


def datasets_in_use():
    """Every dataset of the chosen runs with the key that names it."""
    names = {}
    for (run, _, stage), cfg in CONFIGS.items():
        names[cfg.recipe.data.name] = f"run '{run}', stage '{stage}': recipe.data.name"
    for model in BUILT:
        for phase in mixture(model):
            names[phase["dataset"]] = (
                f"config/model/{model}.yaml: build.mixture: dataset"
            )
    for name, task in TASKS.items():
        if isinstance(task, tasks.HeldOut):
            names[task.data] = f"config/workflow.yaml: evaluation.tasks.{name}.data"
    return names


def datasets_trained_on():
    """Every dataset that a stage or a built target of the chosen runs trains on."""
    phases = [phase["dataset"] for model in BUILT for phase in mixture(model)]
    return {cfg.recipe.data.name for cfg in CONFIGS.values()} | set(phases)


with told_in_one_line():
    check_data(datasets_in_use(), config["data"])
    check_task_files(TASKS, datasets_trained_on(), config["data"])
    if workflow.is_main_process:  # jobs read this file again
        check_prompts(TASKS)
# Jobs read this file again; the Snakemake that plans them warns, in a dry run too.
if workflow.is_main_process and config["gates"]["forgetting"] is not None:
    warn_of_unseen_forgetting(
        [
            [CONFIGS[run, variant, stage].recipe.data.name for stage in STAGES[run]]
            for run in RUNS
            for variant in config["variants"]
        ],
        EVALUATION_DATA,
    )
