"""Snakemake whose Slurm executor looks at its jobs every second; by itself the pauses grow to three minutes."""

from snakemake.cli import main
from snakemake_executor_plugin_slurm import Executor

Executor.next_seconds_between_status_checks = property(lambda self: 1.0, lambda self, seconds: None)

if __name__ == "__main__":
    main()
