"""How many processes share a global batch."""

import pytest

from longspec.train.estimate.grad_accum import sharing_ranks


@pytest.mark.parametrize(
    ("global_batch", "nodes", "ranks", "sharing"),
    [
        (2048, 1, 8, 8),
        (16, 2, 8, 8),
        (4, 1, 8, 4),  # one row each
        (6, 2, 8, 3),
        (3, 2, 8, 8),  # nobody can: the trainer refuses it
        (60, 1, 8, 8),  # large enough, and does not divide: the trainer refuses it
    ],
)
def test_a_batch_smaller_than_all_processes_has_fewer(global_batch: int, nodes: int, ranks: int, sharing: int) -> None:
    assert sharing_ranks(global_batch, nodes, ranks) == sharing
