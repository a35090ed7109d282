"""The runs on UltraChat and ShareGPT: planned without their targets, trained and measured on their own data, of a size that
fits.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from longspec.atomic_files import write_json
from longspec.train.estimate import plan as estimate
from tests.workflow.planning import Settings

pytestmark = pytest.mark.slow  # half a minute and more as a whole

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
# By run: its target's name, its learning rate and its batch; its target's family, published sizes and further keys.
RUNS: dict[str, tuple[tuple[str, float, int], str, tuple[int, ...], dict[str, Any]]] = {
    "llama3.1-8b-eagle3": (("llama-3.1-8b", 1e-4, 8), "llama", (4096, 14336, 32, 32, 8, 128256), {}),
    "qwen3-8b-eagle3": (("qwen3-8b", 1e-4, 8), "qwen3", (4096, 12288, 36, 32, 8, 151936), {}),
    "qwen3-30b-a3b-eagle3": (("qwen3-30b-a3b", 5e-5, 16), "qwen3_moe", (2048, 6144, 48, 32, 4, 151936), EXPERTS),
    "llama3.3-70b-eagle3": (("llama-3.3-70b", 1e-4, 8), "llama", (8192, 28672, 80, 64, 8, 128256), {}),
}
STAGES = ["ultrachat", "sharegpt"]
VOCABULARY = 32000
PATTERNS = (r"PEAK of one rank, device +([\d.]+) GiB", r"PEAK of one rank, host +([\d.]+ [GM])iB", r"([\d.]+) hours in all")


@pytest.mark.parametrize("run", RUNS)
def test_one_run_reads_its_own_data_and_fits_eight_gpus_of_80_gb(
    settings: Settings, capsys: pytest.CaptureFixture[str], root: Path, run: str
) -> None:
    """As docs/serve.md has it: the memory of a GPU and of a node, the hours, and the draft's share of the weights read."""
    (target, lr, batch), family, sizes, more = RUNS[run]
    plan = settings.plan(runs=[run])
    assert (plan.stages[run], plan.variants[run], plan.fetched) == (STAGES, ["ttt"], [target])
    assert plan.evaluation_data(run) == sorted(plan.datasets_in_use()) == sorted(STAGES)
    assert plan.vocabulary(run, "ttt") == [f"results/{run}/ttt/draft_vocabulary_{VOCABULARY}.json"]
    for stage in STAGES:
        recipe = plan.configs[run, "ttt", stage].recipe
        assert plan.rows(run, "ttt", stage)[0].endswith(f"/{stage}-long-4096-truncate/manifest.json")  # answers alone
        assert (recipe.draft.steps, recipe.optimizer.lr, recipe.global_batch) == (7, lr, batch)
    config = {"model_type": family, "head_dim": 128, "tie_word_embeddings": False, "max_position_embeddings": 131072}
    write_json(settings.folder / "target/config.json", config | dict(zip(SIZES, sizes, strict=True)) | more)
    options = ["--target", str(settings.folder / "target"), "--ranks", "8", "--rows", *["60000"] * len(STAGES)]
    for section in ("recipe", "runtime"):
        options.append(f"--{section}")
        for stage in STAGES:
            (settings.folder / f"{stage}-{section}.yaml").write_text(plan.stage_yaml(run, "ttt", stage, section))
            options.append(str(settings.folder / f"{stage}-{section}.yaml"))
    assert estimate.main(options) == 0
    told = capsys.readouterr().out
    device, host, hours = (re.findall(pattern, told)[0] for pattern in PATTERNS)
    amount, unit = host.split()
    node = 8 * (float(amount) * {"G": 2**30, "M": 2**20}[unit] + 6 * 2**30) / 1e9  # 6 GiB for each process itself
    assert node < 900  # GB of a node, by profiles/slurm/profile.yaml
    hidden, inner, layers, heads, key_values, tokens = sizes
    layer = hidden * (2 * 128 * (heads + key_values) + 3 * inner)  # of experts those that a token passes, 8 x 768
    draft = (
        layer + 128 * hidden * (heads + 2 * key_values) + hidden * VOCABULARY
    )  # inputs of queries to values of twice the width
    share = draft / (layers * layer + hidden * tokens)
    source = plan.model_source(target).removeprefix("hf:")
    row = f"| `{run}` | {source} | {float(device):.1f} | {node:.0f} | {hours} | {share:.3f} |"
    assert row in (root / "docs/serve.md").read_text()
