"""Outputs that were torn, damaged or edited after their job had ended are refused by name before another job reads them."""

import json
import os
from pathlib import Path

import pytest

from longspec.workflow.jobs.seals import LARGEST, Seals
from tests.workflow.planning import Workflow

RECIPE = "results/demo/sinkpi-slicing/base/recipe.yaml"


def sealed(place: Path, **contents: str) -> Seals:
    """Files in the current folder, and their seals as the next call of Snakemake reads them."""
    for name, text in contents.items():
        Path(name).write_text(text)
    Seals(place).add(contents)
    return Seals(place)


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_what_differs_is_named_and_all_that_its_job_writes_is_to_be_removed(tmp_path: Path) -> None:
    seals = sealed(tmp_path / "seals.jsonl", manifest="{}", rows="abcd", other="1")
    seals.check([["manifest", "rows"], ["other"]])
    for damaged in ("abce", "abc"):
        Path("rows").write_text(damaged)
        with pytest.raises(ValueError, match=r"^rows: not as written .* again after: rm manifest rows$"):
            seals.check([["manifest", "rows"], ["other"]])
        seals.check([["other"]])
    Path("rows").unlink()  # Snakemake makes it again
    seals.check([["manifest", "rows"]])


def test_a_file_that_nobody_sealed_or_that_was_only_touched_is_taken(tmp_path: Path) -> None:
    seals = sealed(tmp_path / "seals.jsonl", known="1")
    Path("unknown").write_text("2")
    os.utime("known", (1, 1))
    seals.check([["known", "unknown", "missing"]])


def test_the_last_seal_of_a_file_counts_and_a_torn_line_costs_its_own_seal_alone(tmp_path: Path) -> None:
    place = tmp_path / "seals.jsonl"
    sealed(place, first="1", second="2")
    lines = place.read_bytes().rstrip(b"\n")
    place.write_bytes(lines[:-20])
    seals = sealed(place, first="another")
    assert seals.known.keys() == {"first"}
    seals.check([["first", "second"]])
    Path("first").write_text("1")
    with pytest.raises(ValueError, match="first: "):
        seals.check([["first"]])
    assert [json.loads(line)["file"] for line in place.read_bytes().splitlines() if line.endswith(b"}")] == ["first", "first"]


def test_a_file_of_a_manifest_that_is_too_large_is_not_hashed(tmp_path: Path) -> None:
    os.truncate(os.open("large", os.O_CREAT | os.O_WRONLY), LARGEST + 1)
    seals = Seals(tmp_path / "seals.jsonl")
    seals.add(["large"])
    assert seals.known == {}


def test_an_edited_recipe_trains_nothing(workflow: Workflow) -> None:
    """A digit of the frozen recipe: a training would take it for what it is to do. No job is run."""
    workflow.output(RECIPE, "--cores=1")
    assert RECIPE in (workflow.folder / ".snakemake/seals.jsonl").read_text()
    workflow.edit(RECIPE, r"^steps: \d+$", "steps: 7")
    done = workflow.call("final_draft", "--cores=1")
    told = done.stdout + done.stderr
    assert done.returncode == 1
    assert (
        f"{RECIPE}: not as written by its job any more: torn, damaged or edited; have it made again after: rm {RECIPE}" in told
    )
    assert "Traceback" not in told
    assert not (workflow.folder / "data/raw").exists()
    (workflow.folder / RECIPE).unlink()
    workflow.output(RECIPE, "--cores=1")
    assert "steps: 7\n" not in (workflow.folder / RECIPE).read_text()
