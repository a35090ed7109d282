"""What the README tells a user to write is planned as it stands."""

import re
from pathlib import Path

from tests.workflow.planning import Workflow


def test_the_readmes_run_and_workflow(workflow: Workflow, root: Path) -> None:
    run, settings = re.findall(r"```yaml\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)
    (workflow.folder / "config/run/mine.yaml").write_text(run)
    (workflow.folder / "config/workflow.yaml").write_text(settings)
    for source in re.findall(r"source: (\S+\.jsonl)", settings):
        (workflow.folder / source).parent.mkdir(exist_ok=True)
        (workflow.folder / source).write_text('{"text": "x", "question": "1 + 1?", "answer": "2"}\n')
    jobs = workflow.plan()
    assert {"fetch_target", "tokenize", "train", "evaluate", "report"} <= {fields["rule"] for fields in jobs.values()}
    assert "results/mine/sinkpi-slicing/longcot/checkpoint.json" in jobs
