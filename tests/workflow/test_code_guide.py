"""docs/code.md: what it names is there, and what it tells to write does what it says. The schemas say what the plan says."""

import ast
import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from snakemake.cli import parse_config

from longspec.config import yaml_files
from longspec.workflow import reference
from longspec.workflow.settings.workflow_file import typed_call
from tests.workflow.planning import Settings

PLACES = ("", "src/longspec/")
WORD = re.compile(r"[\w.-]+")


@pytest.fixture
def guide(root: Path) -> str:
    return (root / "docs/code.md").read_text()


def test_every_path_is_there(root: Path, guide: str) -> None:
    written = {path for path, _ in files_to_write(guide)}
    named = {word for word in re.findall(r"`([^`\s]+)`", guide) if "/" in word and "<" not in word} - written
    assert len(named) > 25
    assert [path for path in sorted(named) if not any((root / place / path).exists() for place in PLACES)] == []


def test_every_room_is_told_of(root: Path, guide: str) -> None:
    rooms = {path.parent.name for path in (root / "src/longspec").glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(\w+)` \|", guide, re.MULTILINE)) == rooms


def place(root: Path, path: str) -> Path:
    """The file that the guide names by a path."""
    (found,) = [root / folder / path for folder in PLACES if (root / folder / path).exists()]
    return found


def defined(file: Path) -> set[str]:
    """Functions and classes of a Python file, methods with their class and without; rules and keys of another file."""
    text = file.read_text()
    if file.suffix != ".py":
        return set(re.findall(r"^(?:rule )?([\w-]+):", text, re.MULTILINE))
    kinds = (ast.FunctionDef, ast.ClassDef)
    outer = [node for node in ast.parse(text).body if isinstance(node, kinds)]
    inner = [(each.name, node.name) for each in outer for node in each.body if isinstance(node, kinds)]
    return {node.name for node in outer} | {name for _, name in inner} | {".".join(names) for names in inner}


def test_each_question_is_answered_where_the_guide_says(root: Path, guide: str) -> None:
    """The functions are in the files, and the other names on the way there are in one of these."""
    rows = re.findall(r"^\| ([^|]+\?) \| ([^|]+) \| ([^|]+) \|$", guide, re.MULTILINE)
    assert len(rows) == 10
    for question, places, way in rows:
        answers = [(path, name) for path, names in re.findall(r"`([^`]+)` \(([^)]+)\)", places) for name in WORD.findall(names)]
        assert answers, question
        named = answers + [(path, name) for name, path in re.findall(r"`([\w-]+)` in `([^`]+)`", way)]
        assert [(path, name) for path, name in named if name not in defined(place(root, path))] == [], question
        text = "".join(place(root, path).read_text() for path in re.findall(r"`([\w/]+\.(?:py|smk))`", places + way))
        assert [word for word in re.findall(r"`(\w+)`", way) if word not in text] == [], question


def files_to_write(guide: str) -> list[tuple[str, str]]:
    """The files it gives whole, with their content."""
    return re.findall(r"`(config/[^`]+)`:\n\n```yaml\n(.*?)```", guide, re.DOTALL)


def test_a_stage_and_a_variant_are_planned_as_told(settings: Settings, guide: str) -> None:
    files = files_to_write(guide)
    assert len(files) == 3
    for path, text in files:
        assert not (settings.folder / path).exists()
        (settings.folder / path).write_text(text)
    (command,) = re.findall(r"`snakemake -n final_draft --config ([^`]+)`", guide)
    plan = settings.plan(**typed_call(parse_config(shlex.split(command))))
    stages = [("polished", "lag-2", stage) for stage in ("base", "polish")]
    assert list(plan.configs) == stages
    assert plan.previous_weights(*stages[1]) == ["results/polished/lag-2/base/draft/model.safetensors"]
    assert (plan.configs[stages[0]].recipe.draft.lag, plan.configs[stages[0]].recipe.draft.lag_mode) == (2, "fixed")


def test_the_made_up_method_is_the_files_that_are_told(root: Path, guide: str) -> None:
    """A method's files, its variant, its run and its runs' stages, and no other."""
    told = {path.replace("<name>", "made_up") for path in re.findall(r"`((?:src|config)/[^`]*<name>[^`]*)`", guide)}
    made_up = root / "tests/workflow/made_up"
    own = [path.relative_to(made_up) for path in made_up.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    method = {f"src/longspec/methods/made_up/{path}" for path in own if path.parts[0] != "config"}
    configuration = {str(path) for path in own if path.parts[:2] == ("config", "method")}
    assert method | configuration == told
    others = {path.parts[1] for path in own if path.parts[0] == "config"} - {"method"}
    assert others == {"variant", "run"}


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
