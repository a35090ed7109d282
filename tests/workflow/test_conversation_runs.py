"""The runs on UltraChat and ShareGPT: planned without their targets, trained and measured on their own data."""

import pytest

from tests.workflow.planning import Settings

pytestmark = pytest.mark.slow  # half a minute and more as a whole

# By run: its target's name, its learning rate and its batch.
RUNS = {
    "llama3.1-8b-eagle3": ("llama-3.1-8b", 1e-4, 8),
    "qwen3-8b-eagle3": ("qwen3-8b", 1e-4, 8),
    "qwen3-30b-a3b-eagle3": ("qwen3-30b-a3b", 5e-5, 16),
    "llama3.3-70b-eagle3": ("llama-3.3-70b", 1e-4, 8),
}
STAGES = ["ultrachat", "sharegpt"]


@pytest.mark.parametrize("run", RUNS)
def test_one_run_reads_its_own_data(settings: Settings, run: str) -> None:
    target, lr, batch = RUNS[run]
    plan = settings.plan(runs=[run])
    assert (plan.stages[run], plan.variants[run], plan.fetched) == (STAGES, ["ttt"], [target])
    assert plan.evaluation_data(run) == sorted(plan.datasets_in_use()) == sorted(STAGES)
    assert plan.vocabulary(run, "ttt") == [f"results/{run}/ttt/draft_vocabulary_32000.json"]
    for stage in STAGES:
        recipe = plan.configs[run, "ttt", stage].recipe
        assert plan.rows(run, "ttt", stage).endswith(f"/{stage}-long-4096-truncate/manifest.json")  # answers alone
        assert (recipe.draft.steps, recipe.optimizer.lr, recipe.global_batch) == (7, lr, batch)
