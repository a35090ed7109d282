"""Files that were damaged, swapped or edited after their job had ended are refused by name at the plan or before a job runs."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from longspec.atomic_files import describe_files, write_json
from longspec.data import raw
from longspec.workflow.checks import check_published, check_sources
from tests.workflow.planning import FILE, Settings, Workflow

RECIPE = "results/demo/sinkpi-slicing/base/recipe.yaml"
FINAL = Path("results/demo/sinkpi-slicing/final_draft")


def final_draft(folder: Path) -> Path:
    """A final draft of some files, with what it lists of them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).write_text(name)
    write_json(folder / "provenance.json", {"files": describe_files(folder, ["model.safetensors", "tokenizer.json"])})
    return folder


def test_a_changed_file_of_a_final_draft_is_refused(settings: Settings) -> None:
    plan, folder = settings.plan(), final_draft(settings.folder / FINAL)
    check_published(plan)
    before = (folder / "tokenizer.json").stat()
    for text in ("TOKENIZER.JSON", ""):
        (folder / "tokenizer.json").write_text(text)
        os.utime(folder / "tokenizer.json", ns=(before.st_atime_ns, before.st_mtime_ns - 10**9))  # older, as `cp -p` leaves it
        with pytest.raises(ValueError, match=rf"tokenizer\.json: .* again after: rm {FINAL}/provenance.json"):
            check_published(plan)
    (folder / "tokenizer.json").write_text("tokenizer.json")
    (folder / "model.safetensors").unlink()  # a declared output, which Snakemake misses by itself
    check_published(plan)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json: missing"):
        check_published(plan)


@pytest.mark.slow
def test_calls_refuse_an_edited_recipe_and_a_changed_final_draft(built: Workflow) -> None:
    """A digit of the frozen recipe: a training would take it for what it is to do. No job is run."""
    recipe = built.folder / RECIPE
    recipe.write_text("steps: 7\n")
    done = built.call(f"{Path(RECIPE).parent}/checkpoint.json", "--cores=1")
    assert done.returncode == 1
    assert f"{RECIPE}: edited since it was frozen" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    (final_draft(built.folder / FINAL) / "tokenizer.json").write_text("others")
    refused = built.refusal()
    assert f"{FINAL}/tokenizer.json: " in refused
    subprocess.run(refused.partition("again after: ")[2].splitlines()[0], shell=True, check=True, cwd=built.folder)
    assert "rule assemble_final_draft" in built.output("-n", "final_draft")


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
