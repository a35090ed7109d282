"""`snakemake compare`: what it reads and how it is called, and choices that are no two runs."""

import re
import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from longspec.config import compose_stage, differences, stages_of
from tests.workflow.planning import Workflow


def add_run(workflow: Workflow) -> None:
    """A second run, demo-2, that differs in its name alone."""
    config = workflow.folder / "config"
    shutil.copy(config / "run/demo.yaml", config / "run/demo-2.yaml")


def test_two_runs_are_compared_after_their_reports(workflow: Workflow) -> None:
    add_run(workflow)
    text = workflow.output("-n", "compare", "--config", "runs=[demo,demo-2]")
    job = next(block for block in text.split("\n\n") if "rule compare_runs:" in block)
    assert "input: results/demo/report.json, results/demo-2/report.json" in job
    assert "output: results/compare/demo_demo-2.html, results/compare/demo_demo-2.json" in job
    variants = (f"--variant {run}/sinkpi-slicing=results/{run}/sinkpi-slicing" for run in ("demo", "demo-2"))
    assert f"--run demo_demo-2 --model-dir models/demo {' '.join(variants)} --raw data/raw/" in job
    assert "--out results/compare/demo_demo-2.html" in job


def test_what_are_not_two_runs_is_refused(workflow: Workflow) -> None:
    done = workflow.call("-n", "compare", "--config", "runs=[demo]")
    assert done.returncode == 1
    assert "runs: demo: two runs can be compared; choose them: snakemake compare" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_snakemakes_own_report_holds_the_page(built: Workflow) -> None:
    """Without the internet: all that its page loads comes with Snakemake."""
    page = built.folder / "results/demo/report.html"
    page.write_text("<!doctype html><title>ours</title>")
    built.output("--touch", "--forceall", "--cores=1", "--quiet")  # it is to be taken as it is
    built.output("final_draft", "--report", "all.html")
    text = (built.folder / "all.html").read_text()
    assert "How good the drafts of run <strong>demo</strong> are" in text
    assert "results/demo/report.html" in text


def test_a_finished_run_is_not_made_again_for_the_comparison(built: Workflow) -> None:
    """Of the second run all is made, its data and target are there; of the first nothing."""
    add_run(built)
    text = built.output("-n", "compare", "--config", "runs=[demo,demo-2]")
    outputs = re.findall(r"^    output: (\S+?),?(?: .*)?$", text, re.MULTILINE)
    assert {path.split("/")[1] for path in outputs} == {"demo-2", "compare"}


@pytest.mark.parametrize(
    ("run", "told"),
    [
        ("plain-positions", ["draft.anchors: random -> off"]),
        ("lag-1", ["draft.lag: 4 -> 1", "draft.lag_mode: random -> fixed"]),
    ],
)
@pytest.mark.parametrize("stage", ["base", "long"])
def test_an_ablation_differs_from_its_reference_in_what_it_leaves_out(
    root: Path, run: str, told: list[str], stage: str
) -> None:
    config, runs = root / "benchmarks/config", ("ablation-reference", f"ablation-{run}")
    whole, without = (compose_stage(name, "sinkpi-slicing", stage, config) for name in runs)
    plain = [OmegaConf.to_container(config.recipe) for config in (whole, without)]
    assert differences(*plain) == told  # type: ignore[arg-type]
    assert [stages_of(name, config) for name in runs] == [["base", "long"]] * 2


def test_the_reference_is_the_demo_with_the_settings_that_its_figures_are_of(root: Path) -> None:
    told = {}
    for stage in ("base", "long"):
        demo, reference = (
            compose_stage(run, "sinkpi-slicing", stage, root / "benchmarks/config") for run in ("demo", "ablation-reference")
        )
        plain = [OmegaConf.to_container(config.recipe) for config in (demo, reference)]
        told[stage] = differences(*plain)  # type: ignore[arg-type]
    assert told == {
        "base": ["draft.start: middle -> random", "optimizer.lr: 0.02 -> 0.01"],
        "long": ["optimizer.lr: 0.003 -> 0.005", "steps: 36 -> 64"],
    }


def test_ablations_share_the_demos_target_and_data(built: Workflow, root: Path) -> None:
    built.add_benchmarks(root)
    runs = "runs=[ablation-plain-positions,ablation-reference]"
    rules = set(re.findall(r"rule (\w+):", built.output("-n", "compare", "--config", runs)))
    assert {"train", "evaluate", "report", "compare_runs"} <= rules
    assert not rules & {"build_tokenizer", "train_target", "tokenize", "raw"}
