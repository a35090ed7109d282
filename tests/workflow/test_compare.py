"""`snakemake compare`: what it reads and how it is called."""

import re
import shutil

from tests.workflow.planning import Workflow


def test_a_finished_run_is_compared_with_one_that_differs_in_its_name_alone(built: Workflow) -> None:
    """Of the second run all is made, its data and target are there; of the first nothing."""
    shutil.copy(built.folder / "config/run/demo.yaml", built.folder / "config/run/demo-2.yaml")
    text = built.output("-n", "compare", "--config", "runs=[demo,demo-2]")
    outputs = re.findall(r"^    output: (\S+?),?(?: .*)?$", text, re.MULTILINE)
    assert {path.split("/")[1] for path in outputs} == {"demo-2", "compare"}
    job = next(block for block in text.split("\n\n") if "rule compare_runs:" in block)
    assert "input: results/demo/report.json, results/demo-2/report.json" in job
    assert "output: results/compare/demo_demo-2.html, results/compare/demo_demo-2.json" in job
    variants = (f"--variant {run}/sinkpi-slicing=results/{run}/sinkpi-slicing" for run in ("demo", "demo-2"))
    assert f"--run demo_demo-2 --model-dir models/demo {' '.join(variants)} --raw data/raw/" in job
