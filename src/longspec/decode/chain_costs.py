"""Measure what rounds of each shape cost on this machine, and choose the fastest way to decode by that.

Shapes: B rows.
"""

import time
from collections.abc import Hashable
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any
from weakref import WeakKeyDictionary

import torch

from longspec.chain_length import LONGEST, Acceptance, ChainAcceptance, TreeAcceptance, nearest
from longspec.decode.drafters import Drafter
from longspec.decode.fallback import Copying, NoDraft, WhilePays
from longspec.decode.levels import DEFAULT_SHAPE, Budget, Shape, depth_of, size_of
from longspec.decode.lookup import LookupDrafter, WithLookup
from longspec.decode.prefill import Prefilled
from longspec.decode.speculate import speculate
from longspec.models.target import group_of, tensor_of_first_rank

ROUNDS = 3  # timed at once, after one that takes the prompts in
ROUNDS_OF_BUDGET = 8  # for trees whose size differs from round to round, and that learn how far a draft is right
REPEATS = 2  # of all measurements
OF_AN_HOUR = 3600  # seconds after which costs are measured again: a machine's other work comes and goes

# For each shape the one to decode with, a budget with its prices, and seconds of a round; by target, for this process.
_known: WeakKeyDictionary[Any, dict[tuple[Any, ...], dict[Hashable, tuple[Shape, float]]]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Way:
    """Hold a way to decode, the tokens that its round should bring, and a round's seconds here, once they are measured."""

    drafter: Drafter
    shape: Shape
    tokens: float
    seconds: float = 0.0

    @property
    def key(self) -> Hashable:
        """Return the key of its costs, with the drafter's type only: each call that names a folder makes a new drafter."""
        return (type(self.drafter), self.shape)


def nodes_of(drafter: Drafter) -> int:
    """Return the most tokens that a measurement puts behind the prompts, also by prompt lookup alone."""
    trees = [each.levels or each.copied for each in drafter.acceptance if isinstance(each, TreeAcceptance)]
    return max(_rounds_of(shape) * (depth_of(shape) + drafter.copied + 1) for shape in (LONGEST, *trees))


def _rounds_of(shape: Shape) -> int:
    """Return the rounds of a measurement: those that are timed at once, and the one before them."""
    return 1 + (ROUNDS_OF_BUDGET if isinstance(shape, Budget) else ROUNDS)


class _EnoughError(Exception):
    """End a decoding whose rounds were timed."""


def best_way(target: Any, drafter: Drafter, start: Prefilled, **sampling: Any) -> tuple[WhilePays, Shape]:
    """Return the drafter and the shape that should decode these prompts soonest, by evaluated acceptance and by costs.

    It chooses among the evaluated shapes, also of prompt lookup alone, and plain decoding. A draft that should be faster than
    plain decoding begins, and is left where these texts say that plain decoding or prompt lookup is faster; between these two
    the texts decide at any time. sampling: temperature, top_k and top_p. Costs are measured when a target and a draft first
    meet, again after an hour, for texts twice as long, for another number of rows or threads, and for other sampling. Of
    equally fast ways the one with the fewest tokens wins.
    """
    order = _by_rate(target, drafter, start, sampling)
    plain = next(each for each in order if isinstance(each.drafter, NoDraft))
    ahead, copying = order[: order.index(plain)], None
    lookup = next((each for each in order if isinstance(each.drafter, LookupDrafter)), None)
    if lookup is not None:
        copying = Copying(depth_of(lookup.shape), lookup.seconds / plain.seconds, lookup in ahead)
    way = next((each for each in ahead if each.drafter is drafter), None)
    if way is not None:
        return WhilePays(drafter, way.tokens, way.seconds / plain.seconds, copying), way.shape
    return WhilePays(plain.drafter, 0.0, 1.0, copying), (lookup or plain).shape


def best_shape(target: Any, drafter: Drafter, start: Prefilled, **sampling: Any) -> Shape:
    """Return the shape with which the draft itself should decode these prompts soonest, even if another way is faster."""
    order = _by_rate(target, drafter, start, sampling)
    return next((way.shape for way in order if way.drafter is drafter), DEFAULT_SHAPE)


def _by_rate(target: Any, drafter: Drafter, start: Prefilled, sampling: dict[str, Any]) -> list[Way]:
    """Return all ways, the fastest first, with the shapes to decode with and the seconds of a round."""
    ways = _ways(drafter, sampling.get("temperature", 0.0))
    length = max(map(len, start.prompts)).bit_length()
    machine = (str(target.device), target.dtype, torch.get_num_threads(), len(start.prompts), length)
    (hour,) = _of_first_rank(target, [time.monotonic() // OF_AN_HOUR])
    # A draft is known by its acceptance: the counts are its own.
    known = (tuple(way.key for way in ways), drafter.proposed, drafter.copied, drafter.acceptance, machine, *sampling.items())
    key, of_target = (hour, *known), _known.setdefault(target, {})
    if (found := of_target.get(key)) is None:
        for old in [each for each in list(of_target) if each[0] != hour]:  # other threads may do so too
            of_target.pop(old, None)
        found = of_target[key] = _costs(target, start, ways, sampling)
    costs = [found[way.key] for way in ways]
    timed = [replace(way, shape=shape, seconds=seconds) for way, (shape, seconds) in zip(ways, costs, strict=True)]
    return sorted(timed, key=lambda way: (-way.tokens / way.seconds, size_of(way.shape)))


def _of_first_rank(target: Any, numbers: list[float]) -> list[float]:
    """Return rank 0's numbers: ranks that hold a target together have clocks of their own, and must choose alike."""
    if (group := group_of(target)) is not None:
        numbers = tensor_of_first_rank(torch.tensor(numbers, dtype=torch.float64, device=target.device), group).tolist()
    return numbers


def _ways(drafter: Drafter, temperature: float) -> list[Way]:
    """Return plain decoding, prompt lookup, chains up to the longest one that was evaluated, and trees."""
    held = nearest(drafter.acceptance, temperature, drafter.copied > 0)
    if temperature and drafter.copied:  # nothing is copied beside chains that are drawn
        of_draft = nearest(drafter.acceptance, temperature)
        held = [each for each in held if not _is_chain(each)] + [each for each in of_draft if isinstance(each, ChainAcceptance)]
    found: dict[Hashable, Way] = {}
    for each in held:
        if isinstance(each, ChainAcceptance):
            ways = [Way(drafter, length, tokens) for length, tokens in enumerate(each.expected_tokens()[:LONGEST], 1)]
        elif not each.levels:
            ways = [Way(LookupDrafter(), each.copied, each.expected_tokens)]
        else:
            ways = [Way(drafter, depth_of(each.levels) if _is_chain(each) else each.levels, each.expected_tokens)]
        found |= {way.key: way for way in ways}
    return [Way(NoDraft(), 1, 1.0), *found.values()]


def _is_chain(each: Acceptance) -> bool:
    """Tell whether this is of chains that had tokens of prompt lookup beside them."""
    return isinstance(each, TreeAcceptance) and each.copied > 0 and isinstance(each.levels, tuple) and set(each.levels) == {1}


def _costs(target: Any, start: Prefilled, ways: list[Way], sampling: dict[str, Any]) -> dict[Hashable, tuple[Shape, float]]:
    """Return for each way, by its key, the shape to decode with and a round's seconds. Budgets are priced by the others."""
    fixed = [way for way in ways if not isinstance(way.shape, Budget)]
    seconds = _mean_seconds(target, start, [(way.drafter, way.shape) for way in fixed], sampling)
    found: dict[Hashable, tuple[Shape, float]] = {way.key: (way.shape, of) for way, of in zip(fixed, seconds, strict=True)}
    # Without lookup: what it brings depends on the text.
    rate = max(way.tokens / of for way, of in zip(fixed, seconds, strict=True) if not isinstance(way.drafter, LookupDrafter))
    for way in (way for way in ways if way not in fixed):
        shape = _priced(target, way, start, rate, sampling)
        (own,) = _mean_seconds(target, start, [(way.drafter, shape)], sampling)
        found[way.key] = (shape, own)
    return found


def _priced(target: Any, way: Way, start: Prefilled, rate: float, sampling: dict[str, Any]) -> Budget:
    """Return a way's budget with what a level and a node cost here, in tokens, at `rate` tokens a second.

    Children are at most half as likely as their parents, so that the parents of a level must promise twice its price.
    """
    assert isinstance(way.shape, Budget)
    wide = min(way.shape.nodes, way.drafter.proposed or target.config.vocab_size)
    drafter = way.drafter.drafter if isinstance(way.drafter, WithLookup) else way.drafter  # what is copied costs each as much
    one, two, level = _mean_seconds(target, start, [(drafter, shape) for shape in (1, 2, (wide,))], sampling)
    node = max(0.0, level - one) / max(1, wide - 1)
    step = max(0.0, two - one - node)
    return replace(way.shape, step=min(1.0, 2 * step * rate), node=min(0.5, node * rate))


def _mean_seconds(target: Any, start: Prefilled, ways: list[tuple[Drafter, Shape]], sampling: dict[str, Any]) -> list[float]:
    """Return a round's mean seconds for each way. All are timed in turn, and again: other work slows all alike.

    Rounds are decoded as usual, so that what is neither draft nor target counts too; nothing of them stays.
    """
    repeats = [[_round_seconds(target, drafter, start, shape, sampling) for drafter, shape in ways] for _ in range(REPEATS)]
    return _of_first_rank(target, [fmean(each) for each in zip(*repeats, strict=True)])


@torch.inference_mode()
def _round_seconds(target: Any, drafter: Drafter, start: Prefilled, shape: Shape, sampling: dict[str, Any]) -> float:
    """Return the seconds of a round with this shape, between two looks of the host at new tokens."""
    marks: list[float] = []

    def mark(row: int, tokens: list[int]) -> None:
        if row == 0:
            marks.append(time.perf_counter())
        if len(marks) == _rounds_of(shape) + 1:
            raise _EnoughError

    most = max(nodes_of(drafter), _rounds_of(shape) * (depth_of(shape) + drafter.copied + 1)) + 2  # never reached
    draws = torch.Generator(start.logits_BV.device).manual_seed(0)  # the caller's draws stay as they are
    try:
        speculate(target, drafter, start, max_new_tokens=most, shape=shape, on_tokens=mark, generator=draws, **sampling)
    except _EnoughError:
        # Without the first, which fills the caches. The median, not the least: other work on the machine slows a wider forward
        # more, and decoding has that beside itself too.
        return median(right - left for left, right in pairwise(marks[1:]))
    raise AssertionError("so many tokens take more rounds")
