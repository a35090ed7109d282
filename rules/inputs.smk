# What a job reads and is told, from its wildcards and the composed configurations. Functions only.

import json
import re
from pathlib import Path

from longspec.atomic_files import write_text


def stage_config(wildcards):
    """The composed configuration of one stage."""
    return CONFIGS[wildcards.run, wildcards.variant, wildcards.stage]


def stage_yaml(wildcards):
    """One of its sections as canonical YAML, one parameter: Snakemake records the values of parameters, not their names."""
    return to_yaml(stage_config(wildcards)[wildcards.section])


def build_yaml(wildcards):
    """How a target of our own is made, as canonical YAML."""
    return to_yaml(MODELS[wildcards.model].build)


def model_source(wildcards):
    """Where a target that is not built comes from."""
    return MODELS[wildcards.model].recipe.model.source


def model_name(wildcards):
    """The target of a run."""
    return next(
        cfg.recipe.model.name for key, cfg in CONFIGS.items() if key[0] == wildcards.run
    )


def target_of(wildcards):
    """The target's manifest."""
    return TARGET.format(model=model_name(wildcards))


def tokenizer_of(wildcards):
    """The manifest of the target's tokenizer."""
    return TOKENIZER.format(model=model_name(wildcards))


def raw_settings(wildcards):
    """How a dataset's records are made, as canonical JSON; in how many shards it is tokenized is not part of it."""
    settings = config["data"][wildcards.dataset]
    return json.dumps(
        {key: settings[key] for key in settings if key != "shards"}, sort_keys=True
    )


def source_of(wildcards):
    """Where a dataset comes from."""
    return config["data"][wildcards.dataset]["source"]


def revision_of(wildcards):
    """The branch, tag or commit of a dataset on the hub."""
    return complete(wildcards.dataset, config["data"][wildcards.dataset])["revision"]


def raw_source(wildcards):
    """What a dataset is read from: files, or the manifest of what was fetched; nothing for records made here."""
    source = source_of(wildcards)
    if source in GENERATED:
        return []
    return HUB if is_hub(source) else sources.files_of(source)


def fetched_option(wildcards, input):
    """How the job is told of fetched files; other files it finds by the settings."""
    return ["--fetched", *input] if is_hub(source_of(wildcards)) else []


def token_shards(wildcards):
    """The manifests of all token shards of a dataset."""
    shards = range(config["data"][wildcards.dataset]["shards"])
    return [TOKENS.format(shard=f"{shard:03d}", **wildcards) for shard in shards]


def packed(cfg):
    """The rows one stage trains on."""
    data = cfg.recipe.data
    return PACKED.format(
        model=cfg.recipe.model.name,
        dataset=data.name,
        collation=data.collation,
        length=data.sequence_length,
        overlong=data.overlong,
    )


def stage_data(wildcards):
    """The manifest of the rows one stage trains on."""
    return packed(stage_config(wildcards))


def run_configs(wildcards):
    """The configurations of all stages of a run; of one variant where the wildcards name it."""
    return [
        CONFIGS[wildcards.run, v, s]
        for v in variants_of(wildcards)
        for s in STAGES[wildcards.run]
    ]


def packed_data(wildcards):
    """The manifests of all rows a run, or one variant of it, trains on."""
    return sorted({packed(cfg) for cfg in run_configs(wildcards)})


def tokenizer_data(wildcards):
    """The raw records a built tokenizer is trained on: its target's, whatever runs are chosen beside."""
    names = {phase["dataset"] for phase in mixture(wildcards.model)}
    return [RAW.format(dataset=name) for name in sorted(names)]


def mixture_data(wildcards):
    """The rows a built target is trained on, in the order of its phases: every token is a label."""
    return list(
        dict.fromkeys(
            PACKED.format(
                model=wildcards.model,
                dataset=phase["dataset"],
                collation="base",
                length=phase["sequence_length"],
                overlong="split",
            )
            for phase in mixture(wildcards.model)
        )
    )


def report_raw(wildcards):
    """The raw records a report tells of: trained on or evaluated on."""
    names = {cfg.recipe.data.name for cfg in run_configs(wildcards)} | set(
        EVALUATION_DATA
    )
    return [RAW.format(dataset=name) for name in sorted(names)]


def variants_of(wildcards):
    """The variant the wildcards name, or all of them."""
    return [wildcards.variant] if "variant" in wildcards.keys() else config["variants"]


def stage_folders(wildcards):
    """The folders of all stages of a run, or of one variant of it, in order."""
    return [
        STAGE.format(run=wildcards.run, variant=variant, stage=stage)
        for variant in variants_of(wildcards)
        for stage in STAGES[wildcards.run]
    ]


def stage_files(wildcards):
    """What is told about each trained stage."""
    names = ["checkpoint.json", "metrics.jsonl", "recipe.yaml"]
    return [f"{folder}/{name}" for folder in stage_folders(wildcards) for name in names]


