"""Files that were damaged, swapped or edited after their job had ended are refused by name at the plan or before a job runs."""

import json
import os
from pathlib import Path

import pytest

from longspec.data import raw
from longspec.workflow.checks import check_sources
from tests.workflow.planning import FILE, Settings, Workflow

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


def test_a_source_that_an_older_file_has_replaced_is_refused(settings: Settings) -> None:
    """As `cp -p` leaves it. Snakemake sees nothing: it is older than its records. What the message says makes it see."""
    source, records = Path("mine.jsonl"), [json.dumps({"text": f"text {n}"}) + "\n" for n in range(40)]
    source.write_text("".join(records))
    settings.edit(str(FILE), r"^data:\n", "data:\n  mine: {source: mine.jsonl, held_out: 0.1, shards: 1}\n")
    settings.edit("config/run/demo.yaml:longcot", "name: puzzles", "name: mine")
    plan = settings.plan()
    raw.make("mine", json.loads(plan.raw_settings("mine")), Path("data/raw/mine/manifest.json"))
    check_sources(plan)
    for text in ("".join(records[:-1]), "".join(records).upper()):
        source.write_text(text)
        check_sources(plan)  # newer: Snakemake makes its records again
        os.utime(source, (1, 1))
        with pytest.raises(ValueError, match=r"mine\.jsonl: .*: touch mine\.jsonl$"):
            check_sources(plan)
        source.touch()
        check_sources(plan)
    source.write_text("".join(records))
    os.utime(source, (2, 2))
    check_sources(plan)
