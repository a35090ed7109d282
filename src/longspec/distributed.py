"""A job's processes: their ranks, each one's share of a batch, rank 0's log, the processor they run on, and how they end.

Torch is imported only where several ranks share a result.
"""

import ctypes
import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from longspec import shown

PR_SET_PDEATHSIG = 1
GPUS_GIVEN = "LONGSPEC_GPUS_GIVEN"  # set for a Slurm job's ranks: the GPUs of each node as the job asked for them
ON_PROCESSORS = "LONGSPEC_ON_PROCESSORS"  # set by a user: jobs compute on processors, whatever they were given
# Port 0: the store takes a port that is free when it begins to listen.
PLAIN_PYTHON = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}

Value = TypeVar("Value")


@dataclass(frozen=True)
class Ranks:
    """Hold this process's place among all of a job's processes."""

    rank: int
    local_rank: int
    world_size: int

    @property
    def is_main(self) -> bool:
        """Tell whether this process writes what is written once."""
        return self.rank == 0


ALONE = Ranks(0, 0, 1)


def find_ranks() -> Ranks:
    """Return the launcher's ranks and make this process end with it. Without a launcher, set the variables of a single rank."""
    if is_launched():
        die_with_parent()  # so that no rank keeps its GPU
    else:
        os.environ.update(PLAIN_PYTHON)
    return Ranks(*(int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")))


def launched_ranks() -> Ranks:
    """Return the ranks as find_ranks does; without a launcher set no variables, which child processes would inherit."""
    return find_ranks() if is_launched() else ALONE


def is_launched() -> bool:
    """Tell whether a launcher started this process. Call it before find_ranks, which sets the variable it reads."""
    return "RANK" in os.environ


def sharing_ranks(global_batch: int, nodes: int, ranks: int) -> int:
    """Return the processes on each of `nodes` machines: `ranks`, or as many as can share a batch smaller than all of them.

    A batch that is large enough but does not divide is left to share_global_batch, which refuses it.
    """
    if global_batch >= nodes * ranks:
        return ranks
    return max((few for few in range(1, ranks + 1) if global_batch % (nodes * few) == 0), default=ranks)


def processor_name() -> str:
    """Return the processor's name as Linux tells it, else its architecture."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def share_global_batch(global_batch: int, largest: int, world_size: int) -> tuple[int, int]:
    """Return the micro batch, at most `largest` rows, and the micro batches of each rank in one optimizer step.

    Raises ValueError if the ranks cannot share the global batch equally.
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
    """Run `make` on rank 0 and return its result on every rank. Its OSError or ValueError is raised on every rank too.

    Without that, ranks would wait for an ended rank 0: NCCL does not report it, and a training takes SIGTERM for a request.
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
    """Make Linux kill this process when its parent dies; do nothing elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def log(message: str, ranks: Ranks | None = None) -> None:
    """Print one line with the time of day. If ranks are given, only rank 0 prints."""
    if ranks is None or ranks.is_main:
        print(f"{time.strftime('%H:%M:%S')} {shown.lines(message)}", flush=True)


def end_at_once(code: int) -> NoReturn:
    """End this process at once with this exit code, without Python's own shutdown. Everything that counts must be on the disk.

    Shutting down the interpreter and the threads of gloo, NCCL and DeepSpeed takes over a second. Now and then it makes a
    finished job fail: a gloo thread that frees its last tensor after the interpreter is gone aborts the process.
    """
    with suppress(OSError):  # a full disk under the log
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
