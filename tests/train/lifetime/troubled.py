"""A training job in trouble: `python -m tests.train.lifetime.troubled KIND [ARGUMENT ...] -m longspec.train ARGUMENTS`.

diverging               gradients of its steps 5 and 6 are no numbers unless the learning rate is small
overdue NUMBER          before so many micro batches its last save is long ago
frozen                  it freezes itself before it commits; its lease has no thread that would find out in its place
hanging RANK PLACE      one rank hangs for ever where it reads data, or where it writes a checkpoint; other threads live on
timed NUMBER SECONDS    after so many micro batches it hears of a deadline in so many seconds, which it prints
"""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

import longspec.train.__main__ as program
from longspec import lease
from longspec.distributed import find_ranks
from longspec.train.checkpoint import save_load
from longspec.train.preemption import Stop

DIVERGING, SMALL = (5, 6), 5e-3


def before_call(number: int, call: Callable[..., Any], trouble: Callable[[], Any]) -> Callable[..., Any]:
    """A function that is in trouble before one of its calls."""
    calls: list[None] = []

    def wrapped(*arguments: Any, **named: Any) -> Any:
        calls.append(None)
        if len(calls) == number:
            trouble()
        return call(*arguments, **named)

    return wrapped


def diverging() -> None:
    train_step = program.train_step

    def diverging_step(engine: Any, reader: Any, step: int, *rest: Any) -> Any:
        backward = engine.backward
        factor = float("nan") if step + 1 in DIVERGING and reader.batches.recipe.optimizer.lr > SMALL else 1.0

        def spoiled(loss: torch.Tensor) -> None:
            backward(loss * factor)

        engine.backward = spoiled
        try:
            return train_step(engine, reader, step, *rest)
        finally:
            engine.backward = backward

    program.train_step = diverging_step


def frozen() -> None:
    save_load.fsync_path = before_call(1, save_load.fsync_path, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    lease.BEAT = 3600


def hanging(rank: str, place: str) -> None:
    owner, name, number = {"data": (program.StepBatches, "load", 6), "write": (save_load, "write_shard", 2)}[place]
    if find_ranks().rank == int(rank):
        setattr(owner, name, before_call(number, getattr(owner, name), threading.Event().wait))


def overdue(number: str) -> None:
    agreed, stops = Stop.agreed, list[Stop]()
    asked = before_call(int(number), agreed, lambda: setattr(stops[-1], "_saved", -math.inf))
    Stop.agreed = lambda self: (stops.append(self), asked(self))[1]  # type: ignore[method-assign]


def timed(number: str, seconds: str) -> None:
    agreed, stops = Stop.agreed, []

    def set_deadline() -> None:
        stops[-1].deadline = time.time() + float(seconds)
        print(f"deadline {stops[-1].deadline}", flush=True)

    asked = before_call(int(number), agreed, set_deadline)
    Stop.agreed = lambda self: (stops.append(self), asked(self))[1]  # type: ignore[method-assign]


if __name__ == "__main__":
    until = sys.argv.index("-m")
    kind, *arguments = sys.argv[1:until]
    sys.argv[1:] = sys.argv[until + 2 :]
    globals()[kind](*arguments)
    program.main()
