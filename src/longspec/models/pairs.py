"""How many pairs of query and key see each other, which is what attention costs."""


def causal_pairs(length: int, window: int | None = None, lag: int = 0) -> int:
    """Query i sees key j when j <= i - lag and i - j <= window, in a document of `length` tokens."""
    if window is not None:
        return causal_pairs(length, None, lag) - causal_pairs(length, None, max(window + 1, lag))
    rest = max(0, length - lag)
    return rest * (rest + 1) // 2


def block_pairs(length: int, block: int) -> int:
    """Query i sees the keys before its own block: (i // block) * block of them."""
    whole, rest = divmod(length, block)
    return block * block * (whole * (whole - 1) // 2) + rest * whole * block
