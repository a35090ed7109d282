"""Chain lengths against closed forms, and the file beside a draft."""

from pathlib import Path
from typing import Any

import pytest

from longspec import chain_length
from longspec.atomic_files import write_json
from longspec.chain_length import ChainAcceptance, TreeAcceptance, nearest, pooled, read_acceptance
from longspec.decode.levels import Budget
from tests.refusals import refused


def geometric(share: float, depth: int) -> ChainAcceptance:
    """Every token kept with the same share of a million."""
    return ChainAcceptance(0.0, tuple((round(share * 10**6), 10**6) for _ in range(depth)))


@pytest.mark.parametrize("share", [0.25, 0.5, 0.9])
def test_expected_tokens_of_equal_shares_are_the_geometric_sum(share: float) -> None:
    """(1 - a^(k+1)) / (1 - a) of Leviathan et al. 2023, equation 1."""
    closed = [(1 - share ** (length + 1)) / (1 - share) for length in range(1, 8)]
    assert geometric(share, 7).expected_tokens() == pytest.approx(closed, rel=1e-5)


def test_counts_of_texts_are_added_up() -> None:
    assert pooled(0.0, [[[3, 4], [1, 3]], [[2, 6], [2, 2]]]) == ChainAcceptance(0.0, ((5, 10), (3, 5)))


def test_the_nearest_temperature_is_taken() -> None:
    cold, warm, tree = ChainAcceptance(0.0, ((1, 2),)), ChainAcceptance(1.0, ((1, 3),)), TreeAcceptance(1.0, (2, 2), 5, 3)
    found = [nearest([cold, warm, tree], temperature) for temperature in (0.0, 0.4, 0.6, 3.0)]
    assert found == [[cold], [cold], [warm, tree], [warm, tree]]


def test_the_file_holds_what_was_written(tmp_path: Path) -> None:
    held = (ChainAcceptance(0.0, ((5, 10), (3, 5))), ChainAcceptance(0.7, ((1, 2),)))
    assert read_acceptance(tmp_path) == ()
    chain_length.write_acceptance(tmp_path, held)
    assert read_acceptance(tmp_path) == read_acceptance(tmp_path / "model.safetensors") == held
    tree = TreeAcceptance(0.0, (2, 4, 4), 25, 10)
    for both in (
        (*held, tree),
        (tree,),
        (*held, tree, TreeAcceptance(0.0, (), 30, 10, copied=8), TreeAcceptance(0.0, Budget(9), 3, 1)),
    ):
        chain_length.write_acceptance(tmp_path, both)
        assert read_acceptance(tmp_path) == both
    assert tree.expected_tokens == 2.5


@pytest.mark.parametrize("content", [{}, {"chains": [3]}, {"chains": [], "trees": [[2, 4]]}])
def test_a_damaged_file_is_named_with_the_way_out(tmp_path: Path, content: Any) -> None:
    write_json(tmp_path / chain_length.FILE, content)
    with refused(tmp_path / chain_length.FILE, "remove", "rule report"):
        read_acceptance(tmp_path)
