"""`snakemake compare`: what it reads and how it is called."""

import re
import shutil
from pathlib import Path

from omegaconf import OmegaConf

from longspec.config import compose_stage, differences, stages_of
from tests.workflow.planning import Workflow

STAGES = ("base", "long")


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


def test_ablations_differ_in_what_they_leave_out(root: Path) -> None:
    """Each from the reference, and that from the demo in the settings that its figures are of."""
    config = root / "benchmarks/config"

    def changed(run: str, other: str) -> dict[str, list[str]]:
        """By stage what differs."""
        pairs = {stage: [compose_stage(name, "sinkpi-slicing", stage, config) for name in (run, other)] for stage in STAGES}
        return {stage: differences(*(OmegaConf.to_container(each.recipe) for each in pair)) for stage, pair in pairs.items()}

    without_anchors = changed("ablation-reference", "ablation-plain-positions")
    assert list(without_anchors.values()) == [["draft.anchors: random -> off"]] * 2
    lag = ["draft.lag: 4 -> 1", "draft.lag_mode: random -> fixed"]
    assert list(changed("ablation-reference", "ablation-lag-1").values()) == [lag] * 2
    assert changed("demo", "ablation-reference") == {
        "base": ["draft.start: middle -> random", "optimizer.lr: 0.02 -> 0.01"],
        "long": ["optimizer.lr: 0.003 -> 0.005", "steps: 36 -> 64"],
    }
    assert stages_of("ablation-reference", config) == list(STAGES)
