"""The interface of drafters, which propose tokens.

Shapes: B rows, E tokens of a path, T cached tokens, K key/value heads, D head width (of keys).
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from longspec.chain_length import Acceptance
from longspec.decode.levels import Budget, Levels
from longspec.decode.sampling import Sampler
from longspec.decode.tree import DraftTree, TreeBuilder
from longspec.models.attention.visibility import TreeVisibility
from longspec.models.target import draft_device


@dataclass
class DraftInput:
    """Say where the rows stand when a round begins. A row's newest token, the root, is not yet in the target's cache.

    texts: prompt and tokens, root included; lengths, lengths_B: cached tokens of each row, len(text) - 1, on the host and the
    device; cached: the keys and values that the drafter reads, by name (states/tensors.py), the target's own [B, K, T, D],
    left-aligned.
    """

    texts: list[list[int]]
    lengths: tuple[int, ...]
    lengths_B: Tensor
    roots_B: Tensor
    cached: dict[str, Tensor]

    def visibility(self, builder: TreeBuilder, first_B: Tensor | None, window: int | None, left_out: int = 0) -> TreeVisibility:
        """Return what the newest level sees of a draft's own keys: the text's, and those of its path behind `left_out` nodes.

        first_B: for each row its first key that belongs to the text. Keys behind the text stand one after the other.
        """
        size, depths_S = builder.sizes[-1], builder.depths_S - left_out
        seen_BWS = builder.seen_BSS[:, -size:, left_out:]
        return TreeVisibility(
            self.lengths, self.lengths_B, seen_BWS, depths_S[-size:], depths_S[left_out:], first_B=first_B, window=window
        )


class Drafter:
    """Propose trees of tokens that may follow. A drafter keeps the state of its texts, and serves one decoding at a time.

    reads: names of the target's tensors that it needs. Keys and values come with every draft input; hidden states, which the
    target makes once, come with their tokens, to begin() and commit(). proposed: how many of the target's tokens it can
    propose; None: all. copied: the most tokens that its trees hold beside the levels asked for, one below the other.
    acceptance: how its chains and trees were kept in the evaluation; empty: unknown.
    """

    reads: tuple[str, ...] = ()
    proposed: int | None = None
    copied: int = 0
    acceptance: tuple[Acceptance, ...] = ()

    def check(self, target: Any) -> None:
        """Raise ValueError if it cannot draft for this target."""

    def begin(self, prompts: list[list[int]], hidden: dict[str, Tensor]) -> None:
        """Take in new texts, one per row. hidden: the states of their tokens [B, T, H], left-aligned."""

    def propose(self, draft_input: DraftInput, shape: Levels | Budget, sampler: Sampler) -> DraftTree:
        """Return a tree for each row, of this shape or with fewer levels."""
        raise NotImplementedError

    def commit(self, tokens_BE: Tensor, kept_B: Tensor, hidden: dict[str, Tensor]) -> None:
        """Take tokens_BE[b, : kept_B[b] + 1] into the text: the kept ones behind the root, then the target's own, the new root.

        The kept ones need not be in the proposed tree. hidden: the states [B, E, H] of the old root and of the kept tokens.
        """

    def select(self, rows_B: Tensor) -> None:
        """Go on with these rows only."""


def check_beside(own: Any, target: Any, weight: Tensor, part: str = "layer") -> None:
    """Raise ValueError if a draft was made for `own`, another target, or if a part of it has another dtype or device.

    weight: a weight of that part.
    """
    if target is not own:
        raise ValueError("draft: this drafter was made for another target; make one for this target, as by load_drafter")
    device = draft_device(target)
    if (weight.dtype, weight.device) != (target.dtype, device):
        raise ValueError(
            f"draft: {part}: is {weight.dtype} on {weight.device}, beside this target it must be {target.dtype} on {device}: "
            f"move the layer by .to('{device}', target.dtype), and make the drafter anew"
        )


def check_drafter(drafter: Any, target: Any) -> None:
    """Raise ValueError for what is no drafter, or for a drafter of another target."""
    if not isinstance(drafter, Drafter):
        raise ValueError(f"draft: {drafter!r}: give a draft folder, a weight file, or a drafter as of load_drafter")
    drafter.check(target)
