rule extract:
    input:
        checkpoint=f"{STAGE}/checkpoint.json",
        recipe=f"{STAGE}/recipe.yaml",
        target=target_of,
    output:
        collect(f"{STAGE}/draft/{{file}}", file=DRAFT_FILES, allow_missing=True),
    log:
        "logs/extract/{run}/{variant}/{stage}.log",
    benchmark:
        "timings/extract/{run}/{variant}/{stage}.tsv"
    resources:
        mem_mb=16000,
        runtime="30m",
    params:
        out=subpath(output[0], parent=True),
    shell:
        "python -m longspec.draft extract {input.checkpoint:q}"
        " --recipe {input.recipe:q} --target {input.target:q} --out {params.out:q} > {log:q} 2>&1"


# One thread each, so that several run side by side on a small machine. What a killed job has measured stays beside its
# output, undeclared, and the next one goes on from there.
rule evaluate:
    input:
        target=target_of,
        recipe=drafter_recipe,
        draft=drafter_weights,
        raw=collect(RAW, dataset=EVALUATION_DATA),
        prompts=task_files,
    output:
        EVALUATED,
    log:
        "logs/evaluate/{run}/{variant}/{drafter}.log",
    benchmark:
        "timings/evaluate/{run}/{variant}/{drafter}.tsv"
    envmodules:
        *ENVMODULES,
    threads: 1
    resources:
        cpus_per_task=job_threads,
        mem_mb=8000,
        runtime="4h",
    params:
        settings=evaluation_settings,
        raw=[f"{name}={RAW.format(dataset=name)}" for name in EVALUATION_DATA],
        drafter=drafter_options,
    shell:
        "OMP_NUM_THREADS={resources.cpus_per_task:q} MKL_NUM_THREADS={resources.cpus_per_task:q}"
        " python -m longspec.evaluate --settings {params.settings:q}"
        " --target {input.target:q} --raw {params.raw:q} {params.drafter:q} --recipe {input.recipe:q}"
        " --out {output:q} > {log:q} 2>&1"


rule assemble_final_draft:
    input:
        target=target_of,
        tokenizer=tokenizer_of,
        data=packed_data,
        draft=last_draft,
        stages=stage_files,
    output:
        collect(
            f"{FINAL_DRAFT}/{{file}}",
            file=[*DRAFT_FILES, "training_config.yaml", "provenance.json"],
            allow_missing=True,
        ),
    log:
        "logs/assemble_final_draft/{run}/{variant}.log",
    benchmark:
        "timings/assemble_final_draft/{run}/{variant}.tsv"
    localrule: True
    params:
        draft=draft_folder,
        stages=stage_folders,
        out=subpath(output[0], parent=True),
    shell:
        "python -m longspec.draft final --draft {params.draft:q} --stages {params.stages:q}"
        " --target {input.target:q} --tokenizer {input.tokenizer:q} --data {input.data:q}"
        " --out {params.out:q} > {log:q} 2>&1"


rule report:
    input:
        target=target_of,
        raw=report_raw,
        packed=packed_data,
        stages=stage_files,
        evaluations=evaluations,
        drafts=final_drafts,
    output:
        page=report(
            "results/{run}/report.html",
            caption="captions/report.rst",
            category="Drafts",
            labels={"run": "{run}"},
        ),
        numbers="results/{run}/report.json",
    log:
        "logs/report/{run}.log",
    benchmark:
        "timings/report/{run}.tsv"
    localrule: True
    params:
        settings=evaluation_settings,
        gates=GATES,
        model=target_folder,
        variants=report_variants,
    shell:
        "python -m longspec.report --run {wildcards.run:q} {params.variants}"
        " --settings {params.settings:q} --gates {params.gates:q}"
        " --model-dir {params.model:q} --raw {input.raw:q}"
        " --packed {input.packed:q} --out {output.page:q} > {log:q} 2>&1"


# After the report, so that a page shows why when it fails.
rule check_gates:
    input:
        page="results/{run}/report.html",
        numbers="results/{run}/report.json",
    output:
        "results/{run}/gates.json",
    log:
        "logs/check_gates/{run}.log",
    benchmark:
        "timings/check_gates/{run}.tsv"
    retries: 0
    localrule: True
    shell:
        "python -m longspec.gates --report {input.numbers:q} --out {output:q} > {log:q} 2>&1"
