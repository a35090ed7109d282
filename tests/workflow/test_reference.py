"""What is generated of the keys' types is of today, and the schemas say of files what the plan says of them."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from longspec.config import yaml_files
from longspec.workflow import reference


def faults(root: Path, schema: str, content: Any) -> list[str]:
    """What an editor underlines."""
    validator = jsonschema.Draft202012Validator(json.loads((root / schema).read_text()))
    return [error.message for error in validator.iter_errors(content)]


def test_the_generated_files_are_of_today(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reference.main(["--check"]) == 0, capsys.readouterr().err


def test_the_schema_for_editors_takes_every_run(root: Path) -> None:
    runs = [*(root / "config/run").glob("*.yaml"), *(root / "benchmarks/config/run").glob("*.yaml")]
    assert len(runs) > 10
    assert {run.name: found for run in runs if (found := faults(root, reference.RUN, yaml_files.read(run)))} == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"stags": ["base"]},
        {"stages": {"base": {"recipes": {}}}},
        {"recipe": {"optimizer": {"learning_rate": 1e-3}}},
        {"recipe": {"method": {"vocabulary": 0}}},
        {"stages": {"base": {"runtime": {"deepspeed": {"zero_stage": 4}}}}},
        {"evaluation": {"tasks": {"a": {"dta": "x"}}}},
        {"gates": {"forgetting": 2}},
        {"data": {"a": {"source": "x", "sharts": 1}}},
    ],
)
def test_the_schema_for_editors_refuses_what_the_plan_refuses(root: Path, wrong: dict[str, Any]) -> None:
    assert faults(root, reference.RUN, wrong)
