# Slurm job arrays. The executor (2.8.0) has two faults there, both seen by running it; without an array nothing here
# does anything.
# 1. The process of every task begins with the first task's job: it deletes that job's outputs and at its end waits for
#    them; of a rule with the resource mpi it even runs that job. So a task turns at once into the command for its own job,
#    which the executor has sent along.
# 2. Of an array's jobs those that Snakemake does not hand over at once are forgotten, and it waits for them for ever: the
#    Snakefile asks check_arrays.

import os
import sys

from longspec.workflow.jobs.arrays import check_arrays, own_command

own = own_command(sys.argv, os.environ)
if own is not None:
    os.execvp("bash", ["bash", "-c", own])
