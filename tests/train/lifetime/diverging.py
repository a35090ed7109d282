"""A training job whose gradients of its steps 5 and 6 are no numbers unless the learning rate is small.

python -m tests.train.lifetime.diverging -m longspec.train ARGUMENTS
"""

import sys
from typing import Any

import torch

import longspec.train.__main__ as program

STEPS, SMALL = (5, 6), 5e-3
train_step = program.train_step


def diverging_step(engine: Any, reader: Any, step: int, *rest: Any) -> Any:
    backward = engine.backward
    factor = float("nan") if step + 1 in STEPS and reader.batches.recipe.optimizer.lr > SMALL else 1.0

    def spoiled(loss: torch.Tensor) -> None:
        backward(loss * factor)

    engine.backward = spoiled
    try:
        return train_step(engine, reader, step, *rest)
    finally:
        engine.backward = backward


if __name__ == "__main__":
    sys.argv[1:] = sys.argv[3:]
    program.train_step = diverging_step
    program.main()
