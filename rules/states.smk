# The target's states, computed once for all stages that train offline on them (recipe.states).


# One job for each shard of rows, {part} 0-of-4, and one for the held-out rows that estimate acceptance while a stage trains,
# held-out-8; on the machines of `train`. Only shard.json is declared of what is in the folder: Snakemake deletes what a failed
# job declares, and the next job goes on from the rows that are there. Recipe and runtime are written there before the job
# starts (onstart in the Snakefile). They are no input: the folder's name holds what the recipe says of the states.
rule build_states:
    input:
        target=paths.TARGET,
        data="data/packed/{model}/{rows}/manifest.json",
        vocabulary=from_plan(STATES.vocabulary),
    output:
        shard=f"{paths.STATES}/{{part}}/shard.json",
    log:
        "logs/build_states/{model}/{rows}/{declaration}/{part}.log",
    priority: 1
    threads: 2
    resources:
        **NODE_JOB,
        gres="",
        gpu_jobs=1,
        mem_mb=LIMITS.node_mem,
        runtime=LIMITS.longest_job,
    params:
        vocabulary=option_with_files("--vocabulary", "vocabulary"),
        out=subpath(output.shard, parent=True),
    shell:
        "exec python -m longspec.cluster launch --nodes {resources.nodes:q} --ranks {resources.ranks:q}"
        " --tasks {resources.tasks_per_node:q} --cpus {resources.cpus_per_task:q} --gres={resources.gres:q}"
        " --log {log:q} -- longspec.states build --recipe {params.out:q}/recipe.yaml --runtime {params.out:q}/runtime.yaml"
        " --target {input.target:q} --data {input.data:q} {params.vocabulary:q} --out {params.out:q}"


# A stage's own list of its shards outlives them, so that a trained stage misses nothing.
rule stage_states:
    input:
        from_plan(STATES.read),
    output:
        paths.STAGE_STATES,
    log:
        "logs/stage_states/{linked}.log",
    wildcard_constraints:
        linked=one_of(STATES.linked),
    localrule: True
    shell:
        "ls {input:q} > {output:q} 2> {log:q}"
