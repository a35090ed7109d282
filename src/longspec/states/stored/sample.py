"""A sample of the stored rows is computed again, each alone, and compared with the bytes that were read back from the file."""

from collections.abc import Sequence

import torch
from torch import Tensor

from longspec.atomic_files import sha256_text
from longspec.states.stored.declaration import SCALE, Declaration
from longspec.states.stored.encoding import DTYPES, value_of
from longspec.states.tensors import BEST_TOKEN, TOP, TOP_TOKENS

ONE_IN = 256
# Largest relative difference, in the norm of a whole row's tensor. A forward of one row and one of several multiply matrices of
# other shapes; what rounds otherwise comes to about this after tens of layers. Storage adds the rounding of values that lie at
# its steps' edges.
COMPUTED = {"torch.float32": 1e-3, "torch.bfloat16": 5e-2}
STORED = {"F32": 0.0, "BF16": 2**-8, "F8_E4M3": 2**-4}
# Of log-probabilities, nats: the mean absolute difference. Which tokens come in which order is not compared.
LOG_PROB = {"torch.float32": 1e-2, "torch.bfloat16": 0.2}


def sampled(rows: range, declaration: Declaration) -> set[int]:
    """One row in 256 of a shard, and at least one: a function of the states and the row's number alone."""
    draws = {row: int(sha256_text(f"{declaration.hash}:{row}")[:8], 16) for row in rows}
    return {row for row, draw in draws.items() if draw % ONE_IN == 0} | {min(draws, key=lambda row: draws[row])}


def differences(
    declaration: Declaration, stored: Sequence[bytearray], again: Sequence[memoryview], is_text_S: Tensor
) -> list[str]:
    """The tensors of a row in which what was stored and what was computed again differ by more than the bound, with both.

    is_text_S: the tokens that count, all but the padding.
    """
    left, right = (_encoded(declaration, buffers) for buffers in (stored, again))
    wrong = []
    for tensor in declaration.tensors:
        if tensor.name in (TOP_TOKENS, BEST_TOKEN) or tensor.name.endswith(SCALE):
            continue
        first, second = (value_of(each, tensor)[is_text_S].float() for each in (left, right))
        if tensor.name in TOP:
            measured, bound = (first - second).abs().mean(), LOG_PROB[declaration.computed_in]
        else:
            measured = (first - second).norm() / second.norm().clamp(min=1e-30)
            bound = COMPUTED[declaration.computed_in] + STORED[tensor.dtype]
        if not float(measured) <= bound:
            wrong.append(f"{tensor.name} by {measured:.2g}, at most {bound:.2g}")
    return wrong


def _encoded(declaration: Declaration, buffers: Sequence[bytearray | memoryview]) -> dict[str, Tensor]:
    """A row's stored tensors, [S, *token_shape]."""
    return {
        tensor.name: torch.frombuffer(buffer, dtype=DTYPES[tensor.dtype]).view(-1, *tensor.token_shape)
        for tensor, buffer in zip(declaration.tensors, buffers, strict=True)
    }
