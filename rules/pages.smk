# Pages beside a run's own: `snakemake bench` and `snakemake compare`.


# What runs measure apart (evaluation.bench), such as prompts as long as the target reads.


rule bench:
    input:
        checked(BENCH.pages),


use rule evaluate as evaluate_bench with:
    input:
        target=from_plan(BENCH.target),
        recipe=from_plan(BENCH.drafter_recipe),
        draft=from_plan(BENCH.drafter_weights),
        vocabulary=from_plan(BENCH.drafter_vocabulary),
        raw=from_plan(BENCH_ANSWERS.evaluation_records),
        prompts=from_plan(BENCH.task_files),
    output:
        paths.BENCHED,
    log:
        "logs/evaluate_bench/{run}/{variant}/{drafter}.log",
    wildcard_constraints:
        run=one_of(BENCH.evaluation_of),
    params:
        settings=from_plan(BENCH.evaluation_settings),
        raw=from_plan(BENCH_ANSWERS.evaluation_options),
        drafter=from_plan_and_input(BENCH.drafter_options),


use rule report as report_bench with:
    input:
        target=from_plan(BENCH.target),
        raw=from_plan(BENCH.report_records),
        packed=from_plan(BENCH.trained_rows),
        stages=from_plan(BENCH.stage_files),
        evaluations=from_plan(BENCH.evaluations),
        drafts=from_plan(BENCH.final_drafts),
        vocabularies=from_plan(BENCH.report_vocabularies),
    output:
        page=paths.BENCH_PAGE,
        numbers=paths.BENCH_PAGE.replace(".html", ".json"),
    log:
        "logs/report_bench/{run}.log",
    wildcard_constraints:
        run=one_of(BENCH.evaluation_of),
    localrule: True
    params:
        settings=from_plan(BENCH.report_settings),
        gates=from_plan(BENCH.gates),
        variants=from_plan(BENCH.report_variants),


# Two runs side by side: snakemake compare --config 'runs=[a,b]'.
rule compare:
    input:
        checked(PLAN.compared_page),
    localrule: True


# A report of two runs, whose variants stand side by side. What it reads of a run, the run's own has read before.
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
    shell:
        "python -m longspec.report --run {wildcards.first:q}_{wildcards.second:q} {params.options:q}"
        " --out {output.page:q} > {log:q} 2>&1"
