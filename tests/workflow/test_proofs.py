"""Files that were edited after their job had ended are refused by name before a job runs."""

from pathlib import Path

import pytest

from tests.workflow.planning import Workflow

RECIPE = "results/demo/sinkpi-slicing/base/recipe.yaml"


@pytest.mark.slow
def test_calls_refuse_an_edited_recipe(built: Workflow) -> None:
    """A digit of the frozen recipe: a training would take it for what it is to do. No job is run."""
    recipe = built.folder / RECIPE
    recipe.write_text("steps: 7\n")
    done = built.call(f"{Path(RECIPE).parent}/checkpoint.json", "--cores=1")
    assert done.returncode == 1
    assert f"{RECIPE}: edited since it was frozen" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
