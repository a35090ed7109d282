"""Which data sets a stage trains on, and the share of its trained tokens that each has: recipe.data.name and .replay."""

from typing import Any

OF_STAGE = "/"  # between an earlier stage and its data set, in recipe.data.replay


def mix_of(name: Any) -> dict[str, float]:
    """Return the shares of a stage's own data sets, in the order of their names. name: recipe.data.name."""
    return {name: 1.0} if isinstance(name, str) else dict(sorted(name.items()))


def shares_of(data: Any) -> list[float]:
    """Return the share of each source of rows: of the own data sets, then of what is replayed, both in the order of names."""
    own = 1 - sum(data.replay.values())
    return [*(own * share for share in mix_of(data.name).values()), *(share for _, share in sorted(data.replay.items()))]


def mix_told(name: Any) -> str:
    """Return a stage's data in words."""
    return name if isinstance(name, str) else ", ".join(f"{each} {share:.0%}" for each, share in mix_of(name).items())
