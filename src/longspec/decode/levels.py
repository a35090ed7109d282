"""The shape of a draft's tree, in numbers alone. No torch: runs are planned with them."""

from dataclasses import dataclass
from typing import Any

DEFAULT_SHAPE = (4, 16, 16, 16, 16)  # the published one

MOST_COPIED = 64  # tokens of prompt lookup beside a draft: few of a longer copy are kept, and each costs its place in a forward
DEEPEST = 8  # levels of a tree by a budget, unless it says otherwise

Levels = tuple[int, ...]


@dataclass(frozen=True)
class Budget:
    """Describe a tree of at most `nodes` nodes in `depth` levels, the likeliest by the product of the draft's probabilities.

    step, node: the sum of these probabilities, in kept tokens, that drafts a further level, and that keeps a node. power: the
    exponent of the draft's probabilities, which are normed again before they say how likely a token is kept. It was learnt in
    `rounds` rounds of a decoding.
    """

    nodes: int
    depth: int = DEEPEST
    step: float = 0.1
    node: float = 0.01
    power: float = 1.0
    rounds: int = 0

    def __str__(self) -> str:
        return f"{{nodes: {self.nodes}, depth: {self.depth}}}"


Shape = int | Levels | Budget


def shape_of(value: Any) -> Shape:
    """Return the shape that a file says: a number of tokens, a list of levels, or the keys of a budget."""
    return value if isinstance(value, int) else Budget(**value) if isinstance(value, dict) else tuple(value)


def stored(shape: Shape) -> int | list[int] | dict[str, int]:
    """Return a shape as files have it, without a budget's prices, which depend on the machine."""
    if isinstance(shape, Budget):
        return {"nodes": shape.nodes, "depth": shape.depth}
    return shape if isinstance(shape, int) else list(shape)


def size_of(shape: Shape) -> int:
    """Return the most nodes below the root."""
    return shape if isinstance(shape, int) else shape.nodes if isinstance(shape, Budget) else sum(shape)


def depth_of(shape: Shape) -> int:
    """Return the most drafted tokens that a round can keep."""
    return shape if isinstance(shape, int) else min(shape.nodes, shape.depth) if isinstance(shape, Budget) else len(shape)


def levels_of(shape: Shape, vocabulary: int, proposed: int | None = None) -> Levels | Budget:
    """Return the sizes of the levels below the root: an int is a chain of so many tokens, a tuple the levels of a tree.

    A budget stays one. proposed: how many tokens of the vocabulary the draft can propose; None: all. Raises ValueError for
    sizes that no such tree has.
    """
    if isinstance(shape, dict):
        if not {"nodes"} <= shape.keys() <= {"nodes", "depth"}:
            raise ValueError(f"shape {shape!r}: give nodes, and depth where it is not {DEEPEST}, such as {{'nodes': 16}}")
        shape = shape_of(shape)
    if isinstance(shape, Budget):
        if shape.nodes < 1 or shape.depth < 1:
            raise ValueError(f"shape {shape}: give 1 or more nodes, and 1 or more levels")
        return shape
    levels = (1,) * shape if isinstance(shape, int) else tuple(shape)
    above, named = 1, "a vocabulary" if proposed is None else "a draft vocabulary"
    vocabulary = vocabulary if proposed is None else proposed
    for place, size in enumerate(levels):
        if not 1 <= size <= above * vocabulary:
            raise ValueError(
                f"shape {shape!r}: level {place + 1} has {size} nodes; give 1 to {above * vocabulary}, as many as {above} "
                f"parents can have over {named} of {vocabulary}"
            )
        above = size
    if not levels:
        raise ValueError(f"shape {shape!r}: give at least one drafted token, such as 4 (a chain) or {DEFAULT_SHAPE} (a tree)")
    return levels
