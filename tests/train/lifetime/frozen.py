"""A training job that freezes itself before it commits: `python -m tests.train.lifetime.frozen -m longspec.train ...`.

Its lease has no thread that would find out in its place, so that what is behind the place must.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import longspec.train.__main__ as program
from longspec import lease
from longspec.train.checkpoint import save_load


def freezing(work: Callable[..., Any]) -> Callable[..., Any]:
    calls = []

    def frozen(*arguments: Any, **named: Any) -> Any:
        calls.append(work)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return work(*arguments, **named)

    return frozen


if __name__ == "__main__":
    save_load.fsync_path = freezing(save_load.fsync_path)
    lease.BEAT = 3600
    sys.argv[1:] = sys.argv[3:]
    program.main()
