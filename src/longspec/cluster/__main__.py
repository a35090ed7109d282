"""Commands for jobs on a cluster, `python -m longspec.cluster <verb> --help`:

launch      start a job's ranks, on one node or several, with a log of its own for each attempt
status      a table of all stages: steps, speed, time left, last checkpoint, Slurm job
resume      after the controlling Snakemake was killed: wait for its jobs or cancel them, unlock
preflight   check on an allocated node what a job of days needs
"""

from functools import partial

from longspec.shown import run_verb

VERBS = ("launch", "status", "resume", "preflight")
main = partial(run_verb, "cluster", VERBS, __doc__)

if __name__ == "__main__":
    main()
