"""docs/eagle3.md: the files that it names are there, and its run is planned as it stands."""

import re
from pathlib import Path

import pytest

from tests.workflow.planning import Workflow


@pytest.fixture
def guide(root: Path) -> str:
    return (root / "docs/eagle3.md").read_text()


def test_every_file_that_is_named_is_there(root: Path, guide: str) -> None:
    named = set(re.findall(r"\]\((\S+\.md)(?:#[\w-]+)?\)", guide))
    assert len(named) == 7
    assert [name for name in named if not (root / "docs" / name).exists()] == []
    assert "docs/eagle3.md" in (root / "README.md").read_text()
    assert "docs/eagle3.md" in (root / "config/method/eagle3.yaml").read_text()


def test_its_run_is_planned(workflow: Workflow, root: Path, guide: str) -> None:
    (name, run), *others = re.findall(r"`(config/run/[^`]+)`:\n\n```yaml\n(.*?)```", guide, re.DOTALL)
    assert others == []
    (workflow.folder / name).write_text(run)
    workflow.edit("config/workflow.yaml", r"^runs: \[.*?\]", f"runs: [{Path(name).stem}]")
    jobs = workflow.plan()
    assert {"fetch_target", "train", "evaluate", "report"} <= {fields["rule"] for fields in jobs.values()}
    assert {"longcot/checkpoint.json", "draft_vocabulary_32000.json"} <= {
        path.removeprefix("results/llama-eagle3/ttt/") for path in jobs
    }
