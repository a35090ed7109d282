"""Prompts of the hub in the plan: fetched once, pinned, handed to each evaluation, and never of what is trained on."""

from pathlib import Path

import pytest

from tests.workflow.planning import Settings

RUN = "config/run/published.yaml"


def test_the_published_run_is_measured_on_its_own_held_out_records_and_on_benchmarks(settings: Settings) -> None:
    plan = settings.plan(runs=["published"])
    assert plan.evaluation_data("published") == ["long-data", "longcot", "slimpajama"]
    sources = {task.source: task for task in plan.hub_prompts.values()}
    names = ["HuggingFaceH4/MATH-500", "HuggingFaceH4/aime_2024", "openai/gsm8k", "zai-org/LongBench"]
    assert sorted("/".join(str(source).removeprefix("hf:").split("/")[:2]) for source in sources) == names
    assert plan.task_files("published") == sorted(Path(f"data/hub/{name}/manifest.json") for name in plan.hub_prompts)
    members = [task.member for task in plan.evaluation_of["published"].tasks.values() if getattr(task, "member", "")]
    assert sorted(members) == [f"data/{name}.jsonl" for name in ("gov_report", "lcc", "multi_news", "qmsum", "repobench-p")]
    for variant in ("base", "sinkpi-slicing"):
        losses = [config.recipe.draft.loss for config in settings.plan(runs=["published"], variants=[variant]).configs.values()]
        assert losses == ["hard"] * 3


def test_prompts_that_are_trained_on_are_refused_and_another_split_is_not(settings: Settings) -> None:
    settings.edit(RUN, r"gsm8k: \{preset: gsm8k\}", "gsm8k: {source: 'hf:DKYoon/SlimPajama-6B/data/validation-*.parquet'}")
    assert settings.plan(runs=["published"]).hub_prompts
    settings.edit(RUN, "data/validation-", "data/train-")
    with pytest.raises(ValueError, match=rf"^{RUN}: evaluation\.tasks\.gsm8k\.source: .* is trained on, as data\.slimpajama"):
        settings.plan(runs=["published"])
