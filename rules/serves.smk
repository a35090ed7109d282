# The final draft in our own loop and in each engine that is installed, side by side: snakemake serves --config 'runs=[mine]'.


rule serves:
    input:
        checked(SERVES.pages),
    localrule: True


# The draft is measured as it is published, with all the tokens that it was trained to propose.
use rule evaluate as evaluate_served with:
    input:
        target=from_plan(PLAN.target),
        recipe=from_plan(PLAN.drafter_recipe),
        draft=from_plan(partial(PLAN.drafter_weights, drafter=WITH_LOOKUP)),
        vocabulary=from_plan(PLAN.vocabulary),
        raw=from_plan(ANSWERS.evaluation_records),
        prompts=from_plan(PLAN.task_files),
    output:
        paths.SERVED,
    log:
        "logs/evaluate_served/{run}/{variant}/{engine}.log",
    wildcard_constraints:
        run=one_of(PLAN.runs),
    resources:
        ranks=from_plan(served_ranks),
        cpus_per_task=job_threads,
        gres=from_plan(served_gpus),
        gpu_jobs=1,
        mem_mb=8000,
        runtime="4h",
    params:
        settings=from_plan(SERVES.settings),
        drafter=from_plan_and_input(SERVES.drafter_options),


rule serves_page:
    input:
        evaluations=from_plan(SERVES.evaluations),
        stages=from_plan(PLAN.stage_files),
        drafts=from_plan(PLAN.final_drafts),
    output:
        page=paths.SERVES_PAGE,
        numbers=paths.SERVES_PAGE.replace(".html", ".json"),
    log:
        "logs/serves_page/{run}.log",
    wildcard_constraints:
        run=one_of(PLAN.runs),
    localrule: True
    params:
        standings=from_plan(SERVES.page_settings),
        variants=from_plan(PLAN.report_variants),
    shell:
        "python -m longspec.report.serves --run {wildcards.run:q} {params.variants} --standings {params.standings:q}"
        " --out {output.page:q} > {log:q} 2>&1"


use rule check_gates as check_serves with:
    input:
        page=paths.SERVES_PAGE,
        numbers=paths.SERVES_PAGE.replace(".html", ".json"),
    output:
        paths.SERVES_GATES,
    log:
        "logs/check_serves/{run}.log",
    localrule: True
