"""What rules hand to the shell: every placeholder quoted, so that no path and no name is read as a command."""

import re
import shlex
from pathlib import Path

import pytest

from longspec.config import compose_stage, to_yaml
from tests.workflow.planning import Workflow, copy_to

PLACEHOLDER = re.compile(r"(?<!\{)\{([^{}]+)\}(?!\})")
# Several options with their values, made of names alone (longspec.config.names).
OPTIONS = {"params.variants"}


def shell_texts(path: Path) -> list[str]:
    """The commands of a file's rules: the lines below each `shell:`."""
    lines, found = path.read_text().splitlines(), []
    for number, line in enumerate(lines):
        if line == "    shell:":
            rest = lines[number + 1 :]
            end = next((at for at, below in enumerate(rest) if not below.startswith(" " * 8)), len(rest))
            found.append("\n".join(rest[:end]))
    return found


def test_every_placeholder_of_every_command_is_quoted(root: Path) -> None:
    texts = {path.name: shell_texts(path) for path in (root / "rules").glob("*.smk")}
    written = sum(path.read_text().count("shell:\n") for path in (root / "rules").glob("*.smk"))
    assert sum(map(len, texts.values())) == written >= 16
    placeholders = [(name, each) for name, found in texts.items() for text in found for each in PLACEHOLDER.findall(text)]
    assert len(placeholders) > 80
    assert [each for each in placeholders if not each[1].endswith(":q") and each[1] not in OPTIONS] == []


def test_no_rule_runs_what_a_function_has_put_together(root: Path) -> None:
    """`run:` and `script:` would take values past the quoting."""
    for path in [root / "Snakefile", *(root / "rules").glob("*.smk")]:
        assert not re.search(r"^    (run|script|notebook|wrapper):", path.read_text(), re.MULTILINE), path


def test_a_clone_in_a_folder_of_any_name_builds(tmp_path: Path, root: Path) -> None:
    clone = tmp_path / 'it\'s a "clone" $(touch INJECTED) & more'
    clone.mkdir()
    workflow = copy_to(clone, root)
    recipe = "results/demo/sinkpi-slicing/base/recipe.yaml"
    workflow.output("--cores=1", recipe)
    assert (clone / recipe).read_text() == to_yaml(compose_stage("demo", "sinkpi-slicing", "base").recipe)
    assert not list(tmp_path.rglob("INJECTED"))


@pytest.mark.parametrize("folder", ["my targets/it's $(touch INJECTED)", "-x;touch INJECTED"])
def test_a_folder_of_any_name_reaches_the_command_whole(workflow: Workflow, folder: str) -> None:
    target = workflow.folder / folder
    target.mkdir(parents=True)
    (target / "config.json").write_text('{"model_type": "qwen3", "max_position_embeddings": 40960}')
    (workflow.folder / "config/model/mine.yaml").write_text(
        "# @package recipe.model\n_target_: longspec.train.models.qwen3_glide.Qwen3Glide.from_pretrained\nname: mine\n"
        f'source: "{folder}"\n'
    )
    workflow.edit("config/run/demo.yaml", "target: demo", "target: mine")
    command = workflow.plan()["models/mine/target_manifest.json"]["command"]
    assert f"--source={folder}" in shlex.split(command)
    assert not list(workflow.folder.rglob("INJECTED"))
