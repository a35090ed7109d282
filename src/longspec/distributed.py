"""The only reader of RANK, WORLD_SIZE and LOCAL_RANK, and the log of rank 0. No torch here."""

import ctypes
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

PR_SET_PDEATHSIG = 1
PLAIN_PYTHON = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@dataclass(frozen=True)
class Ranks:
    """This process's place among all of a job's processes."""

    rank: int
    local_rank: int
    world_size: int

    @property
    def is_main(self) -> bool:
        """Whether this process writes what is written once."""
        return self.rank == 0


def find_ranks() -> Ranks:
    """This process's ranks as its launcher says; a process without a launcher is the only one."""
    if "RANK" not in os.environ:
        os.environ.update(PLAIN_PYTHON)
        with socket.socket() as free:
            free.bind((PLAIN_PYTHON["MASTER_ADDR"], 0))
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    return Ranks(*(int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")))


def die_with_launcher() -> None:
    """Have Linux kill this process when its launcher dies, so that no rank trains on alone."""
    if sys.platform == "linux" and "RANK" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def log(message: str, ranks: Ranks | None = None) -> None:
    """One line with the time of day, from rank 0 alone unless no ranks are given.

    A full disk under the log ends no job: a line that could not be written comes with the next one.
    """
    if ranks is None or ranks.is_main:
        with suppress(OSError):
            print(f"{time.strftime('%H:%M:%S')} {message}", flush=True)
