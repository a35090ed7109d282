"""The interface of drafters, which propose tokens, and prompt lookup, which needs no model: it copies from the text.

Shapes: B rows, E tokens of a path, T cached tokens, K key/value heads, D head width (of keys), D depth (of chains).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from longspec.chain_length import Acceptance
from longspec.decode.levels import Levels
from longspec.decode.sampling import Sampler
from longspec.decode.tree import NOTHING, DraftTree, chains
from longspec.models.target import draft_device


@dataclass
class DraftInput:
    """Where the rows stand when a round begins. A row's newest token, the root, is not yet in the target's cache.

    texts: prompt and tokens, root included; lengths: cached tokens of each row, len(text) - 1, on the host and the device;
    cached: of the keys and values that the drafter reads, by name (states/tensors.py), the target's own [B, K, T, D],
    left-aligned.
    """

    texts: list[list[int]]
    lengths: tuple[int, ...]
    lengths_B: Tensor
    roots_B: Tensor
    cached: dict[str, Tensor]


@runtime_checkable
class Drafter(Protocol):
    """Proposes trees of tokens that may follow.

    reads: names of the tensors of the target that it wants: keys and values come with every draft input; hidden states, which
    the target makes once, come with the tokens that they belong to, at the start and after each verification. proposed: how
    many of the target's tokens it can propose; None: all. copied: most tokens that its trees hold beside the levels that they
    were asked for, one below the other. acceptance: how its chains and trees were kept where it was evaluated; empty: unknown.
    A class that inherits from this one does nothing where it does not say what.
    """

    reads: tuple[str, ...] = ()
    proposed: int | None = None
    copied: int = 0
    acceptance: tuple[Acceptance, ...] = ()

    def check(self, target: Any) -> None:
        """Raise ValueError where it cannot draft for this target."""
        return

    def begin(self, prompts: list[list[int]], hidden: dict[str, Tensor]) -> None:
        """New texts, one a row; `hidden` states of their tokens [B, T, H], left-aligned."""

    def propose(self, draft_input: DraftInput, levels: Levels, sampler: Sampler) -> DraftTree:
        """A tree for each row, of `levels` or fewer of them."""

    def commit(self, tokens_BE: Tensor, kept_B: Tensor, hidden: dict[str, Tensor]) -> None:
        """Take tokens_BE[b, : kept_B[b] + 1] into the text: the kept ones behind the root, then the target's own, the new root.

        The kept ones need not be of the tree that was proposed. `hidden` [B, E, H] are the states of the old root and of them.
        """
        return

    def select(self, rows_B: Tensor) -> None:
        """Go on with these rows alone."""


_serving: set[int] = set()
_guard = Lock()


@contextmanager
def alone_with(drafter: Drafter) -> Iterator[None]:
    """Within the block the drafter, which keeps the state of its texts, serves one decoding.

    Raises RuntimeError while it serves another.
    """
    while hasattr(drafter, "drafter"):  # one around another, which has the state
        drafter = drafter.drafter
    with _guard:
        if id(drafter) in _serving:
            raise RuntimeError(
                "draft: this drafter serves a decoding that has not ended, in another thread or around this one; give each its "
                "own, as by load_drafter"
            )
        _serving.add(id(drafter))
    try:
        yield
    finally:
        _serving.remove(id(drafter))


def check_beside(own: Any, target: Any, weight: Tensor, part: str = "layer") -> None:
    """Raise ValueError where a draft was made for its `own` target, not this one, or where a part does not stand beside it.

    weight: one of that part's.
    """
    if target is not own:
        raise ValueError("draft: this drafter was made for another target; make one for this target, as by load_drafter")
    device = draft_device(target)
    if (weight.dtype, weight.device) != (target.dtype, device):
        raise ValueError(
            f"draft: {part}: is {weight.dtype} on {weight.device}, beside this target it must be {target.dtype} on {device}: "
            f"move the layer by .to('{device}', target.dtype), and make the drafter anew"
        )


class Followers:
    """For each n-gram of up to `longest` tokens of a growing text, the place behind its first occurrence."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.known: dict[tuple[int, ...], int] = {}  # n-gram -> the place behind its first one
        self.behind = 1  # the first place whose n-grams before it are not known yet

    def learn(self, text: list[int]) -> None:
        """Take in what the text has grown by."""
        for size in range(1, self.longest + 1):
            first = max(0, self.behind - size)
            grams = zip(*(text[first + offset : -1] for offset in range(size)), strict=False)
            for place, gram in enumerate(grams, first + size):
                self.known.setdefault(gram, place)
        self.behind = len(text)

    def of(self, text: list[int], count: int, shortest: int = 1) -> list[int]:
        """Up to `count` tokens that followed the longest n-gram at the text's end, of `shortest` tokens or more; else none."""
        for size in range(min(self.longest, len(text) - 1), shortest - 1, -1):
            place = self.known.get(tuple(text[-size:]))
            if place is not None:
                return text[place : place + count]
        return []


class LookupDrafter(Drafter):
    """Prompt lookup: what followed the newest n-gram where it first stood in the text, as transformers' own generator says."""

    def __init__(self, max_ngram: int = 3) -> None:
        self.max_ngram = max_ngram
        self.followers: list[Followers] = []  # of each row

    def begin(self, prompts: list[list[int]], hidden: dict[str, Tensor]) -> None:
        """Take the prompts in; from now on a round costs what it adds, however long the text is."""
        self.followers = [Followers(self.max_ngram) for _ in prompts]
        for followers, prompt in zip(self.followers, prompts, strict=True):
            followers.learn(prompt)

    def propose(self, draft_input: DraftInput, levels: Levels, sampler: Sampler) -> DraftTree:
        """A chain as deep as `levels`, shorter where the text holds no earlier match."""
        found = []
        for followers, text in zip(self.followers, draft_input.texts, strict=True):
            followers.learn(text)
            found.append(followers.of(text, len(levels)))
        longest = max(map(len, found))
        filled = [chain + [NOTHING] * (longest - len(chain)) for chain in found]
        return chains(draft_input.roots_B, torch.tensor(filled, dtype=torch.int64, device=draft_input.roots_B.device))

    def select(self, rows_B: Tensor) -> None:
        """Go on with these rows alone."""
        self.followers = [self.followers[row] for row in rows_B.tolist()]
