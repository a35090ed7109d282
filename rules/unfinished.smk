# Snakemake (9.27) removes a job's outputs before it begins, and records a failed one like one that ended well. What an earlier
# call had made of these outputs is still there, so the next call would miss nothing and end well with what is old. Here a job
# is marked before its outputs go and until it has ended well, and a marked one is run again (rerun-incomplete in
# profiles/default), also where nothing of it is there. Three of Snakemake's functions are replaced.

from snakemake.jobs import Job
from snakemake.persistence import PersistenceBase

removed_before = Job.remove_existing_output
removed_after = Job.cleanup


async def mark_and_remove(job):
    """Remove what an earlier call has made of a job's outputs."""
    job.dag.workflow.persistence.started(job)
    await removed_before(job)


async def remove_and_mark(job, skip_outputs):
    """Remove what a failed job has made of its outputs."""
    await removed_after(job, skip_outputs)
    job.dag.workflow.persistence.started(job)


async def unfinished(persistence, job):
    """The outputs of a job that has begun and not ended well."""
    keys = {persistence._get_key(file): file for file in job.output}
    return [keys[key] for key in persistence._filter_incomplete_keys(keys)]


Job.remove_existing_output = mark_and_remove
Job.cleanup = remove_and_mark
PersistenceBase.incomplete = unfinished
