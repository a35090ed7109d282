# Answers by the target itself to a dataset's questions (data.<name>.regenerate), in place of the answers it came with.


# One job per shard. Only shard.json is declared of what is in the folder: Snakemake deletes what a failed job declares, and the
# next job goes on from the records that are done.
rule answer:
    input:
        raw=paths.RAW,
        target=paths.TARGET,
        tokenizer=paths.TOKENIZER,
    output:
        f"{paths.ANSWERS}/{{part}}-of-{{parts}}/shard.json",
    log:
        "logs/answer/{model}/{dataset}/{answering}/{part}-of-{parts}.log",
    wildcard_constraints:
        dataset=one_of(ANSWERS.computed),
    threads: 2
    resources:
        ranks=1,
        cpus_per_task=job_threads,
        gres="",
        gpu_jobs=1,
        mem_mb=8000,
        runtime="4h",
    params:
        settings=from_plan(ANSWERS.settings),
        runtime=from_plan_and_input(ANSWERS.runtime),
    shell:
        "python -m longspec.cluster launch --plain --ranks {resources.ranks:q} --cpus {resources.cpus_per_task:q}"
        " --gres={resources.gres:q}"
        " -- longspec.answers shard --raw {input.raw:q} --target {input.target:q} --tokenizer {input.tokenizer:q}"
        " --settings {params.settings:q} --runtime {params.runtime:q}"
        " --shard {wildcards.part:q} --num-shards {wildcards.parts:q} --out {output:q} > {log:q} 2>&1"


# A server that runs elsewhere: the job needs no GPU, so a profile gives it other resources.
use rule answer as ask with:
    log:
        "logs/ask/{model}/{dataset}/{answering}/{part}-of-{parts}.log",
    wildcard_constraints:
        dataset=one_of(ANSWERS.asked),
    threads: 1


rule merge_answers:
    input:
        raw=paths.RAW,
        shards=from_plan(ANSWERS.shards),
    output:
        manifest=f"{paths.ANSWERS}/manifest.json",
        records=collect(
            f"{paths.ANSWERS}/{{part}}.jsonl",
            part=["train", "held_out"],
            allow_missing=True,
        ),
    log:
        "logs/merge_answers/{model}/{dataset}/{answering}.log",
    localrule: True
    shell:
        "python -m longspec.answers merge {input.shards:q} --raw {input.raw:q} --out {output.manifest:q} > {log:q} 2>&1"
