"""Targets that no chosen run uses, by hand: their manifests and rows are made when their paths are asked for."""

from pathlib import Path

import pytest

from longspec.atomic_files import read_json
from longspec.workflow.settings.runs import asked_targets
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
    rows = "data/packed/mine/puzzles-longcot-64-split/manifest.json"
    assert asked_targets([rows], ["demo"], workflow.folder / "config").keys() == {"mine"}
    file.write_text(f"{told}sha256: {'0' * 64}\n")
    assert asked_targets(["models/qwq-32b/target_manifest.json"], ["demo"], workflow.folder / "config").keys() == {"qwq-32b"}
    for text, message in (
        (file.read_text(), r"recipe\.model\.sha256: "),
        (told.replace("name: mine", "name: other"), r"config/model/mine\.yaml: recipe\.model\.name: 'other'"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            asked_targets(["models/mine/target_manifest.json"], ["demo"], workflow.folder / "config")
