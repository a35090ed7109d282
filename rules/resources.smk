# What jobs ask a cluster for: what the profile says, else what the rule says. longspec.workflow.jobs.resources says it for a
# stage's job.

from functools import partial

from snakemake.resources import Resource

from longspec.workflow.jobs.resources import (
    STAGE_THREADS,
    StageNeeds,
    check_gres,
    gpus_here,
    gpus_in,
    limits_of,
    ranks_for,
)

# What the profile sets, by rule. Snakemake (9.27) has no public name for it; not reported.
SET_RESOURCES = workflow.resource_settings._parsed_overwrite_resources
GIVEN = SET_RESOURCES.get("train", {})
with one_line_errors():
    LIMITS = limits_of({name: str(value.raw) for name, value in GIVEN.items()})
    for rule_name, block in SET_RESOURCES.items():
        if "gres" in block:
            check_gres(rule_name, str(block["gres"].raw))
NEEDS = StageNeeds(LIMITS)
if workflow.is_main_process:
    for line in NEEDS.missing(PLAN.configs):
        logger.warning(line)
    most = 1 if "ranks" in GIVEN else ranks_for([PLAN.configs[key] for key in PLAN.configs if key[0] in PLAN.runs], gpus_here())
    if most > 1:
        logger.warning(
            f"a stage takes 1 of the {gpus_here()} GPUs here; {most} by --set-resources train:ranks={most} (docs/one-box.md)"
        )


def asked_stage(wildcards):
    """Return the wildcards by which the plan knows a stage."""
    return wildcards.run, wildcards.variant, wildcards.stage


def share_of(name, given):
    """Return a resource of the profile's `train` as each stage's job asks for it; a job's own process reads the profile's."""

    def asked_for(wildcards):
        return NEEDS.share(name, str(given.raw), PLAN.configs[asked_stage(wildcards)])

    return Resource(name, asked_for, raw=given.raw)


for each in NEEDS.SHARED:
    if each in GIVEN:
        GIVEN[each] = share_of(each, GIVEN[each])


def stage_memory(wildcards):
    """Return the MB of each node that a stage's job asks for."""
    return NEEDS.memory(PLAN.configs[asked_stage(wildcards)])


def gpus_of(wildcards, resources):
    """Return the GPUs of each node that a job asks Slurm for."""
    return gpus_in(str(resources.gres))


# Jobs that decode with a target: one process, or as many as the profile's `ranks`, which split the target.
def decoding_ranks(wildcards, resources):
    """Return the ranks of a measurement; for `snakemake serves` another engine is one process."""
    return 1 if wildcards.drafter in ENGINES else resources.ranks
