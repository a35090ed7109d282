# What a job has written is sealed when it ends (longspec.workflow.jobs.seals). It is looked at before other jobs read it, and
# whenever a call asks for it, in a dry run too. Snakemake (9.27) calls no code of a workflow at the end of a job or of its
# planning: two of its functions are replaced.

from snakemake.dag import DAG
from snakemake.persistence import PersistenceBase

from longspec.workflow.jobs.seals import Seals, check_described

SEALS = Seals()
recorded = PersistenceBase.finished
planned_by_snakemake = DAG.init


async def seal_and_record(persistence, job):
    """Record that a job has ended. Sealed first: what is recorded is not run again."""
    SEALS.add(map(str, job.output))
    await recorded(persistence, job)


def finished_inputs(planned):
    """The outputs of each job that runs no more and that one of the planned ones reads from."""
    running = set(planned)
    read = {
        source
        for job in planned
        for source in workflow.dag.dependencies[job]
        if source not in running
    }
    return [[str(file) for file in source.output] for source in read]


async def plan_and_check(dag, progress=False):
    """Plan, and refuse what this call asks for where it is there, and not as its job wrote it."""
    await planned_by_snakemake(dag, progress)
    # A rule without outputs, such as final_draft, asks for those of others.
    asked = {
        source
        for job in dag.targetjobs
        for source in ([job] if job.output else dag.dependencies[job])
        if not dag.needrun(source)
    }
    if not workflow.touch:
        with told_in_one_line():
            outputs = [[str(file) for file in job.output] for job in asked]
            SEALS.check(outputs)
            for files in outputs:
                check_described(files)


if workflow.is_main_process:
    PersistenceBase.finished = seal_and_record
    DAG.init = plan_and_check
