"""A job's processes: which ranks there are, what each takes of a batch, the log of rank 0, and how they end.

Torch is imported only where several ranks share a result.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, cast

from longspec import shown

PR_SET_PDEATHSIG = 1
# Port 0: the store takes one that is free at the moment in which it begins to listen.
GPUS_GIVEN = "LONGSPEC_GPUS_GIVEN"  # variable of a Slurm job's ranks: the GPUs of each node as Slurm was asked for them
ON_PROCESSORS = "LONGSPEC_ON_PROCESSORS"  # variable of a user's: jobs compute on processors, whatever they were given
PLAIN_PYTHON = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}

Value = TypeVar("Value")


@dataclass(frozen=True)
class Ranks:
    """This process's place among all of a job's processes."""

    rank: int
    local_rank: int
    world_size: int

    @property
    def is_main(self) -> bool:
        """Tell whether this process writes what is written once."""
        return self.rank == 0


ALONE = Ranks(0, 0, 1)


def find_ranks() -> Ranks:
    """Return this process's ranks as its launcher says, with which it then ends; without a launcher it is the only one."""
    if is_launched():
        die_with_parent()  # so that no rank keeps its GPU
    else:
        os.environ.update(PLAIN_PYTHON)
    return Ranks(*(int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")))


def launched_ranks() -> Ranks:
    """Return this process's ranks; the only one without a launcher, which its own child processes hear nothing of."""
    return find_ranks() if is_launched() else ALONE


def is_launched() -> bool:
    """Tell whether this process is one of a launcher's ranks; asked before find_ranks."""
    return "RANK" in os.environ


def sharing_ranks(global_batch: int, nodes: int, ranks: int) -> int:
    """Return the processes on each of `nodes` machines: `ranks`, or as many as can share a batch smaller than all of them.

    A batch that is large enough and does not divide is left to share_global_batch, which refuses it.
    """
    if global_batch >= nodes * ranks:
        return ranks
    return max((few for few in range(1, ranks + 1) if global_batch % (nodes * few) == 0), default=ranks)


def share_global_batch(global_batch: int, largest: int, world_size: int) -> tuple[int, int]:
    """Return micro batch, at most `largest` rows, and micro batches of each rank in one optimizer step.

    Raises ValueError when the ranks cannot share the global batch equally.
    """
    rows, remainder = divmod(global_batch, world_size)
    if remainder or rows == 0:
        raise ValueError(
            f"recipe.global_batch: {global_batch} rows cannot be shared equally by {world_size} processes; start a number of "
            f"processes that divides {global_batch}"
        )
    micro_batch = max(size for size in range(1, min(largest, rows) + 1) if rows % size == 0)
    return micro_batch, rows // micro_batch


def of_first_rank(make: Callable[[], Value], ranks: Ranks) -> Value:
    """Return what rank 0 makes, on every rank; the others wait for it. Raises what it raises on every rank too.

    Ranks that go on waiting for one that has ended hang: NCCL does not tell them, and a training takes SIGTERM for a request.
    """
    if ranks.world_size == 1:
        return make()
    import torch.distributed as dist  # torch, which a single process may do without

    held: list[Any] = [None, None]
    if ranks.is_main:
        try:
            held[0] = make()
        except (OSError, ValueError) as error:
            held[1] = error
    dist.broadcast_object_list(held)
    if held[1] is not None:
        raise held[1]
    return cast(Value, held[0])


def die_with_parent() -> None:
    """Have Linux kill this process when its parent dies; elsewhere nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def log(message: str, ranks: Ranks | None = None) -> None:
    """Print one line with the time of day, from rank 0 alone unless no ranks are given."""
    if ranks is None or ranks.is_main:
        print(f"{time.strftime('%H:%M:%S')} {shown.lines(message)}", flush=True)


def end_at_once(code: int) -> NoReturn:
    """End this process with this exit code when all that counts is on the disk, without Python's own way out.

    Taking the interpreter and the native threads of gloo, NCCL and DeepSpeed apart takes over a second, and makes a finished
    job a failed one now and then: a thread of gloo that frees its last tensor after the interpreter is gone aborts the process.
    """
    with suppress(OSError):  # a full disk under the log
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
