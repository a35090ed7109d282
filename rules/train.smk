# Hydra composes when the graph is built; from here on only these two files count. `recipe` is what decides the
# weights; `train` takes `runtime` as ancient, so that it never re-trains anything.
rule stage_config:
    output:
        f"{STAGE}/{{section}}.yaml",
    log:
        "logs/stage_config/{run}/{variant}/{stage}-{section}.log",
    benchmark:
        "timings/stage_config/{run}/{variant}/{stage}-{section}.tsv"
    localrule: True
    params:
        text=stage_yaml,
    shell:
        "printf %s {params.text:q} > {output} 2> {log}"


# `ranks` processes share the job's cores. Sums depend on the number of threads a process has: `threads` over `ranks`, so
# that machines with two and with more cores train the same draft; `--cores 1`, --set-threads or a profile with other
# cores or ranks train a slightly different one. R/checkpoints/ is not declared: Snakemake deletes what a failed job
# declares, and a stage resumes from there. After a SIGTERM the launcher gives its processes 600 seconds, not 30, to end
# their step and save; Slurm's own patience is KillWait.
rule train:
    input:
        recipe=f"{STAGE}/recipe.yaml",
        runtime=ancient(f"{STAGE}/runtime.yaml"),
        target=target_of,
        data=stage_data,
        weights=previous_draft,
    output:
        checkpoint=f"{STAGE}/checkpoint.json",
        metrics=f"{STAGE}/metrics.jsonl",
    log:
        "logs/train/{run}/{variant}/{stage}.log",
    benchmark:
        "timings/train/{run}/{variant}/{stage}.tsv"
    threads: 2
    resources:
        ranks=1,
        cpus_per_task=job_threads,
        mem_mb=8000,
        runtime="4h",
    params:
        init=init_option,
        out=subpath(output.checkpoint, parent=True),
    shell:
        "cores={resources.cpus_per_task}; ranks={resources.ranks};"
        " threads=$(( cores > ranks ? cores / ranks : 1 ));"
        " OMP_NUM_THREADS=$threads MKL_NUM_THREADS=$threads"
        " python -m torch.distributed.run --standalone --nproc-per-node $ranks --shutdown-timeout 600"
        " -m longspec.train --recipe {input.recipe} --runtime {input.runtime}"
        " --target {input.target} --data {input.data} {params.init} --out {params.out} --deadline slurm"
        " > {log} 2>&1"
