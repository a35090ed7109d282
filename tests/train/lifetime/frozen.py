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
from longspec.train import finished, metrics
from longspec.train.checkpoint import save_load
from longspec.train.lifetime import admission

PLACES: dict[str, tuple[Any, str]] = {
    "before a row": (metrics.Metrics, "append"),
    "before the commit": (save_load, "fsync_path"),
    "before checkpoint.json": (finished, "publish"),
    "before the status": (admission.Status, "write"),
}
FIRST = 1
CALL = {"before a row": 3, "before the status": 2}  # which call of it


def freezing(work: Callable[..., Any], call: int) -> Callable[..., Any]:
    calls = []

    def frozen(*arguments: Any, **named: Any) -> Any:
        calls.append(work)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGSTOP)
        return work(*arguments, **named)

    return frozen


if __name__ == "__main__":
    place = sys.argv[1]
    owner, name = PLACES[place]
    setattr(owner, name, freezing(getattr(owner, name), CALL.get(place, FIRST)))
    lease.BEAT = 3600
    sys.argv[1:] = sys.argv[4:]
    program.main()
