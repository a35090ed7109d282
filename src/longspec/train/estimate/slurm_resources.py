"""The resources that a stage's Slurm jobs request: machines, processes, memory and minutes, from its estimate."""

import math
from dataclasses import dataclass

from longspec.train.estimate.memory import GIB, Setup, estimate, peak

# Time of a job beside training: start, dry batch, resuming; and a factor, since the estimated speed is not exact.
START_MINUTES, TIME_MARGIN = 10, 1.25
RANK_BYTES = 6 * GIB  # of a process with torch, CUDA's libraries and its batches, on the host: a round guess


@dataclass(frozen=True)
class Needs:
    """One job of a stage, and how many of them the stage takes. Memory is a node's, in MB as Slurm counts."""

    nodes: int
    ranks: int
    memory_mb: int
    minutes: int
    jobs: int


def needs_of(setup: Setup, hours: float, node_gpus: int, longest: int) -> Needs:
    """Needs of a stage of `hours` on nodes of `node_gpus` GPUs in jobs of at most `longest` minutes.

    Memory is the host's part of the estimate for the node's ranks, and what each process needs besides. Raises ValueError when
    a job is not longer than its start.
    """
    if node_gpus < 1 or longest <= START_MINUTES:
        raise ValueError(
            f"nodes must have at least one GPU ({node_gpus}) and jobs more than {START_MINUTES} minutes ({longest})"
        )
    ranks = min(node_gpus, setup.world_size)
    on_host = peak(estimate(setup), on_host=setup.device.type == "cuda")
    minutes = 60 * hours * TIME_MARGIN + START_MINUTES
    return Needs(
        nodes=-(-setup.world_size // ranks),
        ranks=ranks,
        memory_mb=ranks * (on_host + RANK_BYTES) // 10**6,
        minutes=min(longest, math.ceil(minutes)),
        jobs=max(1, math.ceil((minutes - START_MINUTES) / (longest - START_MINUTES))),
    )
