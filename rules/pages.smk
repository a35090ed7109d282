# Pages beside a run's own: `snakemake bench`, `snakemake compare` and `snakemake serves`.

SERVES_PAGE = paths.PAGE.replace("{measured}", "serves")


# What runs measure separately (evaluation.bench), such as prompts as long as the target reads.
rule bench:
    input:
        checked(BENCH.pages),


# Two runs side by side: snakemake compare --config 'runs=[a,b]'.
rule compare:
    input:
        checked(PLAN.compared_page),


# A report of two runs with their variants side by side. It reads only what each run's own report has read before.
rule compare_runs:
    input:
        first=paths.NUMBERS.replace("{run}", "{first}"),
        second=paths.NUMBERS.replace("{run}", "{second}"),
    output:
        page=f"{paths.COMPARED}.html",
        numbers=f"{paths.COMPARED}.json",
    log:
        "logs/compare_runs/{first}_{second}.log",
    wildcard_constraints:
        first=one_of(PLAN.runs),
        second=one_of(PLAN.runs),
    localrule: True
    params:
        options=from_plan(PLAN.compared_options),
        answers=from_plan(ANSWERS.compared_options),
    shell:
        "python -m longspec.report --run {wildcards.first:q}_{wildcards.second:q} {params.options:q} {params.answers:q}"
        " --out {output.page:q} > {log:q} 2>&1"


# The final draft in our own loop and in each installed engine, side by side: snakemake serves --config 'runs=[mine]'.
rule serves:
    input:
        checked(SERVES.pages),


rule serves_page:
    input:
        evaluations=from_plan(SERVES.evaluations),
        stages=from_plan(PLAN.stage_files),
        drafts=from_plan(PLAN.final_drafts),
    output:
        page=SERVES_PAGE,
        numbers=SERVES_PAGE.replace(".html", ".json"),
    log:
        "logs/serves_page/{run}.log",
    localrule: True
    params:
        standings=from_plan(SERVES.page_settings),
        variants=from_plan(PLAN.report_variants),
    shell:
        "python -m longspec.report.serves --run {wildcards.run:q} {params.variants} --standings {params.standings:q}"
        " --out {output.page:q} > {log:q} 2>&1"


use rule check_gates as check_serves with:
    input:
        page=SERVES_PAGE,
        numbers=SERVES_PAGE.replace(".html", ".json"),
    output:
        paths.SERVES_GATES,
    log:
        "logs/check_serves/{run}.log",
    localrule: True
