"""torchrun, which ends in one line for each rank that left no word: `python -m longspec.cluster.torchrun OPTIONS -m MODULE`.

By itself it ends with forty lines, its own call stack and a table, whenever a rank has failed or it was told to stop. A rank
that fails says why itself, and leaves it in torchrun's error file; one that a signal has killed, or that hung, cannot.
"""

import signal
import socket
import sys
from pathlib import Path

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

SENT_BY_TORCHRUN = -signal.SIGTERM  # the exit code of a rank that was ended since another one had failed


def main() -> int:
    """Start the ranks and wait for them; an error of torchrun's own keeps its traceback."""
    try:
        run.run(run.parse_args(None))  # not run.main, which logs of every failure that it has no error file to copy it to
    except ChildFailedError as error:
        killed: list[str] = []
        silent: list[str] = []
        for rank, failure in sorted(error.failures.items()):
            place = f"error: rank {rank} on {socket.gethostname()} (pid {failure.pid})"
            if failure.exitcode < 0 and failure.exitcode != SENT_BY_TORCHRUN:
                killed.append(f"{place} was killed by {failure.signal_name()}")
            elif failure.exitcode == 1 and not Path(failure.error_file).is_file():
                silent.append(f"{place} ended without a word; what it wrote last, such as its stacks, stands above")
        for line in killed or silent:  # where one was killed, the others ended because of it
            print(line, flush=True)
        return 1
    except SignalException:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
