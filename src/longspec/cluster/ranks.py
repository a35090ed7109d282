"""How many processes share a stage's global batch."""


def sharing_ranks(global_batch: int, nodes: int, ranks: int) -> int:
    """Processes on each of `nodes` machines: `ranks`, or as many as can share a batch that is smaller than all of them.

    A batch that is large enough and does not divide is left to the trainer, which refuses it.
    """
    if global_batch >= nodes * ranks:
        return ranks
    return max((few for few in range(1, ranks + 1) if global_batch % (nodes * few) == 0), default=ranks)
