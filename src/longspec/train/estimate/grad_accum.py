"""How processes share a stage's global batch. Plain arithmetic: rules import it where there is no torch."""


def sharing_ranks(global_batch: int, nodes: int, ranks: int) -> int:
    """Processes on each of `nodes` machines: `ranks`, or as many as can share a batch that is smaller than all of them.

    A batch that is large enough and does not divide is left to share_global_batch, which refuses it.
    """
    if global_batch >= nodes * ranks:
        return ranks
    return max((few for few in range(1, ranks + 1) if global_batch % (nodes * few) == 0), default=ranks)


def share_global_batch(global_batch: int, largest: int, world_size: int) -> tuple[int, int]:
    """Micro batch, at most `largest` rows, and micro batches of each rank in one optimizer step.

    Raises ValueError when the ranks cannot share the global batch equally.
    """
    rows, remainder = divmod(global_batch, world_size)
    if remainder or rows == 0:
        raise ValueError(
            f"recipe.global_batch: {global_batch} rows cannot be shared equally by {world_size} processes; start a number of "
            f"processes that divides {global_batch}"
        )
    micro_batch = max(size for size in range(1, min(largest, rows) + 1) if rows % size == 0)
    return micro_batch, rows // micro_batch
