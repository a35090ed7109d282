"""What the plan answers the rules: which files a job reads and what it is told; without Snakemake."""

import json
from pathlib import Path

from longspec.config import compose_stage
from longspec.workflow.plan import Plan
from tests.refusals import refused
from tests.workflow.planning import FILE, Settings

P = "results/demo/sinkpi-slicing"
VARIANT = ("demo", "sinkpi-slicing")


def entry(settings: Settings, name: str, text: str) -> None:
    """Give a dataset another entry."""
    settings.edit(str(FILE), rf"^  {name}: .*$", f"  {name}: {text}")


def test_the_best_stage_is_published_or_the_last_as_the_run_says(settings: Settings) -> None:
    plan = settings.plan()
    assert plan.choice(*VARIANT) == [f"{P}/final_stage.json"]
    assert plan.choosing_evaluations(*VARIANT) == [f"{P}/evaluation/{stage}.jsonl" for stage in plan.stages["demo"]]
    drafts = plan.candidates(*VARIANT)
    assert [path for path in drafts if path.endswith("model.safetensors")] == [
        f"{P}/{stage}/draft/model.safetensors" for stage in plan.stages["demo"]
    ]
    assert plan.published_option(plan.choice(*VARIANT), drafts) == ["--choice", f"{P}/final_stage.json"]
    for run, variant, stage in (("published", "sinkpi-slicing", "longcot"), ("smollm2-eagle3", "ttt", "answers")):
        last, folder = settings.plan(runs=[run]), f"results/{run}/{variant}/{stage}/draft"
        assert last.choice(run, variant) == []  # one stage alone leaves nothing to choose
        assert [path for path in last.candidates(run, variant) if not path.startswith(folder)] == []
        assert last.published_option([], last.candidates(run, variant)) == ["--draft", Path(folder)]


def test_a_choice_needs_a_task_of_held_out_records(settings: Settings) -> None:
    settings.edit("config/run/demo.yaml", r"^    (short|cot): .*\n", "")
    settings.edit("config/run/demo.yaml", r"\blong: \{data.*\}", "math: {preset: math}")
    settings.refuses("config/run/demo.yaml: final: best", "to last,", "evaluation.tasks in config/run/demo.yaml")
    settings.edit("config/run/demo.yaml", "^stages:", "final: last\nstages:")
    assert settings.plan().choice(*VARIANT) == []


def test_the_published_draft_is_measured_with_prompt_lookup_where_that_is_asked_for(settings: Settings) -> None:
    """What the other drafters are measured by stays as it is, so that nothing of theirs is measured again."""
    before = settings.plan()
    settings.edit(str(FILE), r"^  engine: longspec", "  with_lookup: 8\n  engine: longspec")
    plan = settings.plan()
    assert plan.evaluations("demo") == [*before.evaluations("demo"), f"{P}/evaluation/with-lookup.jsonl"]
    told = json.loads(before.evaluation_settings("demo"))
    assert json.loads(plan.evaluation_settings("demo", "base")) == json.loads(plan.evaluation_settings("demo")) == told
    assert json.loads(plan.evaluation_settings("demo", "with-lookup")) == told | {"with_lookup": 8}
    weights = plan.drafter_weights(*VARIANT, "with-lookup")
    assert weights == [f"{P}/final_draft/model.safetensors", f"{P}/final_draft/config.json"]
    assert plan.drafter_options("with-lookup", weights) == ["--drafter", "with-lookup", "--draft", Path(f"{P}/final_draft")]
    settings.edit(str(FILE), r"^  with_lookup: 8", "  with_lookup: 0")
    settings.refuses("config/workflow.yaml: evaluation.with_lookup", "1 to 64, or null, is 0")


def test_a_benchmarks_file_is_read_by_the_evaluation_alone(settings: Settings) -> None:
    settings.edit("config/run/demo.yaml", r"\bcot: \{.*\}", "cot: {preset: gsm8k, source: 'in/*.jsonl'}")
    (settings.folder / "in").mkdir()
    (settings.folder / "in/gsm8k.jsonl").touch()
    plan = settings.plan()
    assert plan.task_files("demo") == [Path("in/gsm8k.jsonl")]
    assert "put your final answer within" in plan.evaluation_settings("demo")
    assert plan.evaluation_data("demo") == ["stdlib", "stdlib-long"]
    assert "data/raw/puzzles/manifest.json" in plan.report_records("demo")  # still trained on
    assert not [path for name in plan.datasets_in_use() for path in plan.raw_files(name) if "in/" in str(path)]


def test_the_tokenizer_and_the_target_read_the_mixture_whatever_the_stages_read(settings: Settings) -> None:
    settings.edit("config/run/demo.yaml:long", "name: stdlib-long", "name: own")
    settings.edit(str(FILE), "^  stdlib: ", "  own: {source: stdlib, held_out: 0.1, shards: 2}\n  stdlib: ")
    plan = settings.plan()
    names = ("puzzles", "stdlib", "stdlib-long")
    assert plan.tokenizer_data("demo") == [f"data/raw/{name}/manifest.json" for name in names]
    mixture = compose_stage(*VARIANT, "base").build.mixture
    wanted = [f"data/packed/demo/{each.dataset}-base-{each.sequence_length}-split/manifest.json" for each in mixture]
    assert plan.mixture_rows("demo") == wanted
    assert "own" in plan.datasets_trained_on()


def test_what_makes_the_records_again(settings: Settings) -> None:
    """Snakemake records the settings of a dataset's records; what is not among them makes nothing again."""

    def told(plan: Plan) -> dict[str, str]:
        return {name: plan.raw_settings(name) for name in plan.data}

    before = told(settings.plan())
    settings.edit(str(FILE), r"^(  puzzles: .*\bshards: )\d+", r"\g<1>7")
    more_shards = settings.plan()
    assert told(more_shards) == before
    assert more_shards.shards("puzzles") == len(more_shards.token_shards("demo", "puzzles")) == 7
    settings.edit(str(FILE), r"\brecords: \d+", "records: 7777")
    assert [name for name, text in told(settings.plan()).items() if text != before[name]] == ["puzzles"]


def test_two_runs_are_compared_and_no_other_number(settings: Settings, root: Path) -> None:
    settings.add_benchmarks(root)
    plan = settings.plan(runs=["ablation-lag-1", "ablation-reference"])
    assert plan.compared_page() == "results/compare/ablation-lag-1_ablation-reference.html"
    with refused("runs: demo", "snakemake compare --config 'runs=[a,b]'"):
        settings.plan().compared_page()
    with refused("runs: llama3.1-8b-eagle3, qwen3-8b-eagle3", "for llama-3.1-8b and for qwen3-8b;"):
        settings.plan(runs=["llama3.1-8b-eagle3", "qwen3-8b-eagle3"]).compared_page()
    other = "config/run/ablation-lag-1.yaml"
    settings.edit(other, r"^recipe:", "evaluation: {prompts: 7, temperatures: [0.0]}\nrecipe:")
    differ = "(ablation-lag-1 -> ablation-reference): evaluation.prompts: 7 -> 40; they"
    with refused("runs: ablation-lag-1, ablation-reference", differ, f"{other} and config/workflow.yaml"):
        settings.plan(runs=plan.runs).compared_page()
    settings.edit(other, "prompts: 7", "prompts: 40")
    assert settings.plan(runs=plan.runs).compared_page() == plan.compared_page()
