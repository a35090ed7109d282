# On how many ranks the jobs that decode with a target do so (longspec.workflow.jobs.decoding_jobs), by the profile.

from functools import partial

from longspec.workflow.jobs.decoding_jobs import DecodingJobs
from longspec.workflow.jobs.decoding_ranks import machine_of

DECODING = {
    name: resources_of(name) for name in ("evaluate", "evaluate_bench", "answer")
}
with told_in_one_line():
    RANKS = DecodingJobs(
        PLAN,
        BENCH,
        ANSWERS,
        {name: machine_of(name, block, TRAIN) for name, block in DECODING.items()},
        logger.warning,
    )


def judged(judge, target):
    """A target's manifest, of a job that decodes with it: a job of the plan that cannot be ends the call, in a dry run too."""
    ask_judge, ask_target = asks(judge), asks(target)

    def answer(wildcards):
        if workflow.is_main_process:
            with told_in_one_line():
                ask_judge(wildcards)
        return ask_target(wildcards)

    return answer
