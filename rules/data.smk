# Raw records, token shards, and rows to train on.


# Records, and prompts of tasks. Local: compute nodes often have no way to the internet. The manifest is updated, never deleted
# first: a later fetch must agree with it. Files beside it are undeclared: Snakemake deletes what a failed job declares.
rule fetch_data:
    output:
        update(paths.HUB),
    log:
        "logs/fetch_data/{dataset}.log",
    wildcard_constraints:
        dataset=one_of(FETCHED),
    localrule: True
    params:
        source=from_plan(partial(of_hub, "source")),
        revision=from_plan(partial(of_hub, "revision")),
    shell:
        "HF_HUB_OFFLINE=$FETCH_OFFLINE python -m longspec.data fetch --source={params.source:q} --revision={params.revision:q}"
        " --out {output:q} > {log:q} 2>&1"


# rejects.jsonl and rejects.raw lie there too, undeclared: a job that fails because of them must leave them to be read.
rule raw:
    input:
        files=from_plan(PLAN.raw_files),
    output:
        manifest=paths.RAW,
        records=collect("data/raw/{{dataset}}/{part}.jsonl", part=["train", "held_out"]),
    log:
        "logs/raw/{dataset}.log",
    resources:
        mem_mb=8000,
        runtime="4h",
    params:
        settings=from_plan(PLAN.raw_settings),
    shell:
        "python -m longspec.data raw --name {wildcards.dataset:q}"
        " --settings {params.settings:q} --out {output.manifest:q} > {log:q} 2>&1"


# Edges carry the small manifests: Snakemake compares small files by content, large ones by date only. One job per shard; with
# fewer shards than cores each job takes several cores, which changes nothing in what it writes.
rule tokenize:
    input:
        raw=from_plan(ANSWERS.records),
        tokenizer=paths.TOKENIZER,
    output:
        manifest=paths.TOKENS,
        rows="data/tokens/{model}/{dataset}/{shard}.arrow",
    log:
        "logs/tokenize/{model}/{dataset}/{shard}.log",
    threads: shard_threads
    resources:
        cpus_per_task=job_threads,
        mem_mb=8000,
        runtime="4h",
    params:
        shards=from_plan(PLAN.shards),
    shell:
        "RAYON_NUM_THREADS={resources.cpus_per_task:q}"
        " python -m longspec.data tokenize --raw {input.raw:q} --tokenizer {input.tokenizer:q}"
        " --shard {wildcards.shard:q} --num-shards {params.shards:q}"
        " --out {output.manifest:q} > {log:q} 2>&1"


rule pack:
    input:
        from_plan(PLAN.token_shards),
    output:
        manifest=paths.PACKED,
        rows=paths.PACKED.replace("manifest.json", "rows.arrow"),
    log:
        "logs/pack/{model}/{dataset}-{collation}-{length}-{overlong}.log",
    resources:
        mem_mb=16000,
        runtime="4h",
    shell:
        "python -m longspec.data pack --tokens {input:q} --length {wildcards.length:q}"
        " --collation {wildcards.collation:q} --overlong {wildcards.overlong:q}"
        " --out {output.manifest:q} > {log:q} 2>&1"
