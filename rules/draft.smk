# Extracted drafts, their evaluation, the report, its gates, and what is published.


# Local: compute nodes often have no way to the internet. A draft's files from the hub lie beside, undeclared.
rule fetch_draft:
    input:
        from_plan(PLAN.draft_files),
    output:
        paths.PUBLISHED,
    log:
        "logs/fetch_draft/{draft}.log",
    wildcard_constraints:
        draft=one_of(PLAN.beginnings),
    localrule: True
    params:
        source=from_plan(PLAN.draft_source),
    shell:
        "HF_HUB_OFFLINE=$FETCH_OFFLINE python -m longspec.draft fetch --source={params.source:q} --out {output:q} > {log:q} 2>&1"


# The draft's makers chose the tokens that it proposes: they come from here, not from a count.
rule import_draft:
    input:
        published=from_plan(PLAN.fetched_draft),
        recipe=from_plan(PLAN.drafter_recipe),
        target=from_plan(PLAN.target),
    output:
        collect(
            f"{paths.BEGINNING}/{{file}}",
            file=[*paths.DRAFT_FILES, "draft_vocabulary.json"],
            allow_missing=True,
        ),
    log:
        "logs/import_draft/{run}/{variant}.log",
    wildcard_constraints:
        run=one_of(PLAN.begun_runs),
    priority: 1
    resources:
        mem_mb=16000,
        runtime="30m",
    params:
        out=subpath(output[0], parent=True),
    shell:
        "python -m longspec.draft import {input.published:q} --target {input.target:q} --recipe {input.recipe:q}"
        " --out {params.out:q} > {log:q} 2>&1"


rule extract:
    input:
        checkpoint=f"{paths.STAGE}/checkpoint.json",
        recipe=paths.RECIPE,  # checkpoint.json has it too; without it finished runs would extract anew
        target=from_plan(PLAN.target),
        vocabulary=from_plan(PLAN.vocabulary),
    output:
        collect(f"{paths.STAGE}/draft/{{file}}", file=paths.DRAFT_FILES, allow_missing=True),
    log:
        "logs/extract/{run}/{variant}/{stage}.log",
    priority: 1
    resources:
        mem_mb=16000,
        runtime="30m",
    params:
        vocabulary=option_with_files("--vocabulary", "vocabulary"),
        out=subpath(output[0], parent=True),
    shell:
        "python -m longspec.draft extract {input.checkpoint:q} --target {input.target:q} {params.vocabulary:q}"
        " --out {params.out:q} > {log:q} 2>&1"


# One thread each, so that several run side by side on a small machine. What a killed job measured stays beside its output,
# undeclared, and the next job goes on from there.
rule evaluate:
    input:
        target=from_plan(PLAN.target),
        recipe=from_plan(PLAN.drafter_recipe),
        draft=from_plan("drafter_weights"),
        vocabulary=from_plan("drafter_vocabulary"),
        raw=from_plan("evaluation_records"),
        prompts=from_plan("task_files"),
    output:
        paths.MEASURED,
    log:
        "logs/evaluate/{run}/{variant}/{measured}/{drafter}.log",
    wildcard_constraints:
        measured="evaluation|bench|serves",
    threads: 1
    resources:
        ranks=1,
        cpus_per_task=job_threads,
        gres="",
        gpu_jobs=1,
        mem_mb=8000,
        runtime="4h",
    params:
        settings=from_plan("evaluation_settings"),
        raw=from_plan("evaluation_options"),
        drafter=from_plan_and_input("drafter_options"),
        ranks=decoding_ranks,
        vocabulary=option_with_files("--vocabulary", "vocabulary"),
    shell:
        "python -m longspec.cluster launch --plain --ranks {params.ranks:q} --cpus {resources.cpus_per_task:q}"
        " --gres={resources.gres:q}"
        " -- longspec.measure evaluate --settings {params.settings:q}"
        " --target {input.target:q} --raw {params.raw:q} {params.drafter:q} --recipe {input.recipe:q}"
        " {params.vocabulary:q} --out {output:q} > {log:q} 2>&1"


# The stage to publish, of runs that choose it. What it reads is measured anyway; the report leaves out the records that it
# chooses by.
rule choose_final_stage:
    input:
        evaluations=from_plan(PLAN.choosing_evaluations),
        raw=from_plan(ANSWERS.evaluation_records),
    output:
        paths.FINAL_STAGE,
    log:
        "logs/choose_final_stage/{run}/{variant}.log",
    localrule: True
    params:
        settings=from_plan(PLAN.evaluation_settings),
        raw=from_plan(ANSWERS.evaluation_options),
    shell:
        "python -m longspec.measure choose --settings {params.settings:q} --raw {params.raw:q}"
        " --evaluations {input.evaluations:q} --out {output:q} > {log:q} 2>&1"


rule assemble_final_draft:
    input:
        target=from_plan(PLAN.target),
        tokenizer=from_plan(PLAN.tokenizer),
        data=from_plan(PLAN.trained_rows),
        draft=from_plan(PLAN.candidates),
        choice=from_plan(PLAN.choice),
        stages=from_plan(PLAN.stage_files),
        imported=from_plan(PLAN.imported_config),
    output:
        collect(
            f"{paths.FINAL_DRAFT}/{{file}}",
            file=paths.FINAL_FILES,
            allow_missing=True,
        ),
    log:
        "logs/assemble_final_draft/{run}/{variant}.log",
    localrule: True
    params:
        published=from_plan_and_input(PLAN.published_option),
        stages=from_plan(PLAN.stage_folders),
        imported=option_with_files("--imported", "imported"),
        out=subpath(output[0], parent=True),
    shell:
        "python -m longspec.draft final {params.published:q} --stages {params.stages:q}"
        " --target {input.target:q} --tokenizer {input.tokenizer:q} --data {input.data:q}"
        " {params.imported:q} --out {params.out:q} > {log:q} 2>&1"


rule report:
    input:
        target=from_plan(PLAN.target),
        raw=from_plan("report_records"),
        answers=from_plan(ANSWERS.trained),
        packed=from_plan(PLAN.trained_rows),
        stages=from_plan(PLAN.stage_files),
        evaluations=from_plan("evaluations"),
        drafts=from_plan(PLAN.final_drafts),
        vocabularies=from_plan("report_vocabularies"),
    output:
        page=paths.PAGE,
        numbers=paths.PAGE.replace(".html", ".json"),
    log:
        "logs/report/{run}/{measured}.log",
    wildcard_constraints:
        measured="report|bench",
    localrule: True
    params:
        settings=from_plan("report_settings"),
        gates=from_plan(PLAN.gates),
        model=subpath(input.target, parent=True),
        variants=from_plan("report_variants"),
        vocabularies=option_with_files("--vocabulary", "vocabularies"),
        answers=option_with_files("--answers", "answers"),
    shell:
        "python -m longspec.report --run {wildcards.run:q} {params.variants} {params.vocabularies:q}"
        " --settings {params.settings:q} --gates {params.gates:q}"
        " --model-dir {params.model:q} --raw {input.raw:q} {params.answers:q}"
        " --packed {input.packed:q} --out {output.page:q} > {log:q} 2>&1"


# After the report, so that a page shows why the gates fail.
rule check_gates:
    input:
        page=paths.REPORT,
        numbers=paths.NUMBERS,
    output:
        paths.GATES,
    log:
        "logs/check_gates/{run}.log",
    retries: 0
    localrule: True
    shell:
        "python -m longspec.measure gates --report {input.numbers:q} --out {output:q} > {log:q} 2>&1"
