"""docs/serve.md: its options are the model card's, its lines can be typed. The table of docs/choose.md is its formula."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from longspec.report.prediction import speed_up
from tests.workflow.planning import Workflow

COST = 0.05
CARD = "src/longspec/methods/eagle3/card.md.j2"


@pytest.fixture
def guide(root: Path) -> str:
    return (root / "docs/serve.md").read_text()


def tokens(rate: float, drafted: int) -> float:
    """Tokens of a round, by its own way to end: k kept tokens and the target's, with the probability of exactly k."""
    ended = [(rate**kept * (1 - rate), kept) for kept in range(drafted)]
    return sum(share * (kept + 1) for share, kept in [*ended, (rate**drafted, drafted)])


def gain(rate: float, drafted: int) -> float:
    return speed_up(tokens(rate, drafted), drafted, COST)


def test_the_table_of_drafted_tokens(root: Path) -> None:
    guide = (root / "docs/choose.md").read_text()
    columns = [int(number) for number in re.findall(r"n = (\d+) \|", guide)]
    rows = re.findall(r"^\| (0\.\d) \| (.*) \| (\d+) \|$", guide, re.MULTILINE)
    assert len(columns) == len(rows) == 5
    assert f"At c = {COST}," in guide
    for told, cells, best in rows:
        rate = float(told)
        assert cells.split(" | ") == [f"{tokens(rate, n):.2f}, {gain(rate, n):.2f}×" for n in columns]
        assert int(best) == max(range(1, 65), key=[0, *(gain(rate, n) for n in range(1, 65))].__getitem__)
        # the rule below the table: one more pays as long as the share of the rounds that keep it is above c S(n)
        pays = [rate ** (n + 1) > COST * gain(rate, n) for n in range(1, 65)]
        assert int(best) == 1 + pays.index(False)


def test_with_a_target_that_waits_for_nothing_there_is_no_gain() -> None:
    assert all(speed_up(tokens(rate, n), n, COST + 1) < 1 for rate in (0.5, 0.99) for n in (1, 3, 7))


def test_its_options_are_the_cards(guide: str, root: Path) -> None:
    """Less those that the card alone has: a revision of a repository."""
    card = (root / CARD).read_text()
    wanted = set(re.findall(r"--speculative-[a-z-]+", card)) - {"--speculative-draft-model-revision"}
    assert set(re.findall(r"--speculative-[a-z-]+", guide)) == wanted
    fields = [set(json.loads(text)) for text in re.findall(r"'(\{\"method\": .*?\})'", guide)]
    assert fields == [{"method", "model", "num_speculative_tokens"}] * 2
    assert all(f'"{field}"' in card for field in fields[0])


def test_every_file_that_is_named_is_there(guide: str, root: Path) -> None:
    named = set(re.findall(r"\]\((\S+\.md)\)", guide))
    assert named
    assert [name for name in named if not (root / "docs" / name).exists()] == []
    configs = set(re.findall(r"`(config/[\w./-]+)`", guide))
    assert configs
    assert [name for name in configs if not (root / name).exists()] == []
    assert "docs/serve.md" in (root / "README.md").read_text()


def test_the_lines_before_plan_freeze_both_stages(workflow: Workflow, guide: str) -> None:
    """As bash reads them; their files are what the line of plan names."""
    assigned, frozen = re.findall(r"^    (run=.*)\n    (snakemake .*)$", guide, re.MULTILINE)[0]
    typed = subprocess.run(["bash", "-c", f"{assigned}; printf '%s\\n' {frozen}"], capture_output=True, text=True, check=True)
    words = typed.stdout.splitlines()[1:]
    workflow.output(*words)
    folder = assigned.removeprefix("run=")
    for stage in ("ultrachat", "sharegpt"):
        assert all((workflow.folder / folder / stage / f"{section}.yaml").is_file() for section in ("recipe", "runtime"))
    (alone,) = re.findall(r"`snakemake --profile slurm (\S+) --config 'runs=\[llama3\.3-70b-eagle3\]'`", guide)
    text = workflow.output("-n", alone, "--config", "runs=[llama3.3-70b-eagle3]")
    assert "rule train:" in text
    assert "rule evaluate:" not in text