def freeze_runtimes(jobs):
    """Write down how each stage among the jobs is run. A finished stage keeps what it was run with."""
    for job in jobs:
        if job.rule.name == "train":
            path = Path(job.params.out) / "runtime.yaml"
            text = to_yaml(stage_config(job.wildcards)["runtime"])
            if not path.is_file() or path.read_text() != text:
                write_text(path, text)


def draft_files(wildcards, stage, names):
    """Files of one stage's extracted draft."""
    folder = STAGE.format(run=wildcards.run, variant=wildcards.variant, stage=stage)
    return [f"{folder}/draft/{name}" for name in names]


def previous_draft(wildcards):
    """The weights a stage starts from; none for the first."""
    stages = STAGES[wildcards.run]
    before = stages[: stages.index(wildcards.stage)][-1:]
    return [
        path
        for stage in before
        for path in draft_files(wildcards, stage, ["model.safetensors"])
    ]


def init_option(wildcards, input):
    """How the trainer is told of them."""
    return ["--init-weights", *input.weights] if input.weights else []


def last_draft(wildcards):
    """The extracted draft of a run's last stage."""
    return draft_files(wildcards, STAGES[wildcards.run][-1], DRAFT_FILES)


def drafter_stage(wildcards):
    """The stage whose recipe shapes a drafter: its own, or the first for the baselines."""
    stages = STAGES[wildcards.run]
    return wildcards.drafter if wildcards.drafter in stages else stages[0]


def drafter_recipe(wildcards):
    """The recipe that goes with a drafter."""
    return f"{STAGE}/recipe.yaml".format(
        run=wildcards.run, variant=wildcards.variant, stage=drafter_stage(wildcards)
    )


def drafter_weights(wildcards):
    """The weights of a drafter; none for the baselines."""
    if wildcards.drafter in BASELINES:
        return []
    return draft_files(
        wildcards, wildcards.drafter, ["model.safetensors", "config.json"]
    )


def drafter_options(wildcards, input):
    """How the evaluation is told which drafter it measures."""
    told = ["--drafter", wildcards.drafter]
    if wildcards.drafter in BASELINES:
        return told
    return [*told, "--draft", draft_folder(wildcards, input)]


def draft_folder(wildcards, input):
    """The folder of the draft a job reads."""
    return Path(input.draft[0]).parent


def target_folder(wildcards, input):
    """The folder of the target's manifest."""
    return Path(input.target).parent


def evaluation_settings(wildcards):
    """What is measured, as canonical JSON. Not a string: Snakemake would take a template's fields for wildcards."""
    return EVALUATION


def task_files(wildcards):
    """The files of all tasks whose prompts are not held-out records."""
    found = [
        path
        for name, task in TASKS.items()
        if isinstance(task, tasks.Benchmark)
        for path in prompt_files(name, task)
    ]
    return sorted(set(found))


def evaluations(wildcards):
    """The measurements a report compares: the baselines and every stage, for every variant."""
    return [
        EVALUATED.format(run=wildcards.run, variant=variant, drafter=drafter)
        for variant in config["variants"]
        for drafter in [*BASELINES, *STAGES[wildcards.run]]
    ]


def final_drafts(wildcards):
    """The final draft of every variant of a run."""
    return [
        f"{FINAL_DRAFT}/provenance.json".format(run=wildcards.run, variant=v)
        for v in config["variants"]
    ]


def report_variants(wildcards):
    """The folders a report reads, by variant."""
    return [f"--variant {v}=results/{wildcards.run}/{v}" for v in config["variants"]]


def first_variant(wildcards, section):
    """A section of all stages of a run's first variant; the other variants ask the same of a machine."""
    variant = config["variants"][0]
    return [
        f"{STAGE.format(run=wildcards.run, variant=variant, stage=stage)}/{section}.yaml"
        for stage in STAGES[wildcards.run]
    ]


def preflight_recipes(wildcards):
    """The recipes of all stages."""
    return first_variant(wildcards, "recipe")


def preflight_runtimes(wildcards):
    """How they are run."""
    return first_variant(wildcards, "runtime")


def gpus_of(wildcards, resources):
    """The GPUs of each node that the job asks Slurm for."""
    asked = re.search(
        r"\bgpu(?::[^:,]*[^:,\d][^:,]*)?(?::(\d+))?\b", str(resources.gres)
    )
    return int(asked[1] or 1) if asked else 0


def compared_page(wildcards):
    """The page of the two chosen runs."""
    with told_in_one_line():
        if len(RUNS) != 2:
            raise ValueError(
                f"runs: {', '.join(RUNS)}: two runs can be compared; choose them: snakemake compare --config 'runs=[a,b]'"
            )
    return f"{COMPARED}.html".format(first=RUNS[0], second=RUNS[1])
