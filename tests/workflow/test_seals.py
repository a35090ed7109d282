"""Outputs that were torn, damaged or edited after their job had ended are refused by name before another job reads them."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from longspec.atomic_files import describe_files, write_json
from longspec.data import raw
from longspec.workflow.checks import check_sources
from longspec.workflow.jobs.seals import LARGEST, Seals
from tests.workflow.planning import FILE, Settings, Workflow, build_all, built

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


FINAL = "results/demo/sinkpi-slicing/final_draft"
PUBLISHED = (f"{FINAL}/model.safetensors", f"{FINAL}/config.json", "results/demo/report.json", "results/demo/gates.json")


def test_every_call_looks_at_what_it_was_asked_for(workflow: Workflow) -> None:
    """A dry run that has nothing to do, too: a changed file is refused by name, and what it says to type has it made again."""
    build_all(workflow)
    assert "Nothing to be done" in workflow.output("-n", "final_draft")
    for name in PUBLISHED:
        path = workflow.folder / name
        path.write_text("another stage's")
        refused = workflow.refusal()
        told = re.search(rf"{name}: not as written by its job .* again after: (rm .*)", refused)
        assert told is not None, refused
        subprocess.run(told[1], shell=True, check=True, cwd=workflow.folder)
        assert name in workflow.output("-n", "final_draft")
        for each in told[1].split()[1:]:
            built(workflow.folder / each)
        workflow.output("--touch", "--cores=1", "--quiet")
    final = workflow.folder / FINAL
    (final / "tokenizer.json").write_text("tokens")
    write_json(final / "provenance.json", {"files": describe_files(final, ["tokenizer.json", "config.json"])})
    workflow.output("--touch", "--forceall", "--cores=1", "--quiet")
    assert "Nothing to be done" in workflow.output("-n", "final_draft")
    for spoil in (lambda: (final / "tokenizer.json").write_text("others"), (final / "tokenizer.json").unlink):
        spoil()
        told = re.search(r"tokenizer\.json: .* again after: (rm .*)", workflow.refusal())
        assert told is not None, refused
    subprocess.run(told[1], shell=True, check=True, cwd=workflow.folder)
    assert "rule assemble_final_draft" in workflow.output("-n", "final_draft")
    write_json(final / "provenance.json", {})
    workflow.output("--touch", "--forceall", "--cores=1", "--quiet")
    for name in PUBLISHED:
        (workflow.folder / name).unlink()
        assert f"Missing output files: {name}" in workflow.output("-n", "final_draft")
        built(workflow.folder / name)
        workflow.output("--touch", "--cores=1", "--quiet")


def test_a_source_that_an_older_file_has_replaced_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    """As `cp -p` leaves it. Snakemake sees nothing: it is older than its records. What the message says makes it see."""
    monkeypatch.chdir(settings.folder)
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
        with pytest.raises(ValueError, match=r"mine\.jsonl: .* data\.mine: to make its records .*: touch mine\.jsonl$"):
            check_sources(plan)
        source.touch()
        check_sources(plan)
    source.write_text("".join(records))
    os.utime(source, (2, 2))
    check_sources(plan)
