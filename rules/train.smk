# The stages: their frozen configurations and their training.


# Hydra composes when the graph is built; from here on only these two files count. `recipe` decides the weights. `runtime`
# retrains nothing, so it is no input of `train`: before the first job of a call of Snakemake starts, the call's stages get
# theirs (onstart in the Snakefile). If it were an ancient input, a changed one would hide from Snakemake (9.27) that its stage
# is not finished, and the call would end well without training.
use rule build_config as stage_config with:
    output:
        paths.SECTION,
    log:
        "logs/stage_config/{run}/{variant}/{stage}-{section}.log",
    localrule: True
    params:
        text=from_plan(PLAN.stage_yaml),


# The target is read only for its number of tokens.
rule draft_vocabulary:
    input:
        packed=from_plan(PLAN.all_rows),
        target=from_plan(PLAN.target),
        taken=from_plan(PLAN.taken_vocabulary),
    output:
        paths.DRAFT_VOCABULARY,
    log:
        "logs/draft_vocabulary/{run}/{variant}/{size}.log",
    resources:
        mem_mb=8000,
        runtime="4h",
    params:
        packed=from_plan(PLAN.named_rows),
        taken=option_with_files("--ids-of", "taken"),
    shell:
        "python -m longspec.data vocabulary --packed {params.packed:q} --target {input.target:q}"
        " --size {wildcards.size:q} {params.taken:q} --out {output:q} > {log:q} 2>&1"


# On each of `nodes` machines, `ranks` processes share the cores: for a Slurm job `tasks_per_node` times `cpus_per_task`. Sums
# depend on the threads of a process, which are `threads` over `ranks`: so machines with two and with more cores train the same
# draft. `--cores 1`, --set-threads or a profile with other cores or ranks train a slightly different one. R/checkpoints/ is not
# declared: Snakemake deletes what a failed job declares, and a stage resumes from there. The log is a link to the newest
# attempt's log. `exec`: a shell in between would end at once when Slurm signals the job, and the job with it, before the step
# is saved. Stages and their drafts have priority over evaluations: baselines can be measured as soon as there is a target, and
# would hold cores that the first stage waits for.
rule train:
    input:
        recipe=paths.RECIPE,
        target=from_plan(PLAN.target),
        data=from_plan(PLAN.rows),
        replayed=from_plan(PLAN.replayed_rows),
        weights=from_plan(PLAN.previous_weights),
        vocabulary=from_plan(PLAN.vocabulary),
        states=from_plan(STATES.states),
    output:
        checkpoint=f"{paths.STAGE}/checkpoint.json",
        metrics=f"{paths.STAGE}/metrics.jsonl",
    log:
        "logs/train/{run}/{variant}/{stage}.log",
    priority: 1
    threads: STAGE_THREADS
    resources:
        **NODE_JOB,
        gres="",
        gpu_jobs=1,
        mem_mb=stage_memory,
        runtime=LIMITS.longest_job,
    params:
        init=option_with_files("--init-weights", "weights"),
        vocabulary=option_with_files("--vocabulary", "vocabulary"),
        states=from_plan_and_input(STATES.options),
        replay=from_plan_and_input(PLAN.replay_options),
        out=subpath(output.checkpoint, parent=True),
    shell:
        "exec python -m longspec.cluster launch --nodes {resources.nodes:q} --ranks {resources.ranks:q}"
        " --tasks {resources.tasks_per_node:q} --cpus {resources.cpus_per_task:q} --gres={resources.gres:q}"
        " --log {log:q} -- longspec.train --recipe {input.recipe:q} --runtime {params.out:q}/runtime.yaml"
        " --target {input.target:q} --data {input.data:q} {params.replay:q} {params.init:q} {params.vocabulary:q}"
        " {params.states:q} --out {params.out:q} --deadline slurm"
