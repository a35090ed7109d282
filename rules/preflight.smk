# `snakemake preflight`: check in minutes what a job of days needs, where it would run. No stage waits for it.

import time

ASKED = time.time()


# `asked` differs in each call of Snakemake, so that the job always runs: a machine that was well yesterday may fail today. A
# failed job's log has the table. Another try would find the same.
rule preflight_run:
    input:
        recipes=from_plan(partial(PLAN.frozen, "recipe")),
        runtimes=from_plan(partial(PLAN.frozen, "runtime")),
        target=from_plan(PLAN.target),
    output:
        report=paths.PREFLIGHT,
    log:
        "logs/preflight/{run}.log",
    retries: 0
    threads: 2
    resources:
        **NODE_JOB,
        gres="",
        mem_mb=LIMITS.node_mem,
        runtime="15m",
    params:
        asked=ASKED,
        gpus=gpus_of,
        out=subpath(output.report, parent=True),
    shell:
        "python -m longspec.cluster launch --nodes {resources.nodes:q} --ranks {resources.ranks:q}"
        " --tasks {resources.tasks_per_node:q} --cpus {resources.cpus_per_task:q} --gres={resources.gres:q}"
        " --log {log:q} -- longspec.cluster preflight --recipe {input.recipes:q} --runtime {input.runtimes:q}"
        " --target {input.target:q} --gpus-expected {params.gpus:q} --node-mem {resources.mem_mb:q}"
        " --out {params.out:q} --report {output.report:q}"


rule preflight:
    input:
        collect(paths.PREFLIGHT, run=PLAN.runs),
