"""The levels of a draft tree, in numbers alone. No torch: runs are planned with them."""

DEFAULT_SHAPE = (4, 16, 16, 16, 16)  # the published one

MOST_COPIED = 64  # tokens of prompt lookup beside a draft's: few of a longer copy are kept, and all cost a forward their place

Levels = tuple[int, ...]


def levels_of(shape: int | Levels, vocabulary: int, proposed: int | None = None) -> Levels:
    """Return the sizes of the levels below the root: an int is a chain of so many tokens, a tuple the levels of a tree.

    proposed: how many tokens of the vocabulary the draft can say; None: all. Raises ValueError for sizes that no tree over
    these has.
    """
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
