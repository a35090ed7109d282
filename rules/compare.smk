# Two runs side by side: snakemake compare --config 'runs=[a,b]'.

from longspec.workflow.paths import COMPARED, NUMBERS


rule compare:
    input:
        compared_page,
    localrule: True


# A report of two runs, whose variants stand side by side. What it reads of a run, the run's own has read before.
rule compare_runs:
    input:
        first=NUMBERS.replace("{run}", "{first}"),
        second=NUMBERS.replace("{run}", "{second}"),
    output:
        page=report(
            f"{COMPARED}.html",
            caption="captions/compare.rst",
            category="Comparisons",
            labels={"first": "{first}", "second": "{second}"},
        ),
        numbers=f"{COMPARED}.json",
    log:
        "logs/compare_runs/{first}_{second}.log",
    benchmark:
        "timings/compare_runs/{first}_{second}.tsv"
    wildcard_constraints:
        first=one_of(PLAN.runs),
        second=one_of(PLAN.runs),
    localrule: True
    params:
        settings=asks(PLAN.compared_settings),
        gates=asks(PLAN.compared_gates),
        options=asks(PLAN.compared_options),
    shell:
        "python -m longspec.report --run {wildcards.first:q}_{wildcards.second:q} {params.options:q}"
        " --settings {params.settings:q} --gates {params.gates:q} --out {output.page:q} > {log:q} 2>&1"
