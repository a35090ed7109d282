"""Commands for jobs on a cluster, `python -m longspec.cluster <verb> --help`:

launch      start a job's ranks, on one node or several, with a log of its own for each attempt
status      a table of all stages: steps, speed, time left, last checkpoint, Slurm job
resume      after the controlling Snakemake was killed: wait for its jobs or cancel them, unlock
preflight   check on an allocated node what a job of days needs
"""

import importlib
import sys

VERBS = ("launch", "status", "resume", "preflight")


def main() -> int:
    """Run one verb; each is a module of its own, so that a login node imports no torch."""
    verb = sys.argv[1] if len(sys.argv) > 1 else ""
    if verb not in VERBS:
        print(__doc__, file=sys.stdout if verb in ("-h", "--help") else sys.stderr)
        return 0 if verb in ("-h", "--help") else 2
    code: int = importlib.import_module(f"longspec.cluster.{verb}").main(sys.argv[2:])
    return code


if __name__ == "__main__":
    sys.exit(main())
