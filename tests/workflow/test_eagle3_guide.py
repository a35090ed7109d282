"""docs/eagle3.md: its table is the dataclasses' fields and defaults, and its run is planned as it stands."""

import json
import re
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import pytest

from longspec.methods.eagle3.settings import RANGES, Draft, Method
from tests.workflow.planning import Workflow

WORDS: dict[Any, tuple[str, ...]] = {
    dict[str, Any]: ("rotation",),
    int: ("number",),
    float: ("number",),
    bool: ("true or false",),
    str: ("text", "name"),
}


@pytest.fixture
def guide(root: Path) -> str:
    return (root / "docs/eagle3.md").read_text()


def test_the_table_has_every_key_with_its_type_and_default(guide: str) -> None:
    rows = re.findall(r"^\| `((?:method|draft)\.\w+)` \| ([^|]+) \| `([^`]+)` \| [^|]+ \|$", guide, re.MULTILINE)
    kinds = {f"{section}.{each.name}": each for section, of in (("method", Method), ("draft", Draft)) for each in fields(of)}
    assert [name for name, _, _ in rows] == list(kinds)
    for name, kind, default in rows:
        each = kinds[name]
        assert default == (each.default if isinstance(each.default, str) else json.dumps(each.default))
        parts = get_args(each.type) or (each.type,)
        assert kind.endswith(", or null") == (NoneType in parts), name
        (own,) = set(parts) - {NoneType}
        assert kind.startswith(WORDS.get(own, ("three layers",))), name
        if bounds := re.search(r"number, (\S+) to (\S+)$", kind):
            allowed = RANGES[each.name]
            assert [float(bound) for bound in bounds.groups()] == [allowed.low, allowed.high]


def test_every_file_that_is_named_is_there(root: Path, guide: str) -> None:
    named = set(re.findall(r"\]\((\S+\.md)\)", guide))
    assert len(named) == 6
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
