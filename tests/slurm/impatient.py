"""Snakemake whose Slurm executor looks at its jobs every few seconds; by itself the pauses grow to three minutes."""

from snakemake.cli import main
from snakemake_executor_plugin_slurm import Executor

SECONDS = 4.0

Executor.next_seconds_between_status_checks = property(lambda self: SECONDS, lambda self, seconds: None)

if __name__ == "__main__":
    main()
