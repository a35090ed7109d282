"""From raw text and a target LLM to a measured draft model: `snakemake final_draft`. src/longspec/workflow/paths.py says where
everything lies; each job has a log in logs/.
"""

import sys
from collections import defaultdict
from pathlib import Path

from snakemake.settings.enums import RerunTrigger
from snakemake.utils import min_version

from longspec.cluster.resume import note_controller
from longspec.workflow.jobs.resources import check_call
from longspec.workflow.plan import check_frozen, freeze_runtime

min_version("9.19")


# Used only with `--software-deployment-method apptainer`: an image of yours in which this package is installed
# (pip install -c constraints.txt '.[train,gpu]'). Otherwise jobs run in the environment that runs Snakemake.
container: "longspec.sif"


include: "rules/common.smk"
include: "rules/resources.smk"
include: "rules/data.smk"
include: "rules/answers.smk"
include: "rules/target.smk"
include: "rules/states.smk"
include: "rules/train.smk"
include: "rules/preflight.smk"
include: "rules/draft.smk"
include: "rules/pages.smk"
include: "rules/upstream.smk"


# Before a call's first job, only in the Snakemake that controls the call, and not in a dry run.
onstart:
    needed = list(workflow.dag.needrun_jobs())
    planned = defaultdict(list)
    for job in needed:
        planned[job.rule.name].append(job)
    slurm = hasattr(workflow.executor_settings, "init_seconds_before_status_checks")
    with one_line_errors():
        given = workflow.rerun_triggers != RerunTrigger.all()
        check_call(sys.argv, SET_RESOURCES, policy=given, slurm=slurm)
        stages = [asked_stage(job.wildcards) for job in planned["train"]]
        NEEDS.check_shares({stage: PLAN.configs[stage] for stage in stages})
        for job in set(workflow.dag.jobs).difference(needed):
            # Each job that trains gets a new runtime.yaml.
            if job.rule.name in ("stage_config", "build_config"):
                if not job.output[0].endswith("runtime.yaml"):
                    check_frozen(job.output[0], job.params.text)
    for job in planned["train"]:
        text = PLAN.stage_yaml(*asked_stage(job.wildcards), "runtime")
        freeze_runtime(job.params.out, text)
    checked = {job.wildcards.run for job in planned["preflight_run"]}
    for stage in (each for each in PLAN.configs if each[0] in checked):
        folder = paths.stage_folder(*stage)
        if not Path(folder, "checkpoint.json").exists():
            freeze_runtime(folder, PLAN.stage_yaml(*stage, "runtime"))
    for job in planned["build_states"]:
        STATES.freeze(job.params.out)
    note_controller(Path.cwd(), slurm=slurm)


onsuccess:
    remove_states()


# A stage may have been trained even if a job after it failed.
onerror:
    remove_states()


rule final_draft:
    default_target: True
    input:
        reports=collect([paths.REPORT, paths.NUMBERS], run=PLAN.runs),
        gates=collect(paths.GATES, run=PLAN.runs),
        drafts=PLAN.all_final_drafts(),
