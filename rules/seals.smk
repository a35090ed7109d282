# What a job has written is sealed when it ends, and looked at before other jobs read it (longspec.workflow.jobs.seals).
# Snakemake (9.27) calls no code of a workflow at the end of a job: one of its functions is replaced.

from snakemake.persistence import PersistenceBase

from longspec.workflow.jobs.seals import Seals

SEALS = Seals()
recorded = PersistenceBase.finished


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


if workflow.is_main_process:
    PersistenceBase.finished = seal_and_record
