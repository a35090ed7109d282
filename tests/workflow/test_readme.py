"""What the README tells a user to write is planned as it stands."""

import json
import re
from pathlib import Path

from tests.workflow.planning import Settings

ROW = {"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]}
CONFIG = {"model_type": "llama", "num_hidden_layers": 32, "vocab_size": 128256, "max_position_embeddings": 131072}


def test_the_run_that_it_shows_is_planned(settings: Settings, root: Path) -> None:
    """With the target in a folder of the test's; its facts stand beside the run, as the first plan leaves them."""
    for name in ("inputs", "my-llama"):
        (settings.folder / name).mkdir()
    (settings.folder / "inputs/chats.jsonl").write_text(json.dumps(ROW) + "\n")
    (settings.folder / "my-llama/config.json").write_text(json.dumps(CONFIG))
    page = (root / "README.md").read_text()
    run = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0].replace("/models/my-llama", "my-llama")
    (settings.folder / "mine.yaml").write_text(run)
    source = re.findall(r"^target: (\S+)", run, re.MULTILINE)[0]
    facts = {"source": source, "family": "llama", "layers": 32, "tokens": 128256, "positions": 131072}
    (settings.folder / "mine.target.json").write_text(json.dumps(facts))
    assert "--config run=mine.yaml" in page
    plan = settings.plan(run="mine.yaml")
    assert (plan.runs, plan.stages, plan.variants) == (["mine"], {"mine": ["train"]}, {"mine": ["ttt"]})
    assert len(plan.fetched) == 1
