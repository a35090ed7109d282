"""The acceptance that is left beside a final draft."""

from pathlib import Path

import pytest

from longspec.chain_length import FILE, ChainAcceptance, TreeAcceptance, read_acceptance
from longspec.measure.tasks import Setting
from longspec.report.acceptance_file import longest_chains
from tests.report.test_numbers import report, write_tiny


@pytest.mark.usefixtures("undrawn")
def test_the_final_draft_keeps_its_acceptance(tmp_path: Path) -> None:
    """The tiny run's final draft keeps [2, 2], [2], [0], [1], [2, 1, 1] of two: 7 of 8 first tokens, then 4 of 7, twice.

    Prompt lookup brings 9 tokens in 8 rounds, twice.
    """
    arguments = write_tiny(tmp_path)
    numbers = report(arguments)
    held = (ChainAcceptance(0.0, ((14, 16), (8, 14))), TreeAcceptance(0.0, (), 18, 16, copied=2))
    assert read_acceptance(tmp_path / "results/base/final_draft") == held
    (tmp_path / "results/base/evaluation").rename(tmp_path / "results/base/bench")
    (tmp_path / "results/base/final_draft" / FILE).unlink()
    assert report([*arguments, "--evaluations", "bench"])["overall"] == numbers["overall"]
    assert not (tmp_path / "results/base/final_draft" / FILE).exists()  # measured apart, it chooses no chains


def test_the_longest_chain_of_each_temperature_tells_of_all_shorter_ones() -> None:
    settings = [Setting(0.7, 3), Setting(0.0, 2), Setting(0.0, (2, 4)), Setting(0.0, 5), Setting(1.0, (2, 4))]
    assert longest_chains(settings) == [Setting(0.0, 5), Setting(0.7, 3)]
