"""The runs of SmolLM2: planned without network, file or target, on answers that they share, measured on modules held out."""

import json

import pytest

from longspec.measure.tasks import HeldOut
from longspec.workflow.answers import AnswersPlan
from longspec.workflow.checks import bench_of
from tests.workflow.planning import Settings

RUNS = {"smollm2-glide": "sinkpi-slicing", "smollm2-eagle3": "ttt"}
GSM8K = "smollm2-eagle3-gsm8k"
DATA = "smollm2-questions"


def test_answers_are_shared_and_whole_questions_measured(settings: Settings) -> None:
    """As deep as was trained; apart too."""
    plan = settings.plan(runs=list(RUNS))
    bench, answers = bench_of(plan), AnswersPlan(plan)
    for run, variant in RUNS.items():
        draft = plan.configs[run, variant, "answers"].recipe.draft
        depth = draft.lag if run == "smollm2-glide" else draft.steps
        tree, chain = plan.evaluation_of[run].section["shapes"]
        assert (len(tree), chain) == (depth, depth)
        assert answers.evaluation_options(run)[0].startswith(f"{DATA}=data/answers/smollm2-135m/{DATA}/greedy-256-")
        for each, data in ((plan, DATA), (bench, "smollm2-long")):
            tasks = each.evaluation_of[run].tasks.values()
            assert all(isinstance(task, HeldOut) and task.whole_questions and task.data == data for task in tasks)


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
