"""The trainer with one rank that hangs in a place: `python -m tests.train.lifetime.hanging RANK PLACE OPTIONS`."""

import sys
import threading
from collections.abc import Callable
from typing import Any

from longspec.distributed import find_ranks
from longspec.train import __main__ as trainer
from longspec.train.checkpoint import save_load
from longspec.train.metrics import Metrics

CALLS = 5  # of the place before it hangs


def hanging(call: Callable[..., Any], after: int = CALLS) -> Callable[..., Any]:
    """A call that never returns from one of its calls; other threads live on."""
    calls = 0

    def wrapped(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        result = call(*arguments, **named)
        if calls > after:
            print(f"hangs in {call.__qualname__}", flush=True)
            threading.Event().wait()
        return result

    return wrapped


def main() -> None:
    rank, place = int(sys.argv.pop(1)), sys.argv.pop(1)
    if find_ranks().rank == rank:
        build = trainer.build_engine

        def build_engine(*arguments: Any) -> Any:
            engine = build(*arguments)
            if place == "forward":
                engine.module.forward = hanging(engine.module.forward)
            if place == "backward":
                engine.backward = hanging(engine.backward)
            return engine

        trainer.build_engine = build_engine
        if place == "data":
            trainer.StepBatches.load = hanging(trainer.StepBatches.load)  # type: ignore[method-assign]
        if place == "write":
            save_load.write_shard = hanging(save_load.write_shard, after=1)
        if place == "metrics":
            Metrics.append = hanging(Metrics.append)  # type: ignore[method-assign]
    trainer.main()


if __name__ == "__main__":
    main()
