"""Targets that no chosen run uses, by hand: their manifests and rows are made when their paths are asked for."""

from pathlib import Path

import pytest

from longspec.atomic_files import read_json
from tests.targets import save_target
from tests.workflow.planning import Workflow

pytestmark = pytest.mark.slow  # half a minute and more as a whole


def test_a_target_that_no_chosen_run_uses_is_made_when_its_path_is_asked_for(
    workflow: Workflow, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The process that a job is run by knows it, too. A file that nobody asks for is not read."""
    folder = Path(save_target("qwen2", tmp_path_factory.mktemp("elsewhere")))
    (folder / "tokenizer.json").write_text("{}")
    told = f"# @package recipe.model\nfamily: qwen2\nname: mine\nsource: {folder}\n"
    file = workflow.folder / "config/model/mine.yaml"
    file.write_text(told)
    workflow.output("models/mine/target_manifest.json", "--cores=1", "--quiet")
    manifest = read_json(workflow.folder / "models/mine/target_manifest.json")
    assert (manifest["path"], manifest["source"]) == (str(folder), str(folder))
    planned = workflow.output("-n", "data/packed/mine/puzzles-longcot-64-split/manifest.json")
    assert "models/mine/tokenizer_manifest.json" in planned
    file.write_text(f"{told}sha256: {'0' * 64}\n")
    assert "fetch_target" in workflow.output("-n", "models/qwq-32b/target_manifest.json")
    done = workflow.call("-n", "models/mine/target_manifest.json")
    assert done.returncode == 1
    assert "recipe.model.sha256: is of a .gguf file" in done.stdout + done.stderr
    file.write_text(told.replace("name: mine", "name: other"))
    done = workflow.call("-n", "models/mine/target_manifest.json")
    assert "config/model/mine.yaml: recipe.model.name: 'other'; name the file as its target" in done.stdout + done.stderr
