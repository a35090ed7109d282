"""The runs of SmolLM2: planned without network, file or target, on answers that they share, measured on modules held out."""

import json

import pytest

from longspec.measure.tasks import HeldOut
from longspec.workflow.answers import AnswersPlan
from longspec.workflow.checks import bench_of
from tests.workflow.planning import Settings, Workflow

RUNS = {"smollm2-glide": "sinkpi-slicing", "smollm2-eagle3": "ttt"}
GSM8K = "smollm2-eagle3-gsm8k"
DATA = "smollm2-questions"


def test_both_share_answers_and_rows_and_each_stores_its_own_states(workflow: Workflow) -> None:
    jobs = workflow.plan("--config", f"runs=[{','.join(RUNS)}]")
    rules = [fields["rule"] for fields in jobs.values()]
    wanted = {"raw": 1, "answer": 2, "merge_answers": 1, "tokenize": 2, "pack": 1, "train": 2, "evaluate": 8}
    assert {rule: rules.count(rule) for rule in wanted} == wanted
    assert rules.count("build_states") == 4
    assert not [path for path in jobs if "stdlib" in path or "puzzles" in path or "gsm8k" in path or "smollm2-long" in path]
    for run, variant in RUNS.items():
        measured = jobs[f"results/{run}/{variant}/evaluation/answers.jsonl"]
        assert f"--raw {DATA}=data/answers/smollm2-135m/{DATA}/greedy-256-" in measured["command"]
        assert f"results/{run}/{variant}/draft_vocabulary_8192.json" in measured["input"]


@pytest.mark.parametrize(("run", "variant"), RUNS.items())
def test_a_run_trains_answers_alone_and_measures_whole_questions(settings: Settings, run: str, variant: str) -> None:
    plan = settings.plan(runs=[run])
    recipe = plan.configs[run, variant, "answers"].recipe
    assert plan.rows(run, variant, "answers")[0].endswith(f"/{DATA}-long-1536-split/manifest.json")  # answers alone
    evaluation = plan.evaluation_of[run]
    assert plan.vocabulary_while_drafting(run, variant) == [f"results/{run}/{variant}/draft_vocabulary_8192.json"]
    depth = recipe.draft.lag if run == "smollm2-glide" else recipe.draft.steps
    tree, chain = evaluation.section["shapes"]
    assert (len(tree), chain) == (depth, depth)  # as deep as was trained
    bench = bench_of(plan)
    for tasks, data in ((evaluation.tasks, DATA), (bench.evaluation_of[run].tasks, "smollm2-long")):
        assert all(isinstance(task, HeldOut) and task.whole_questions and task.data == data for task in tasks.values())
    assert max(task.context[1] for task in bench.evaluation_of[run].tasks.values() if isinstance(task, HeldOut)) == 8000
    assert AnswersPlan(bench).evaluation_options(run) == ["smollm2-long=data/raw/smollm2-long/manifest.json"]


def test_gsm8k_is_read_where_its_file_is_and_the_other_runs_do_without(settings: Settings) -> None:
    with pytest.raises(ValueError, match=r"data\.gsm8k-train\.source: inputs/gsm8k_train\.jsonl: no such file"):
        settings.plan(runs=[GSM8K])
    (settings.folder / "inputs").mkdir()
    (settings.folder / "inputs/gsm8k_train.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    plan = settings.plan(runs=[GSM8K, "smollm2-eagle3"])
    assert plan.stages[GSM8K] == ["answers", "gsm8k"]
    assert plan.rows(GSM8K, "ttt", "answers") == plan.rows("smollm2-eagle3", "ttt", "answers")
    first, same = (plan.stage_yaml(run, "ttt", "answers", "recipe") for run in (GSM8K, "smollm2-eagle3"))
    assert first == same
    assert json.loads(plan.raw_settings("gsm8k-train"))["unanswered"] is True
    answers = AnswersPlan(plan)
    assert answers.records("smollm2-135m", "gsm8k-train").startswith("data/answers/smollm2-135m/gsm8k-train/greedy-256-")
    assert set(plan.evaluation_data(GSM8K)) == {DATA, "gsm8k-train"}
