# What runs measure apart (evaluation.bench), such as prompts as long as the target reads: `snakemake bench`.

from longspec.workflow.paths import BENCH_PAGE, BENCHED


rule bench:
    input:
        bench_pages,


use rule evaluate as evaluate_bench with:
    input:
        target=judged(partial(RANKS.judge, "evaluate_bench"), BENCH.target),
        recipe=asks(BENCH.drafter_recipe),
        draft=asks(BENCH.drafter_weights),
        vocabulary=asks(BENCH.drafter_vocabulary),
        raw=asks(BENCH_ANSWERS.evaluation_records),
        prompts=asks(BENCH.task_files),
    output:
        BENCHED,
    log:
        "logs/evaluate_bench/{run}/{variant}/{drafter}.log",
    benchmark:
        "timings/evaluate_bench/{run}/{variant}/{drafter}.tsv"
    wildcard_constraints:
        run=one_of(BENCH.evaluation_of),
    resources:
        ranks=asks(partial(RANKS.ranks, "evaluate_bench")),
        cpus_per_task=job_threads,
        gres=asks(partial(RANKS.gpus, "evaluate_bench")),
        gpu_jobs=1,
        mem_mb=8000,
        runtime="4h",
    params:
        settings=asks(BENCH.evaluation_settings),
        raw=asks(BENCH_ANSWERS.evaluation_options),
        drafter=asks_of_input(BENCH.drafter_options),


rule report_bench:
    input:
        target=asks(BENCH.target),
        raw=asks(BENCH.report_records),
        packed=asks(BENCH.trained_rows),
        stages=asks(BENCH.stage_files),
        evaluations=asks(BENCH.evaluations),
        drafts=asks(BENCH.final_drafts),
        vocabularies=asks(BENCH.report_vocabularies),
    output:
        page=BENCH_PAGE,
        numbers=BENCH_PAGE.replace(".html", ".json"),
    log:
        "logs/report_bench/{run}.log",
    benchmark:
        "timings/report_bench/{run}.tsv"
    wildcard_constraints:
        run=one_of(BENCH.evaluation_of),
    localrule: True
    params:
        settings=asks(BENCH.report_settings),
        gates=asks(BENCH.gates),
        model=asks_of_input(BENCH.target_folder),
        variants=asks(BENCH.report_variants),
        vocabularies=asks_of_input(BENCH.report_vocabulary_options),
    shell:
        "python -m longspec.report --run {wildcards.run:q} {params.variants} {params.vocabularies:q} --evaluations bench"
        " --settings {params.settings:q} --gates {params.gates:q}"
        " --model-dir {params.model:q} --raw {input.raw:q}"
        " --packed {input.packed:q} --out {output.page:q} > {log:q} 2>&1"
