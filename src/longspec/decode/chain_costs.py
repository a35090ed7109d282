"""What rounds with chains of each length and with trees cost on this machine, and which of these shapes is best by it.

Shapes: B rows.
"""

import time
from collections.abc import Hashable
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch

from longspec.chain_length import LONGEST, Acceptance, ChainAcceptance, ChainCosts, nearest
from longspec.decode.drafters import Drafter
from longspec.decode.levels import Levels
from longspec.decode.prefill import Prefilled
from longspec.decode.speculate import speculate
from longspec.models.target import group_of, tensor_of_first_rank

ROUNDS = 2  # timed at once, behind one that takes the prompts in
REPEATS = 2  # of the whole; the least of all times counts, for whatever else runs on the machine only adds to them

# Seconds of a round with each shape, by target, for this process.
_known: WeakKeyDictionary[Any, dict[Hashable, dict[int | Levels, float]]] = WeakKeyDictionary()


def nodes_of(drafter: Drafter) -> int:
    """Count the most tokens that a measurement puts behind the prompts."""
    return (ROUNDS + 1) * (LONGEST + drafter.copied + 1)


class _EnoughError(Exception):
    """Ends a decoding whose rounds were timed."""


def best_shape(target: Any, drafter: Drafter, start: Prefilled, temperature: float) -> int | Levels:
    """Return the chain or tree that should decode these prompts soonest, by the drafter's acceptance and by costs.

    The costs are measured when a target and a draft first meet, and again for texts twice as long and for another number of
    rows or threads. Of equal shapes the one with the fewest tokens.
    """
    tokens = _tokens_a_round(nearest(drafter.acceptance, temperature, drafter.copied > 0))
    if len(tokens) == 1:
        return next(iter(tokens))
    length = max(map(len, start.prompts)).bit_length()
    machine = (str(target.device), target.dtype, torch.get_num_threads(), len(start.prompts), length)
    # Drafters come and go with each call that names a folder: a draft is known by its acceptance, counts of its own.
    key = (type(drafter), drafter.proposed, drafter.copied, drafter.acceptance, machine)
    costs = _known.setdefault(target, {})
    known = costs.setdefault(key, {})
    missing = [shape for shape in tokens if shape not in known]  # another temperature may have other shapes
    if longest := max((shape for shape in missing if isinstance(shape, int)), default=0):
        known |= enumerate(measure_costs(target, drafter, start, longest).rounds, 1)
    for shape in missing:
        if not isinstance(shape, int):
            known[shape] = min(_round_seconds(target, drafter, start, shape) for _ in range(REPEATS))
    shapes = list(tokens)
    nodes = [shape if isinstance(shape, int) else sum(shape) for shape in shapes]
    best = max(range(len(shapes)), key=lambda at: (tokens[shapes[at]] / known[shapes[at]], -nodes[at]))
    # Ranks that hold the target together have each taken their own times.
    return shapes[int(tensor_of_first_rank(torch.tensor([best], device=target.device), group_of(target)))]


def _tokens_a_round(held: list[Acceptance]) -> dict[int | Levels, float]:
    """Return what a round with each shape should bring: chains up to the longest that was evaluated, and trees."""
    tokens: dict[int | Levels, float] = {}
    for each in held:
        if isinstance(each, ChainAcceptance):
            tokens |= dict(enumerate(each.expected_tokens()[:LONGEST], 1))
        else:
            is_chain = all(size == 1 for size in each.levels) and each.copied
            tokens[len(each.levels) if is_chain else each.levels] = each.expected_tokens
    return tokens


@torch.inference_mode()
def measure_costs(target: Any, drafter: Drafter, start: Prefilled, longest: int) -> ChainCosts:
    """Time one token by plain decoding and rounds with chains of 1 .. longest tokens, all rows of `start` at once.

    Greedy rounds as they are decoded, so that what is neither draft nor target counts too; nothing of them stays.
    """
    plain, rounds = [], []
    for _ in range(REPEATS):
        plain.append(_plain_seconds(target, start))
        rounds.append([_round_seconds(target, drafter, start, length) for length in range(1, longest + 1)])
    return ChainCosts(min(plain), tuple(min(seconds) for seconds in zip(*rounds, strict=True)))


def _plain_seconds(target: Any, start: Prefilled) -> float:
    """Return the least time of a forward of one token a row, its choice on the host included."""
    with start.lent(ROUNDS + 1) as lent:
        ids_B, marks = lent.logits_BV.argmax(-1), []
        for _ in range(ROUNDS + 2):
            ids_B.tolist()
            marks.append(time.perf_counter())
            output = target(ids_B[:, None], past_key_values=lent.cache, use_cache=True, logits_to_keep=1)
            ids_B = output.logits[:, -1].argmax(-1)
        return _least(marks)


@torch.inference_mode()
def _round_seconds(target: Any, drafter: Drafter, start: Prefilled, shape: int | Levels) -> float:
    """Return the least time of a round with this shape, between two looks of the host at new tokens."""
    marks: list[float] = []

    def mark(row: int, tokens: list[int]) -> None:
        if row == 0:
            marks.append(time.perf_counter())
        if len(marks) == ROUNDS + 2:
            raise _EnoughError

    try:
        speculate(target, drafter, start, max_new_tokens=nodes_of(drafter) + 2, shape=shape, on_tokens=mark)
    except _EnoughError:
        return _least(marks)
    raise AssertionError("so many tokens take more rounds")


def _least(marks: list[float]) -> float:
    """Return the least time between two marks, less the first, in which caches are filled."""
    return min(right - left for left, right in pairwise(marks[1:]))
