"""The trainer with one rank that hangs in a place: `python -m tests.train.lifetime.hanging RANK PLACE OPTIONS`."""

import sys
import threading
from collections.abc import Callable
from typing import Any

from longspec.distributed import find_ranks
from longspec.train import __main__ as trainer
from longspec.train.checkpoint import save_load


def hanging(call: Callable[..., Any], after: int) -> Callable[..., Any]:
    """A call that never returns from one of its calls; other threads live on."""
    calls = 0

    def wrapped(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        result = call(*arguments, **named)
        if calls > after:
            threading.Event().wait()
        return result

    return wrapped


def main() -> None:
    rank, place = int(sys.argv.pop(1)), sys.argv.pop(1)
    if find_ranks().rank == rank:
        if place == "data":
            trainer.StepBatches.load = hanging(trainer.StepBatches.load, after=5)  # type: ignore[method-assign]
        if place == "write":
            save_load.write_shard = hanging(save_load.write_shard, after=1)
    trainer.main()


if __name__ == "__main__":
    main()
