"""A training job that freezes itself at a given place: `python -m tests.train.lifetime.frozen PLACE -m longspec.train ...`.

Its lease has no thread that would find out in its place, so that what is behind the place must.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import longspec.train.__main__ as program
from longspec import lease
from longspec.train import stage_folder
from longspec.train.checkpoint import save_load

PLACES: dict[str, tuple[Any, str]] = {
    "before the commit": (save_load, "fsync_path"),
    "before checkpoint.json": (stage_folder, "publish"),
}


def freezing(work: Callable[..., Any]) -> Callable[..., Any]:
    calls = []

    def frozen(*arguments: Any, **named: Any) -> Any:
        calls.append(work)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return work(*arguments, **named)

    return frozen


if __name__ == "__main__":
    place = sys.argv[1]
    owner, name = PLACES[place]
    setattr(owner, name, freezing(getattr(owner, name)))
    lease.BEAT = 3600
    sys.argv[1:] = sys.argv[4:]
    program.main()
