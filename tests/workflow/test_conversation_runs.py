"""The runs on UltraChat and ShareGPT: planned without their targets, measured on their own data, of a size that fits."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from longspec.atomic_files import write_json
from longspec.methods.eagle3.settings import layer_weights
from longspec.models.target_config import read_target_config
from longspec.train.estimate import plan as estimate
from longspec.workflow.checks import forgetting_warning
from longspec.workflow.plan import Plan
from tests.workflow.planning import FILE, Settings

pytestmark = pytest.mark.slow  # half a minute and more as a whole

LLAMA_3: dict[str, Any] = {
    "model_type": "llama",
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
QWEN_3: dict[str, Any] = {"num_attention_heads": 32, "head_dim": 128, "vocab_size": 151936, "rope_theta": 1e6}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
# By run: its target's name, its published shape, its parameters in 10**9.
TARGETS: dict[str, tuple[str, dict[str, Any], float]] = {
    "llama3.1-8b-eagle3": (
        "llama-3.1-8b",
        {**LLAMA_3, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
        8.03,
    ),
    "qwen3-8b-eagle3": (
        "qwen3-8b",
        {
            **QWEN_3,
            "model_type": "qwen3",
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "max_position_embeddings": 40960,
        },
        8.19,
    ),
    "qwen3-30b-a3b-eagle3": (
        "qwen3-30b-a3b",
        {
            **QWEN_3,
            **EXPERTS,
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "max_position_embeddings": 262144,
        },
        30.5,
    ),
    "llama3.3-70b-eagle3": (
        "llama-3.3-70b",
        {**LLAMA_3, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
        70.6,
    ),
}
RUNS = list(TARGETS)
FIRST = RUNS[0]
STAGES = ["ultrachat", "sharegpt"]
RUN = f"config/run/{FIRST}.yaml"
PATTERNS = (r"PEAK of one rank, device +([\d.]+) GiB", r"([\d.]+) hours in all")


def place_target(settings: Settings, run: str) -> Path:
    """A config.json where the target will lie, without weights; returns its manifest."""
    name, shape, _ = TARGETS[run]
    folder = settings.folder / "models" / name
    write_json(folder / "target/config.json", {"tie_word_embeddings": False, **shape})
    write_json(folder / "target_manifest.json", {"path": str(folder / "target"), "files": {}})
    return folder / "target_manifest.json"


@pytest.mark.parametrize("run", RUNS)
def test_one_run_reads_its_own_data_and_fits_eight_gpus_of_80_gb(
    settings: Settings, capsys: pytest.CaptureFixture[str], root: Path, run: str
) -> None:
    target = place_target(settings, run)
    plan = settings.plan(runs=[run])
    assert (plan.stages[run], plan.variants[run], plan.fetched) == (STAGES, ["ttt"], [TARGETS[run][0]])
    assert plan.evaluation_data(run) == sorted(plan.datasets_in_use()) == sorted(STAGES)
    assert plan.vocabulary(run, "ttt") == [f"results/{run}/ttt/draft_vocabulary_32000.json"]
    assert forgetting_warning(plan) == ""
    for stage in STAGES:
        recipe = plan.configs[run, "ttt", stage].recipe
        assert plan.rows(run, "ttt", stage).endswith(f"/{stage}-long-4096-truncate/manifest.json")  # answers alone
        assert (recipe.draft.steps, recipe.optimizer.lr, recipe.global_batch) == (
            (7, 5e-5, 16) if "30b" in run else (7, 1e-4, 8)
        )
    told = estimated(settings, plan, run, target, capsys)
    assert told.count("  fits 80.00 GiB with ") == len(STAGES)
    bytes_of_target = float(told.split("parameters; target ")[1].split(" GiB")[0]) * 2**30
    assert bytes_of_target == pytest.approx(2e9 * TARGETS[run][2], rel=0.005)
    peak, hours = (re.findall(pattern, told)[0] for pattern in PATTERNS)
    node = json.loads(estimated(settings, plan, run, target, capsys, "--json"))[0]["memory_mb"]
    assert node < 900_000  # MB of a node, by profiles/slurm/profile.yaml
    cost = cost_of_a_draft_step(read_target_config(target.parent / "target"), 32000)
    figures = f"{float(peak):.1f} | {node / 1000:.0f} | {hours} | {cost:.3f}"
    source = plan.model_source(TARGETS[run][0]).removeprefix("hf:")
    assert f"| `{run}` | {source} | {figures} |" in (root / "docs/serve.md").read_text()


def cost_of_a_draft_step(target: Any, proposed: int) -> float:
    """The weights that a draft step reads for a token, over those of a step of the target: `c` in docs/choose.md."""
    width = getattr(target, "num_experts_per_tok", 1) * getattr(target, "moe_intermediate_size", target.intermediate_size)
    attention = 2 * target.head_dim * (target.num_attention_heads + target.num_key_value_heads)
    whole = target.num_hidden_layers * (attention + 3 * width) + target.vocab_size
    return layer_weights(target) / target.hidden_size / whole + proposed / whole


def estimated(settings: Settings, plan: Plan, run: str, target: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """The words of `python -m longspec.train plan` on both stages, which must fit."""
    options = ["--target", str(target), "--ranks", "8", "--rows", *["60000"] * len(STAGES), *more]
    for section in ("recipe", "runtime"):
        options.append(f"--{section}")
        for stage in STAGES:
            path = settings.folder / f"{stage}-{section}.yaml"
            path.write_text(plan.stage_yaml(run, "ttt", stage, section))
            options.append(str(path))
    assert estimate.main(options) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "old", "new", "told"),
    [
        (RUN, "new_tokens: 128", "new_tokens: 128\n  shapes: [3, 3]", rf"^{FILE}, {RUN}: evaluation\.temperatures, .* twice"),
        (str(FILE), r"engine: longspec", "engine: vllm", rf"^{FILE}: evaluation\.shapes: tree 4-16"),
        (RUN, "data: sharegpt", "data: sharegtp", rf"{RUN}: evaluation\.tasks\.sharegpt\.data: there is no dataset 'sharegtp'"),
        ("config/stage/sharegpt.yaml", "epochs: 10", "epoch: 10", r"epoch"),
    ],
)
def test_a_wrong_key_names_the_file_that_holds_it(settings: Settings, path: str, old: str, new: str, told: str) -> None:
    settings.edit(str(FILE), r"\bshapes: .*$", "shapes: [[4, 16]]")
    settings.edit(path, old, new)
    with pytest.raises(ValueError, match=told):
        settings.plan(runs=[FIRST])
